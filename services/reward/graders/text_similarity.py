"""OpenAI's `text_similarity`: how alike two texts are, 0 to 1.

The measures are in `grading/limited/similarity.py`. Left out: `cosine`, which
needs an embedding model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from services.reward.grading import templates
from services.reward.grading.limited.pool import Call, NoValue
from services.reward.grading.limited.similarity import has_words
from services.reward.grading.registry import Grader, GradingFailed, Params, grader
from shared.errors import BadRequest
from shared.wire import Part, ScoreItem

MAX_CHARS = 20_000
COMPLETION = "sample.output_text"
CPU_S = 10.0
"""METEOR of two texts of 20,000 characters takes about 2 s."""


class TextSimilarityParams(Params):
    """Two texts, made from templates, and how their similarity is measured."""

    type: Literal["text_similarity"] = "text_similarity"
    """The grader's name, as OpenAI's grader objects have it."""

    name: str = "text_similarity"
    """What OpenAI's grader objects call it. What metrics call it is the reward's own `name`."""

    input: str
    """A template, usually `{{ sample.output_text }}`, which is the completion."""

    reference: str
    """A template of what it is compared with, for example `{{ item.answer }}`, which is the row's
    column `answer`."""

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
    """How similarity is measured. "cosine" is refused: it needs an embedding model."""

    pass_threshold: float | None = None
    """A similarity from here on earns 1 and a lower one 0. None: the similarity itself is the
    reward."""


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

    async def check_row(self, row: Mapping[str, Any]) -> None:
        self._check_reference(self._texts(ScoreItem(prompt="", completion="", row=dict(row)))[1])

    def _check_reference(self, wanted: str) -> None:
        """Raises GradingFailed for a reference of a row that nothing can be similar to."""
        by_words = self.params.evaluation_metric != "fuzzy_match"
        if COMPLETION in self.params.reference:
            return
        if not wanted.strip() or (by_words and not has_words(wanted)):
            fault = f"the reference is {wanted!r:.80}, which has no word to be similar to"
            raise GradingFailed(fault, "invalid_variable_error")

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
        self._check_reference(wanted)
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
