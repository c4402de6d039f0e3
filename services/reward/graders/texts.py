"""Graders that compare texts: `exact_match`, and OpenAI's `string_check` and `text_similarity`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from services.reward.grading import templates
from services.reward.grading.limited.pool import Call, NoValue
from services.reward.grading.limited.texts import has_words
from services.reward.grading.registry import (
    Column,
    Grader,
    Params,
    grader,
    wrong_row,
)
from shared.errors import BadRequest
from shared.wire import Part, ScoreItem


class ExactMatchParams(Params):
    """The expected text, and how a completion is compared with it."""

    column: Column = "answer"
    """The column of the expected text or whole number."""

    strip: bool = True
    """Blanks around either side do not count."""

    ignore_case: bool = False
    """Capital and small letters are the same."""


@grader("exact_match")
class ExactMatch(Grader[ExactMatchParams]):
    """1 for a completion equal to the row's `column`, else 0."""

    items_per_call = 1
    has_full_mark = True

    async def grade(self, items: Sequence[ScoreItem]) -> Sequence[Part]:
        return [self._part(item) for item in items]

    async def check_row(self, row: Mapping[str, Any]) -> None:
        self._wanted(row)

    def reference(self, row: Mapping[str, Any]) -> str:
        return str(self._wanted(row))

    def _wanted(self, row: Mapping[str, Any]) -> str | int:
        value = row[self.params.column]
        if type(value) not in (str, int):
            fault = (
                f"column {self.params.column!r} is {value!r:.80}; expected text or a whole number"
            )
            raise wrong_row(fault)
        return value

    def _part(self, item: ScoreItem) -> Part:
        value = self._wanted(item.row)
        if self._normal(item.completion) == self._normal(str(value)):
            return Part(value=1.0)
        return Part(value=0.0, verdict="wrong", detail=f"wanted {value!r:.80}")

    def _normal(self, text: str) -> str:
        text = text.strip() if self.params.strip else text
        return text.casefold() if self.params.ignore_case else text


class StringCheckParams(Params):
    """Two texts, made from templates, and how they compare."""

    type: Literal["string_check"] = "string_check"
    """The grader's name, as OpenAI's grader objects have it."""

    name: str = "string_check"
    """What OpenAI's grader objects call it. What metrics call it is the reward's own `name`."""

    input: str
    """A template, usually `{{ sample.output_text }}`, which is the completion."""

    reference: str
    """A template of what it is compared with, for example `{{ item.answer }}`, which is the row's
    column `answer`."""

    operation: Literal["eq", "ne", "like", "ilike"]
    """"eq": the same. "ne": not the same. "like": `input` contains `reference`. "ilike": the same,
    whatever the case."""


@grader("string_check")
class StringCheck(Grader[StringCheckParams]):
    """1 if `input` and `reference`, two templates, compare as `operation` says, else 0. As OpenAI's
    grader of that name."""

    items_per_call = 1

    async def check(self, columns: Sequence[str]) -> None:
        for template in (self.params.input, self.params.reference):
            templates.check(template, columns, self.spec.label)

    def reference(self, row: Mapping[str, Any]) -> str | None:
        """Returns the text that the completion has to be; None if `input` is not the completion
        itself, or other completions are right too."""
        compared = self.params.operation == "eq" and templates.is_output(self.params.input)
        if not compared or "sample." in self.params.reference:
            return None
        return templates.render(
            self.params.reference, ScoreItem(prompt="", completion="", row=dict(row))
        )

    async def check_row(self, row: Mapping[str, Any]) -> None:
        """Raises GradingFailed for an empty reference, which every text contains."""
        if "sample." in self.params.reference or self.params.operation not in ("like", "ilike"):
            return
        if not templates.render(
            self.params.reference, ScoreItem(prompt="", completion="", row=dict(row))
        ):
            fault = "the reference is empty, and every text contains that"
            raise wrong_row(fault)

    async def grade(self, items: Sequence[ScoreItem]) -> Sequence[Part]:
        return [self._grade(item) for item in items]

    def _grade(self, item: ScoreItem) -> Part:
        given, wanted = (
            templates.render(template, item)
            for template in (self.params.input, self.params.reference)
        )
        holds = {
            "eq": given == wanted,
            "ne": given != wanted,
            "like": bool(wanted) and wanted in given,
            "ilike": bool(wanted) and wanted.casefold() in given.casefold(),
        }[self.params.operation]
        if holds:
            return Part(value=1.0)
        return Part(
            value=0.0,
            verdict="wrong",
            detail=f"not {given!r:.80} {self.params.operation} {wanted!r:.80}",
        )


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
    """A similarity of at least this earns 1, and a lower one 0. None: the similarity itself is the
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
        """Raises GradingFailed for a row's reference to which no text can be similar."""
        by_words = self.params.evaluation_metric != "fuzzy_match"
        if COMPLETION in self.params.reference:
            return
        if not wanted.strip() or (by_words and not has_words(wanted)):
            fault = f"the reference is {wanted!r:.80}, which has no word to be similar to"
            raise wrong_row(fault)

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
            "limited.texts", "similarity", (self.params.evaluation_metric, given, wanted), CPU_S
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
