"""Runs the model's Python in the sandbox and compares what it evaluates to. The expected value
never enters the sandbox.

Without `numbers` the completion is a program whose last statement is an expression: the value of
that expression is compared. With `numbers` it is one arithmetic expression (the Countdown game):
its whole-number literals must be exactly the row's numbers, each used once, and nothing but
numbers, + - * / // % and parentheses may appear. It is read here, never run, and evaluated in
fractions: 1/49*49 is 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from pydantic import Field

from services.reward.grading.answers.final import tagged
from services.reward.grading.codec import same
from services.reward.grading.expressions import arithmetic
from services.reward.grading.failures import wrong_row
from services.reward.grading.programs import KEEP_CHARS, fault, program_of
from services.reward.grading.registry import Column, ItemGrader, Params, grader, right_or_wrong
from shared.wire import ExecuteRequest, Part, ScoreItem

MAX_EXPRESSION_CHARS = 1000
_TOKEN = re.compile(r"[ \t]+|(?P<number>[0-9]+)|//|[-+*/%()]")

LAST_VALUE = """
import ast as _ast
_tree = _ast.parse(_source, "program.py")
if not _tree.body or not isinstance(_tree.body[-1], _ast.Expr):
    raise ValueError("the program does not end in an expression")
_last = _ast.Expression(_tree.body.pop().value)
exec(compile(_tree, "program.py", "exec"))
"""
"""Runs the program without its last expression; `_source` is an input."""


class PythonValueParams(Params):
    """The columns of a row that say what is right, and what one program may use."""

    target: Column = "target"
    """The column of the wanted value."""

    numbers: Column | None = None
    """The column of the whole numbers, a list, that the expression must use, each once. With it
    nothing runs: the arithmetic is evaluated in fractions. None: any program may give the value."""

    cpu_s: float = Field(default=2.0, gt=0, le=30)
    """How many seconds of CPU time one program may take."""

    timeout_s: float = Field(default=10.0, gt=0, le=300)
    """How many seconds one program may take on the wall clock."""

    memory_mib: int = Field(default=256, ge=16, le=8192)
    """How many MiB of memory one program may use."""

    tolerance: float = Field(default=0.0, ge=0)
    """The largest difference of two numbers that count as equal."""


@grader("python_value")
class PythonValue(ItemGrader[PythonValueParams]):
    """1 if the completion, run as Python, evaluates to the row's `target`, else 0. 15 and 15.0 are
    equal; True is not 1.

    With `numbers`, it must be one arithmetic expression that uses exactly those numbers, alone or
    with `= 17` behind it. Without, any program that has the value earns 1: a question that is
    Python itself ("8 + 9") is its own answer, so use `math` for those. An `<answer>` is read alone.
    """

    pure = True
    has_full_mark = True
    max_concurrency = 64

    async def check_row(self, row: Mapping[str, Any]) -> None:
        self._target(row)
        if self.params.numbers is not None:
            self._numbers(row)

    def reference(self, row: Mapping[str, Any]) -> str | None:
        return None if self.params.numbers else repr(self._target(row))

    def content(self, item: ScoreItem) -> Any:
        numbers = item.row[self.params.numbers] if self.params.numbers else None
        return [program_of(tagged(item.completion)), item.row[self.params.target], numbers]

    async def grade_item(self, item: ScoreItem) -> Part:
        program, target = program_of(tagged(item.completion)).strip(), self._target(item.row)
        if self.params.numbers is not None:
            return self._arithmetic(program, target, self._numbers(item.row))
        execution = await self.tools.sandbox.execute(self._request(program))
        verdict, detail = fault(execution)
        stdout = execution.stdout[-KEEP_CHARS:]
        if verdict != "ok":
            return Part(value=0.0, verdict=verdict, detail=detail, stdout=stdout)
        right = same(execution.value, target, self.params.tolerance)
        return _compared(right, f"{execution.value!r:.80}", target, stdout)

    def _arithmetic(self, expression: str, target: float, numbers: list[int]) -> Part:
        left, sign, right = (side.strip() for side in expression.rpartition("="))
        if sign and re.fullmatch(r"-?\d+(?:\.\d+)?", right) and float(right) == target:
            expression = left  # 8 + 9 = 17
        if rule := breach(expression, numbers):
            return right_or_wrong(False, rule)
        try:
            value = arithmetic(expression)
        except ValueError as error:
            return Part(value=0.0, verdict="runtime_error", detail=str(error))
        right = _is_near(value, target, self.params.tolerance)
        return _compared(right, f"{value!s:.80}", target)

    def _target(self, row: Mapping[str, Any]) -> Any:
        """Raises GradingFailed for a row without a target, because any program that ends in
        `print()` has the value None."""
        if (target := row.get(self.params.target)) is None:
            raise wrong_row(f"column {self.params.target!r} is None; expected a value")
        return target

    def _numbers(self, row: Mapping[str, Any]) -> list[int]:
        """Returns the row's numbers. Raises GradingFailed for a row whose columns hold anything
        else."""
        assert self.params.numbers is not None
        target, numbers = row[self.params.target], row[self.params.numbers]
        if not isinstance(numbers, list | tuple) or any(
            type(number) is not int for number in numbers
        ):
            raise wrong_row(
                f"column {self.params.numbers!r} is {numbers!r:.80}; expected a list of whole "
                "numbers"
            )
        if type(target) not in (int, float) or not math.isfinite(target):
            raise wrong_row(f"column {self.params.target!r} is {target!r:.80}; expected a number")
        return list(numbers)

    def _request(self, program: str) -> ExecuteRequest:
        last = 'eval(compile(_last, "program.py", "eval"))'
        return ExecuteRequest(
            code=LAST_VALUE,
            expression=last,
            inputs={"_source": program},
            cpu_s=self.params.cpu_s,
            timeout_s=self.params.timeout_s,
            memory_mib=self.params.memory_mib,
        )


def _compared(right: bool, value: str, target: Any, stdout: str = "") -> Part:
    wanted = "" if right else f", wanted {target!r:.80}"
    return right_or_wrong(right, f"evaluated to {value}{wanted}", stdout)


def _is_near(value: Fraction, target: float, tolerance: float) -> bool:
    """Returns whether a value is the target exactly, to the last digit of a float, or within the
    tolerance."""
    if abs(value - Fraction(target)) <= Fraction(tolerance):
        return True
    return type(target) is float and abs(value) < 10**300 and float(value) == target


def breach(expression: str, numbers: Sequence[int]) -> str:
    """Returns how `expression` breaks the rules for `numbers`, "" if it does not."""
    if len(expression) > MAX_EXPRESSION_CHARS:
        return f"{len(expression)} characters, at most {MAX_EXPRESSION_CHARS} are allowed"
    if "**" in expression:
        return "'**' is not allowed"
    used: list[int] = []
    position = 0
    while position < len(expression):
        token = _TOKEN.match(expression, position)
        if token is None:
            return f"{expression[position]!r} is not allowed"
        if token["number"]:
            used.append(int(token["number"]))
        position = token.end()
    return (
        ""
        if sorted(used) == sorted(numbers)
        else f"used {sorted(used)!s:.80}, wanted {sorted(numbers)}"
    )
