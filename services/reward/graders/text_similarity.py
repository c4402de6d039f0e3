"""OpenAI's `text_similarity`: how alike two texts are, 0 to 1.

`fuzzy_match` by rapidfuzz; `bleu`, `gleu` and `meteor` by NLTK; ROUGE (Lin 2004,
aclanthology.org/W04-1013) here. All but `fuzzy_match` compare words in lower case. BLEU is of one
sentence, up to 4 words at a time, smoothed by method 1 of Chen and Cherry (2014). METEOR knows
stems but no synonyms: those would need WordNet, which is not installed. Left out: `cosine`, which
needs an embedding model.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from services.reward.grading import templates
from services.reward.grading.registry import Grader, Params, grader
from shared.errors import BadRequest
from shared.wire import Part, ScoreItem

MAX_CHARS = 20_000
_WORD = re.compile(r"\w+")

Words = list[str]


class TextSimilarityParams(Params):
    """`input` and `reference` are templates. `pass_threshold`: 1 from there on and 0 below, instead
    of the similarity itself."""

    type: Literal["text_similarity"] = "text_similarity"
    name: str = "text_similarity"
    input: str
    reference: str
    evaluation_metric: Literal[
        "cosine",
        "fuzzy_match",
        "bleu",
        "gleu",
        "meteor",
        "rouge_1",
        "rouge_2",
        "rouge_3",
        "rouge_4",
        "rouge_5",
        "rouge_l",
    ]
    pass_threshold: float | None = None


@grader("text_similarity")
class TextSimilarity(Grader[TextSimilarityParams]):
    """How alike `input` and `reference`, two templates, are by `evaluation_metric`, 0 to 1. As
    OpenAI's grader of that name."""

    pure = True
    items_per_call = 1

    async def check(self, columns: Sequence[str]) -> None:
        if self.params.evaluation_metric == "cosine":
            raise BadRequest(
                f"reward {self.spec.label!r}: 'cosine' needs an embedding model, which this "
                "service does not have"
            )
        for template in (self.params.input, self.params.reference):
            templates.check(template, columns, self.spec.label)

    def content(self, item: ScoreItem) -> Any:
        return self._texts(item)

    async def grade(self, items: Sequence[ScoreItem]) -> Sequence[Part]:
        return [await self._grade(item) for item in items]

    def _texts(self, item: ScoreItem) -> list[str]:
        return [
            templates.render(template, item)
            for template in (self.params.input, self.params.reference)
        ]

    async def _grade(self, item: ScoreItem) -> Part:
        given, wanted = self._texts(item)
        if max(len(given), len(wanted)) > MAX_CHARS:
            return Part(
                value=0.0,
                verdict="wrong",
                detail=f"texts of {len(given)} and {len(wanted)} characters, at most {MAX_CHARS}",
            )
        likeness = await asyncio.to_thread(similarity, self.params.evaluation_metric, given, wanted)
        threshold = self.params.pass_threshold
        value = likeness if threshold is None else float(likeness >= threshold)
        return Part(
            value=value,
            verdict="ok" if value else "wrong",
            detail=f"{self.params.evaluation_metric} {likeness:.4f}",
        )


def similarity(metric: str, given: str, wanted: str) -> float:
    """Returns how alike two texts are by `metric`, 0 to 1."""
    if metric == "fuzzy_match":
        from rapidfuzz import fuzz

        return fuzz.ratio(given, wanted) / 100
    words = [_WORD.findall(text.lower()) for text in (given, wanted)]
    if not all(words):
        return float(words[0] == words[1])
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
