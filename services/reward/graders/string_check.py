"""OpenAI's `string_check`: two texts, made from templates, compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from services.reward.grading import templates
from services.reward.grading.registry import Grader, Params, grader
from shared.wire import Part, ScoreItem


class StringCheckParams(Params):
    """`operation`: "eq" the same, "ne" not the same, "like" `input` contains `reference`, "ilike"
    the same whatever the case."""

    type: Literal["string_check"] = "string_check"
    name: str = "string_check"
    input: str
    reference: str
    operation: Literal["eq", "ne", "like", "ilike"]


@grader("string_check")
class StringCheck(Grader[StringCheckParams]):
    """1 if `input` and `reference`, two templates, compare as `operation` says, else 0. As OpenAI's
    grader of that name."""

    items_per_call = 1

    async def check(self, columns: Sequence[str]) -> None:
        for template in (self.params.input, self.params.reference):
            templates.check(template, columns, self.spec.label)

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
            "like": wanted in given,
            "ilike": wanted.casefold() in given.casefold(),
        }[self.params.operation]
        if holds:
            return Part(value=1.0)
        return Part(
            value=0.0,
            verdict="wrong",
            detail=f"not {given!r:.80} {self.params.operation} {wanted!r:.80}",
        )
