"""Runs the model's Python in the sandbox and compares what it evaluates to. The expected value never enters the sandbox.

Without `numbers` the completion is a program whose last statement is an expression; its value counts. With `numbers` it is one
arithmetic expression (the Countdown game): its whole-number literals must be exactly the row's numbers, each used once, and
nothing but numbers, + - * / // % and parentheses may appear. That is checked here, by reading its tokens, before anything runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from services.reward.registry import Column, Grader, Params, grader
from shared.errors import BadRequest
from shared.wire import ExecuteRequest, Execution, Part, ScoreItem

MAX_EXPRESSION_CHARS = 1000
_TOKEN = re.compile(r"[ \t]+|(?P<number>[0-9]+)|//|[-+*/%()]")
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

LAST_VALUE = """
import ast as _ast
_tree = _ast.parse(_source, "program.py")
if not _tree.body or not isinstance(_tree.body[-1], _ast.Expr):
    raise ValueError("the program does not end in an expression")
_last = _ast.Expression(_tree.body.pop().value)
exec(compile(_tree, "program.py", "exec"))
"""
"""Runs the program but for its last expression; `_source` comes in as an input."""


class PythonValueParams(Params):
    """`target` and `numbers` are columns: the wanted value, and the numbers that must be used (a list of whole numbers).

    `timeout_s` and `memory_mib` bound one program. `tolerance` is the largest accepted difference of two numbers.
    """

    target: Column = "target"
    numbers: Column | None = None
    timeout_s: float = Field(default=2.0, gt=0, le=30)
    memory_mib: int = Field(default=256, ge=16, le=8192)
    tolerance: float = Field(default=0.0, ge=0)


@grader("python_value")
class PythonValue(Grader[PythonValueParams]):
    """1 if the completion, run as Python, evaluates to the row's `target`, else 0. 15 and 15.0 are equal; True is not 1.

    With `numbers`, it must be one arithmetic expression that uses exactly those numbers.
    """

    async def grade(self, items: Sequence[ScoreItem]) -> Sequence[Part]:
        parts: list[Part | None] = [self._refused(item, position) for position, item in enumerate(items)]
        asked = [position for position, part in enumerate(parts) if part is None]
        executions = await self.tools.sandbox.run([self._request(items[position]) for position in asked])
        for position, execution in zip(asked, executions, strict=True):
            parts[position] = self._judge(execution, items[position].row[self.params.target])
        return [part for part in parts if part is not None]

    def _refused(self, item: ScoreItem, position: int) -> Part | None:
        """Returns the verdict on an expression that breaks the rules of `numbers`, else None."""
        if self.params.numbers is None:
            return None
        target, numbers = item.row[self.params.target], item.row[self.params.numbers]
        if not isinstance(numbers, list | tuple) or any(type(number) is not int for number in numbers):
            raise BadRequest(
                f"column {self.params.numbers!r} of item {position} is {numbers!r:.80}; expected a list of whole numbers"
            )
        if type(target) not in (int, float):
            raise BadRequest(f"column {self.params.target!r} of item {position} is {target!r:.80}; expected a number")
        fault = breach(program_of(item.completion), numbers)
        return Part(value=0.0, detail=fault) if fault else None

    def _request(self, item: ScoreItem) -> ExecuteRequest:
        program = program_of(item.completion)
        limits = {"timeout_s": self.params.timeout_s, "memory_mib": self.params.memory_mib}
        if self.params.numbers is not None:
            return ExecuteRequest(expression=program, **limits)
        last = 'eval(compile(_last, "program.py", "eval"))'
        return ExecuteRequest(code=LAST_VALUE, expression=last, inputs={"_source": program}, **limits)

    def _judge(self, execution: Execution, target: Any) -> Part:
        if execution.verdict == "sandbox_error":
            return Part(value=None, verdict="error", detail=execution.stderr)
        if execution.verdict == "time_limit":
            return Part(value=0.0, detail=f"time limit {self.params.timeout_s:g} s")
        if execution.verdict == "memory_limit":
            return Part(value=0.0, detail=f"memory limit {self.params.memory_mib} MiB")
        if execution.verdict != "ok":
            lines = execution.stderr.strip().splitlines() or [execution.verdict]
            return Part(value=0.0, detail=lines[-1][:200])
        if same(execution.value, target, self.params.tolerance):
            return Part(value=1.0, detail=f"evaluated to {execution.value!r:.80}")
        return Part(value=0.0, detail=f"evaluated to {execution.value!r:.80}, wanted {target!r:.80}")


def program_of(completion: str) -> str:
    """Returns the last fenced code block of the completion, or else all of it, without blanks around."""
    blocks = _FENCE.findall(completion)
    return (blocks[-1] if blocks else completion).strip()


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
    return "" if sorted(used) == sorted(numbers) else f"used {sorted(used)!s:.80}, wanted {sorted(numbers)}"


def same(value: Any, target: Any, tolerance: float = 0.0) -> bool:
    """Returns whether two plain values are equal: numbers by value (within `tolerance`), all else by exact type as well."""
    if type(value) in (int, float) and type(target) in (int, float):
        try:
            return value == target or (tolerance > 0 and abs(value - target) <= tolerance)
        except OverflowError:
            return False  # a whole number beyond what a float can hold is near no float
    if type(value) is not type(target):
        return False
    if isinstance(value, list):
        return len(value) == len(target) and all(same(a, b, tolerance) for a, b in zip(value, target, strict=True))
    if isinstance(value, dict):
        return value.keys() == target.keys() and all(same(part, target[key], tolerance) for key, part in value.items())
    return bool(value == target)
