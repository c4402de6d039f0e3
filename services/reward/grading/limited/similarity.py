"""How similar two texts are.

`fuzzy_match` by rapidfuzz; `bleu`, `gleu` and `meteor` by NLTK; ROUGE (Lin 2004,
aclanthology.org/W04-1013) here. All but `fuzzy_match` compare words in lower case. BLEU is of one
sentence, up to 4 words at a time, smoothed by method 1 of Chen and Cherry (2014). METEOR knows
stems but no synonyms: those would need WordNet, which is not installed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

_WORD = re.compile(r"\w+")

Words = list[str]


def prepare() -> None:
    from nltk.translate import bleu_score, gleu_score, meteor_score  # noqa: F401
    from rapidfuzz import distance, fuzz  # noqa: F401


def has_words(text: str) -> bool:
    return _WORD.search(text) is not None


def similarity(metric: str, given: str, wanted: str) -> float:
    """Returns how similar two texts are by `metric`, 0 to 1."""
    if metric == "fuzzy_match":
        from rapidfuzz import fuzz

        return fuzz.ratio(given, wanted) / 100
    words = [_WORD.findall(text.lower()) for text in (given, wanted)]
    if not all(words):
        return 0.0
    if metric == "rouge_l":
        return rouge_l(*words)
    if metric.startswith("rouge_"):
        return rouge_n(*words, size=int(metric[-1]))
    return _by_nltk(metric)(*words)


def rouge_n(given: Words, wanted: Words, size: int) -> float:
    """Returns the F1 of the runs of `size` words that two texts share."""
    ours, theirs = (
        Counter(zip(*(words[start:] for start in range(size)), strict=False))
        for words in (given, wanted)
    )
    return _f1((ours & theirs).total(), ours.total(), theirs.total())


def rouge_l(given: Words, wanted: Words) -> float:
    """Returns the F1 of the longest common subsequence of words."""
    from rapidfuzz.distance import LCSseq

    return _f1(LCSseq.similarity(given, wanted), len(given), len(wanted))


def _f1(shared: int, num_given: int, num_wanted: int) -> float:
    return 2 * shared / (num_given + num_wanted) if shared else 0.0


def _by_nltk(metric: str) -> Callable[[Words, Words], float]:
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
    from nltk.translate.gleu_score import sentence_gleu
    from nltk.translate.meteor_score import meteor_score

    class NoSynonyms:
        def synsets(self, word: str) -> list[Any]:
            return []

    no_synonyms: Any = NoSynonyms()
    metrics: dict[str, Callable[[Words, Words], Any]] = {
        "bleu": lambda given, wanted: sentence_bleu(
            [wanted], given, smoothing_function=SmoothingFunction().method1
        ),
        "gleu": lambda given, wanted: sentence_gleu([wanted], given),
        "meteor": lambda given, wanted: meteor_score([wanted], given, wordnet=no_synonyms),
    }
    return lambda given, wanted: float(metrics[metric](given, wanted))
