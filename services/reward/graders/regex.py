"""Searches completions for a pattern. The pattern may take exponential time on some text, so each
search has a time limit.

Patterns are those of the `regex` package: Python's and more. An unsuitable one is a mistake that
`/graders/validate` names.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Literal

import regex
from pydantic import Field, model_validator

from services.reward.grading.registry import Column, Grader, GradingFailed, Params, grader
from shared.wire import Part, ScoreItem


class RegexParams(Params):
    """`mode`: the pattern is found somewhere ("search"), or is all of the completion without the
    blanks around ("full").

    With `column`, the text of `group` (a number or a name; 0 is the whole match) must be the row's
    `column` as well, blanks around both aside. `which`: the first or the last match counts.
    `timeout_s` bounds one search; a completion on which the pattern takes longer earns 0.
    """

    pattern: str = Field(min_length=1, max_length=2000)
    mode: Literal["search", "full"] = "search"
    which: Literal["first", "last"] = "last"
    column: Column | None = None
    group: int | str = 0
    ignore_case: bool = False
    multiline: bool = False
    dotall: bool = False
    timeout_s: float = Field(default=1.0, gt=0, le=10)

    @model_validator(mode="after")
    def _compiles(self) -> RegexParams:
        try:
            groups = self.compiled()
        except (regex.error, RecursionError, OverflowError, MemoryError) as error:
            raise ValueError(
                f"pattern {self.pattern!r:.80} is no regular expression: {error}"
            ) from error
        known = (
            self.group in groups.groupindex
            if isinstance(self.group, str)
            else 0 <= self.group <= groups.groups
        )
        if not known:
            raise ValueError(
                f"group {self.group!r} is not in pattern {self.pattern!r:.80}, which has "
                f"{groups.groups} groups"
            )
        return self

    def compiled(self) -> regex.Pattern[str]:
        flags = {
            regex.IGNORECASE: self.ignore_case,
            regex.MULTILINE: self.multiline,
            regex.DOTALL: self.dotall,
        }
        return regex.compile(
            self.pattern, flags=sum(flag for flag, wanted in flags.items() if wanted)
        )


@grader("regex")
class Regex(Grader[RegexParams]):
    """1 for a completion in which the pattern is found (and whose group is the row's `column`, if
    one is named), else 0."""

    items_per_call = 1

    async def grade(self, items: Sequence[ScoreItem]) -> Sequence[Part]:
        return [await self._grade(item) for item in items]

    async def _grade(self, item: ScoreItem) -> Part:
        try:
            found = await asyncio.to_thread(self._found, item.completion)
        except TimeoutError:
            return Part(
                value=0.0,
                verdict="time_limit",
                detail=f"the pattern took longer than {self.params.timeout_s:g} s",
            )
        if found is None:
            return Part(value=0.0, verdict="wrong", detail="the pattern was not found")
        if self.params.column is None:
            return Part(value=1.0, detail=f"found {found!r:.80}")
        wanted = item.row[self.params.column]
        if type(wanted) not in (str, int):
            raise GradingFailed(
                f"column {self.params.column!r} is {wanted!r:.80}; expected text",
                "invalid_variable_error",
            )
        right = found.strip() == str(wanted).strip()
        return Part(
            value=float(right),
            verdict="ok" if right else "wrong",
            detail=f"found {found!r:.80}, wanted {wanted!r:.80}",
        )

    def _found(self, text: str) -> str | None:
        """Returns what the group matched ("" if it took no part); None if the pattern was not
        found. Raises TimeoutError."""
        pattern, limits = (
            self.params.compiled(),
            {"timeout": self.params.timeout_s, "concurrent": True},
        )
        if self.params.mode == "full":
            match = pattern.fullmatch(text.strip(), **limits)
        elif self.params.which == "first":
            match = pattern.search(text, **limits)
        else:
            match = next(iter(deque(pattern.finditer(text, **limits), maxlen=1)), None)
        return None if match is None else match[self.params.group] or ""
