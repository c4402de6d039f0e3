"""OpenAI's `text_similarity`: how alike two texts are, 0 to 1.

The measures are in `grading/limited/similarity.py`. Left out: `cosine`, which
needs an embedding model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from services.reward.grading import templates
from services.reward.grading.limited.pool import Call, NoValue
from services.reward.grading.registry import Grader, Params, grader
from shared.errors import BadRequest
from shared.wire import Part, ScoreItem

MAX_CHARS = 20_000
CPU_S = 10.0
"""METEOR of two texts of 20,000 characters takes about 2 s."""


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
    """How similar `input` and `reference`, two templates, are by `evaluation_metric`, 0 to 1. As
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
        call = Call(
            "similarity", "similarity", (self.params.evaluation_metric, given, wanted), CPU_S
        )
        try:
            similarity: float = await self.tools.limited.run(call)
        except NoValue as error:
            return error.part()
        threshold = self.params.pass_threshold
        value = similarity if threshold is None else float(similarity >= threshold)
        return Part(
            value=value,
            verdict="ok" if value else "wrong",
            detail=f"{self.params.evaluation_metric} {similarity:.4f}",
        )
