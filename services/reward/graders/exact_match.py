"""Rewards a completion that is the expected text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.reward.grading.registry import Column, Grader, GradingFailed, Params, grader
from shared.wire import Part, ScoreItem


class ExactMatchParams(Params):
    """What a completion is compared with, and how."""

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
            raise GradingFailed(fault, "invalid_variable_error")
        return value

    def _part(self, item: ScoreItem) -> Part:
        value = self._wanted(item.row)
        if self._normal(item.completion) == self._normal(str(value)):
            return Part(value=1.0)
        return Part(value=0.0, verdict="wrong", detail=f"wanted {value!r:.80}")

    def _normal(self, text: str) -> str:
        text = text.strip() if self.params.strip else text
        return text.casefold() if self.params.ignore_case else text
