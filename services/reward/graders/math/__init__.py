r"""Rewards a mathematically right answer: `\boxed{}`, GSM8K's `#### 18`, or whatever math-verify
finds in the text.

Plain numbers ("1,200", "$18", "3/4", "75%", "18.0 dollars") are compared here, exactly; all else
(formulas, sets, intervals) by math-verify, in a process with limits of time and memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from services.reward.graders.math.answers import equal, final_answer, number
from services.reward.grading.limited.pool import Call, NoValue
from services.reward.grading.registry import Column, Grader, GradingFailed, Params, grader
from shared.wire import Part, ScoreItem

TAIL_CHARS = 4000
"""Of a completion without a marked answer: its end, which math-verify searches."""

MAX_ANSWER_CHARS = 2000
SHOWN_CHARS = 40

MEMORY_MIB = 3072
"""What one comparison may take, the process and its libraries included."""


class MathParams(Params):
    """`answer` is the column of the right answer: a number, LaTeX, or a whole solution that ends in
    `####` or a `\\boxed{}`.

    `cpu_s`: how many seconds of CPU time one comparison may take; an answer that takes longer earns
    0. `strict`: only an answer that the completion marks with `\\boxed{}` or `####` counts.
    `evaluated`: where the row's answer is a plain number, the completion's must be one: `408`, not
    `12 \\cdot 34`.
    """

    answer: Column = "answer"
    cpu_s: float = Field(default=5.0, gt=0, le=60)
    strict: bool = False
    evaluated: bool = False


@grader("math")
class Math(Grader[MathParams]):
    """1 if the completion's final answer is mathematically equal to the row's, else 0."""

    pure = True
    has_full_mark = True
    items_per_call = 1

    def content(self, item: ScoreItem) -> Any:
        return [item.completion, item.row[self.params.answer]]

    async def grade(self, items: Sequence[ScoreItem]) -> Sequence[Part]:
        return [await self._grade(item.completion, self._wanted(item.row)) for item in items]

    async def check_row(self, row: Mapping[str, Any]) -> None:
        self._wanted(row)

    def reference(self, row: Mapping[str, Any]) -> str:
        wanted, whole = self._wanted(row), str(row[self.params.answer])
        return whole if final_answer(whole) else f"\\boxed{{{wanted}}}"

    def _wanted(self, row: Mapping[str, Any]) -> str:
        value = row[self.params.answer]
        if type(value) not in (str, int, float) or not str(value).strip():
            fault = f"column {self.params.answer!r} is {value!r:.80}; expected a number or text"
            raise GradingFailed(fault, "invalid_variable_error")
        return final_answer(str(value)) or str(value).strip()

    async def _grade(self, completion: str, wanted: str) -> Part:
        given = final_answer(completion)
        if given is None and self.params.strict:
            return Part(value=0.0, verdict="wrong", detail="no answer in \\boxed{} or after ####")
        if given is not None and len(given) > MAX_ANSWER_CHARS:
            return Part(value=0.0, verdict="wrong", detail=f"an answer of {len(given)} characters")
        ours, theirs = number(completion.strip() if given is None else given), number(wanted)
        if ours and theirs:
            return _part(equal(ours, theirs), given, wanted, completion)
        if theirs and self.params.evaluated:
            shown = "the answer" if given is None else f"{given!r:.80}"
            return Part(value=0.0, verdict="wrong", detail=f"{shown} is no plain number")
        if given == wanted:
            return _part(True, given, wanted, completion)
        text = completion[-TAIL_CHARS:] if given is None else f"\\boxed{{{given}}}"
        call = Call(
            "math_answers", "same", (f"\\boxed{{{wanted}}}", text), self.params.cpu_s, MEMORY_MIB
        )
        try:
            return _part(await self.tools.limited.run(call), given, wanted, completion)
        except NoValue as error:
            return error.part()


def _part(right: bool, given: str | None, wanted: str, completion: str) -> Part:
    end = completion.rstrip()[-SHOWN_CHARS:]
    shown = f"no \\boxed{{}} or ####, read from {end!r}" if given is None else f"{given!r:.80}"
    return Part(
        value=float(right),
        verdict="ok" if right else "wrong",
        detail=f"{shown}, wanted {wanted!r:.80}",
    )
