"""Searches completions for a pattern of the `regex` package: Python's and more.

A pattern may take any time and memory to compile, and exponential time to search some texts, so a
limited process does both. `/graders/validate` refuses an unsuitable pattern.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from services.reward.grading.limited.pool import Call, NoValue
from services.reward.grading.registry import (
    Column,
    GraderTools,
    ItemGrader,
    Params,
    grader,
    right_or_wrong,
    wrong_row,
)
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire import Part, ScoreItem

COMPILE_S = 2.0
"""CPU time that compiling a pattern may take. Ordinary ones take a hundredth of that."""

MEMORY_MIB = 1024
"""Memory that compiling and searching may take, the process and its libraries included."""


class RegexParams(Params):
    """A pattern, and the group of its match that is compared with the row."""

    pattern: str = Field(min_length=1, max_length=2000)
    """A pattern of the `regex` package."""

    mode: Literal["search", "full"] = "search"
    """The pattern matches a part of the completion ("search"), or all of it without the blanks
    around it ("full")."""

    which: Literal["first", "last"] = "last"
    """Which match of "search" counts."""

    column: Column | None = None
    """The column that must be equal to the text of `group`, without the blanks around both. None:
    it is enough that the pattern matches."""

    group: int | str = 0
    """A number or a name; 0 is the whole match."""

    ignore_case: bool = False
    """Capital and small letters are the same."""

    multiline: bool = False
    """`^` and `$` also match at the beginning and the end of each line."""

    dotall: bool = False
    """`.` also matches the end of a line."""

    timeout_s: float = Field(default=1.0, gt=0, le=10)
    """Seconds of CPU time for one search. A completion on which the pattern takes longer earns
    0."""

    def flags(self) -> list[str]:
        """Returns the names of the flags in the `regex` package."""
        flags = {
            "IGNORECASE": self.ignore_case,
            "MULTILINE": self.multiline,
            "DOTALL": self.dotall,
        }
        return [flag for flag, wanted in flags.items() if wanted]


@grader("regex")
class Regex(ItemGrader[RegexParams]):
    """1 for a completion in which the pattern is found (and whose group is the row's `column`, if
    one is named), else 0.

    Without `column` any text with a match earns 1, a list of all options too: that is a reward for
    a form. With it one match decides, the last or the first, however many there are.
    """

    def __init__(self, spec: RewardSpec, params: RegexParams, tools: GraderTools) -> None:
        super().__init__(spec, params, tools)
        self._is_checked = False

    async def check(self, columns: Sequence[str]) -> None:
        await super().check(columns)
        if not self._is_checked:
            await self._check_pattern()
            self._is_checked = True

    async def _check_pattern(self) -> None:
        pattern, group = self.params.pattern, self.params.group
        call = Call(
            "limited.texts", "groups", (pattern, self.params.flags()), COMPILE_S, MEMORY_MIB
        )
        try:
            known = await self.tools.limited.run(call)
        except NoValue as error:
            raise BadRequest(
                f"reward {self.spec.label!r}: pattern {pattern!r:.80} cannot be compiled within "
                f"{COMPILE_S:g} s and {MEMORY_MIB} MiB: {error.detail}"
            ) from error
        if "fault" in known:
            raise BadRequest(
                f"reward {self.spec.label!r}: pattern {pattern!r:.80} is no regular expression: "
                f"{known['fault']}"
            )
        is_there = (
            group in known["names"] if isinstance(group, str) else 0 <= group <= known["count"]
        )
        if not is_there:
            raise BadRequest(
                f"reward {self.spec.label!r}: group {group!r} is not in pattern {pattern!r:.80}, "
                f"which has {known['count']} groups"
            )

    async def check_row(self, row: Mapping[str, Any]) -> None:
        self._wanted(row)

    def _wanted(self, row: Mapping[str, Any]) -> str:
        wanted = row[self.params.column] if self.params.column is not None else ""
        if type(wanted) not in (str, int):
            raise wrong_row(f"column {self.params.column!r} is {wanted!r:.80}; expected text")
        if self.params.column is not None and not str(wanted).strip():
            fault = "which a group that matches nothing equals; expected text"
            raise wrong_row(f"column {self.params.column!r} is {wanted!r:.80}, {fault}")
        return str(wanted)

    async def grade_item(self, item: ScoreItem) -> Part:
        wanted = self._wanted(item.row)
        found = await self._found(item.completion)
        if found is None:
            return right_or_wrong(False, "the pattern was not found")
        if self.params.column is None:
            return right_or_wrong(True, f"found {found!r:.80}")
        right = found.strip() == wanted.strip()
        return right_or_wrong(right, f"found {found!r:.80}, wanted {wanted!r:.80}")

    async def _found(self, text: str) -> str | None:
        """Returns the text of the group ("" if it took no part in the match); None if the pattern
        did not match. Raises NoValue."""
        params = self.params
        searched = (
            params.pattern,
            params.flags(),
            params.mode,
            params.which,
            params.group,
            text,
            params.timeout_s,
        )
        # The search normally stops itself at its limit. If it does not, the kernel's limit ends it.
        call = Call("limited.texts", "find", searched, COMPILE_S + 2 * params.timeout_s, MEMORY_MIB)
        reply = await self.tools.limited.run(call)
        if reply["late"]:
            raise NoValue("time_limit", f"the pattern took longer than {params.timeout_s:g} s")
        return reply["found"]
