"""Searches texts for patterns of the `regex` package, and measures how similar two texts are.

`fuzzy_match` by rapidfuzz; `bleu`, `gleu` and `meteor` by NLTK; ROUGE (Lin 2004,
aclanthology.org/W04-1013) here. All but `fuzzy_match` compare words in lower case. BLEU is of one
sentence, up to 4 words at a time, smoothed by method 1 of Chen and Cherry (2014). METEOR knows
stems but no synonyms: those would need WordNet, which is not installed.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import regex

_WORD = re.compile(r"\w+")

Words = list[str]


def prepare(function: str) -> None:
    if function == "similarity":
        from nltk.translate import bleu_score, gleu_score, meteor_score  # noqa: F401
        from rapidfuzz import distance, fuzz  # noqa: F401
    else:
        import regex  # noqa: F401


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


MAX_PATTERNS = 4
"""Kept compiled. A pattern may be large, and a job has one or two."""


def groups(pattern: str, flags: list[str]) -> dict[str, Any]:
    """Returns the `count` of a pattern's groups and their `names`, or what is wrong with it, as
    `fault`."""
    import regex

    try:
        compiled = _compiled(pattern, tuple(flags))
    except (regex.error, RecursionError, OverflowError, ValueError) as error:
        return {"fault": str(error)}
    return {"count": compiled.groups, "names": sorted(compiled.groupindex)}


def find(
    pattern: str, flags: list[str], mode: str, which: str, group: int | str, text: str, cpu_s: float
) -> dict[str, Any]:
    """Returns, as `found`, what the group matched ("" if it took no part, None if the pattern was
    not found); `late` if the search took longer than `cpu_s`."""
    compiled = _compiled(pattern, tuple(flags))
    try:
        match = _match(compiled, mode, which, text, cpu_s)
    except TimeoutError:
        return {"found": None, "late": True}
    return {"found": None if match is None else match[group] or "", "late": False}


def _match(
    compiled: regex.Pattern[str], mode: str, which: str, text: str, cpu_s: float
) -> regex.Match[str] | None:
    if mode == "full":
        return compiled.fullmatch(text.strip(), timeout=cpu_s)
    if which == "first":
        return compiled.search(text, timeout=cpu_s)
    return next(iter(deque(compiled.finditer(text, timeout=cpu_s), maxlen=1)), None)


@lru_cache(MAX_PATTERNS)
def _compiled(pattern: str, flags: tuple[str, ...]) -> regex.Pattern[str]:
    import regex

    return regex.compile(
        pattern, flags=sum(getattr(regex, flag) for flag in flags), cache_pattern=False
    )
