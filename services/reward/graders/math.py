r"""Rewards a mathematically right answer: `\boxed{}`, GSM8K's `#### 18`, or whatever math-verify
finds in the text.

Plain numbers ("1,200", "$18", "3/4", "1.6e-19", "18.0 dollars") and texts are compared here,
formulas in a process with limits of time and memory (`grading/answers/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import Field

from services.reward.grading.answers import Amount, Form, Named, Relation, Text
from services.reward.grading.answers.comparing import Formulas, NeedsFormulas, same
from services.reward.grading.answers.forms import read
from services.reward.grading.answers.latex import clean
from services.reward.grading.answers.numbers import Number, equal, final_answer, number
from services.reward.grading.limited.pool import Call
from services.reward.grading.registry import (
    Column,
    ItemGrader,
    Params,
    grader,
    right_or_wrong,
    wrong_row,
)
from shared.wire import Part, ScoreItem

TAIL_CHARS = 4000
"""Characters at the end of a completion without a marked answer that math-verify searches."""

MAX_ANSWER_CHARS = 2000
MAX_PLAIN_CHARS = 500
SHOWN_CHARS = 40

MEMORY_MIB = 3072
"""Memory that one comparison may take, the process and its libraries included."""


class MathParams(Params):
    """Where the right answer is, and what counts as an answer."""

    answer: Column = "answer"
    """The column of the right answer: a number, LaTeX, or a whole solution that ends in `####` or a
    `\\boxed{}`."""

    cpu_s: float = Field(default=5.0, gt=0, le=60)
    """How many seconds of CPU time one comparison may take. An answer that takes longer earns 0."""

    strict: bool = False
    """Only an answer that the completion marks with `\\boxed{}` or `####` counts."""

    evaluated: bool = False
    """Where the row's answer is a plain number, the completion's must be one too: `408`, not `12
    \\cdot 34`."""


@grader("math")
class Math(ItemGrader[MathParams]):
    """1 if the completion's final answer is mathematically equal to the row's, else 0."""

    pure = True
    has_full_mark = True

    def content(self, item: ScoreItem) -> Any:
        return [item.completion, item.row[self.params.answer]]

    async def check_row(self, row: Mapping[str, Any]) -> None:
        self._wanted(row)

    def reference(self, row: Mapping[str, Any]) -> str:
        wanted, whole = self._wanted(row), str(row[self.params.answer])
        return whole if final_answer(whole) else f"\\boxed{{{wanted}}}"

    def _wanted(self, row: Mapping[str, Any]) -> str:
        value = row[self.params.answer]
        if type(value) not in (str, int, float) or not str(value).strip():
            fault = f"column {self.params.answer!r} is {value!r:.80}; expected a number or text"
            raise wrong_row(fault)
        wanted = final_answer(str(value)) or str(value).strip()
        form = read(wanted) if "=" in wanted else None
        if isinstance(form, Relation) and all(number(side) for side in form.sides):
            fault = f"column {self.params.answer!r} is {wanted!r:.80}, which no answer can equal"
            raise wrong_row(fault)
        return wanted

    async def grade_item(self, item: ScoreItem) -> Part:
        completion, wanted = item.completion, self._wanted(item.row)
        given = final_answer(completion)
        if given is None and self.params.strict:
            return right_or_wrong(False, "no answer in \\boxed{} or after ####")
        if given is not None and len(given) > MAX_ANSWER_CHARS:
            return right_or_wrong(False, f"an answer of {len(given)} characters")
        if given is None and not _is_plain(completion):
            return await self._grade_unmarked(completion, wanted)
        answer = completion.strip() if given is None else given
        plain, wanted_plain = number(answer), _known_number(wanted)
        if plain and wanted_plain:
            return _part(equal(plain, wanted_plain), f"{answer!r:.80}", wanted)
        ours, theirs = read(answer), read(wanted)
        if self.params.evaluated and _is_number(theirs) and not _is_number(ours):
            return right_or_wrong(False, f"{answer!r:.80} is no plain number")
        try:
            right = clean(answer) == clean(wanted) or same(ours, theirs, Formulas())
            return _part(right, f"{answer!r:.80}", wanted)
        except NeedsFormulas:
            call = self._call("compared", answer, wanted)
        right, why = await self.tools.limited.run(call)
        return _part(right, f"{answer!r:.80}", wanted, why)

    async def _grade_unmarked(self, completion: str, wanted: str) -> Part:
        end = completion.rstrip()[-SHOWN_CHARS:]
        shown = f"no \\boxed{{}} or ####, read from {end!r}"
        if self.params.evaluated and _is_number(read(wanted)):
            return right_or_wrong(False, "the answer is no plain number")
        call = self._call("found_in", completion[-TAIL_CHARS:], wanted)
        right, why = await self.tools.limited.run(call)
        return _part(right, shown, wanted, why)

    def _call(self, function: str, given: str, wanted: str) -> Call:
        return Call("answers.formulas", function, (given, wanted), self.params.cpu_s, MEMORY_MIB)


@lru_cache(maxsize=4096)
def _known_number(wanted: str) -> Number | None:
    """Returns `number(wanted)`, cached because all completions of a group have the same row."""
    return number(wanted)


def _is_plain(completion: str) -> bool:
    """Returns whether a completion without a marked answer is only a number or a word."""
    if len(completion) > MAX_PLAIN_CHARS or "\n" in completion.strip():
        return False
    form = read(completion)
    return _is_number(form) or (isinstance(form, Text) and " " not in completion.strip())


def _is_number(form: Form) -> bool:
    value = form.values[-1] if isinstance(form, Named) else form
    return isinstance(value, Amount) and value.number is not None


def _part(right: bool, shown: str, wanted: str, why: str = "") -> Part:
    return right_or_wrong(right, f"{shown}, wanted {wanted!r:.80}" + (f": {why}" if why else ""))
