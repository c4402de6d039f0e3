"""OpenAI's `string_check`: two texts, made from templates, compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from services.reward.grading import templates
from services.reward.grading.registry import Grader, GradingFailed, Params, grader
from shared.wire import Part, ScoreItem


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
        """Returns the text that the completion itself is to be; None where a template makes another
        text of it, or other completions are right too."""
        compared = self.params.operation == "eq" and templates.is_output(self.params.input)
        if not compared or "sample." in self.params.reference:
            return None
        return templates.render(
            self.params.reference, ScoreItem(prompt="", completion="", row=dict(row))
        )

    async def check_row(self, row: Mapping[str, Any]) -> None:
        """A reference that is empty is in every text."""
        if "sample." in self.params.reference or self.params.operation not in ("like", "ilike"):
            return
        if not templates.render(
            self.params.reference, ScoreItem(prompt="", completion="", row=dict(row))
        ):
            fault = "the reference is empty, and every text contains that"
            raise GradingFailed(fault, "invalid_variable_error")

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
