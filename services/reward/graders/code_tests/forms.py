"""Forms of tests that public data sets have, put as the asserts that they mean. From the row alone.

pytest functions   `from solution import f`, `def test_a(): assert f(1) == 2` (KodCode)
calls as data      {"fn_name": "f", "inputs": [[1]], "outputs": [2]} (APPS, TACO), or
                   {"input": "1\\n[2]", "output": "3", "testtype": "functional"} (LiveCodeBench)
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from typing import Any

from services.reward.graders.code_tests.asserts import Case
from services.reward.grading.limited.assertions import AGREES
from services.reward.grading.registry import GradingFailed

_PROGRAM = "solution"
"""As which module tests of pytest import the program."""

CALLS = '{"fn_name": "f", "inputs": [[...], ...], "outputs": [...]}, a list of arguments per call'


def without_program(text: str) -> str:
    """Returns tests that do not import the program: its names are not defined by them."""
    tree = ast.parse(text)
    body = [
        part
        for part in tree.body
        if not (isinstance(part, ast.ImportFrom) and part.module == _PROGRAM and not part.level)
    ]
    return text if len(body) == len(tree.body) else ast.unparse(ast.Module(body, []))


def as_asserts(text: str) -> list[str]:
    """Returns tests as pytest would run them: of functions `test_...` that nothing calls, one text
    for each, with what stands beside them. Others are returned as they are. Raises SyntaxError."""
    text = without_program(text)
    tree = ast.parse(text)
    tests = [part for part in tree.body if isinstance(part, ast.FunctionDef) and _is_test(part)]
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if not tests or named & {test.name for test in tests}:
        return [text]
    beside = [part for part in tree.body if part not in tests]
    return [ast.unparse(ast.Module([*beside, *_run(test)], [])) for test in tests]


def _is_test(part: ast.FunctionDef) -> bool:
    arguments = part.args
    takes = arguments.args or arguments.posonlyargs or arguments.kwonlyargs
    return part.name.startswith("test") and not takes and not part.decorator_list


def _run(test: ast.FunctionDef) -> list[ast.stmt]:
    """Returns what the function does, or its definition and a call of it."""
    plain = [part for part in test.body if not _is_text(part)]
    if plain and all(isinstance(part, ast.Assert) for part in plain):
        return list(plain)
    return [test, ast.Expr(ast.Call(ast.Name(test.name, ast.Load()), [], []))]


def _is_text(part: ast.stmt) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)


def calls(
    function: str, inputs: Sequence[Any], outputs: Sequence[Any], tolerance: float
) -> tuple[Case, ...]:
    """Returns one case per call. A program may define the function, or a class `Solution` with it
    as a method. Arguments and results may be JSON as text, one per line. Where each result is a
    list of one item, that item may be meant. Raises GradingFailed."""
    if not function.isidentifier():
        raise _refused(f"the tests call the function {function!r:.80}; expected a name")
    pairs = [_read(*pair) for pair in zip(inputs, outputs, strict=True)]
    wanted = [result for _, result in pairs]
    if all(one is None for one in wanted):
        raise _refused(f"no test expects a result of {function}: one that does nothing would pass")
    is_wrapped = all(isinstance(one, list) and len(one) == 1 for one in wanted)
    return tuple(
        _case(function, arguments, [result, *(result if is_wrapped else [])], tolerance)
        for arguments, result in pairs
    )


def _case(function: str, arguments: list[Any], wanted: list[Any], tolerance: float) -> Case:
    called = f"({function} if {function!r} in globals() else Solution().{function})"
    given = ", ".join(map(repr, arguments))
    test = f"{AGREES}(_0, {wanted!r}, {tolerance!r})"
    return Case(f"{function}({given}) == {wanted[-1]!r}", (f"{called}({given})",), test)


def _read(given: Any, wanted: Any) -> tuple[list[Any], Any]:
    if isinstance(given, list | tuple):
        return list(given), wanted
    try:
        return [json.loads(line) for line in given.splitlines() if line.strip()], json.loads(wanted)
    except (AttributeError, TypeError, ValueError) as error:
        raise _refused(
            f"a call is {given!r:.80} with the result {wanted!r:.80}; expected {CALLS}, or both as "
            "JSON in text, an argument per line"
        ) from error


def _refused(problem: str) -> GradingFailed:
    return GradingFailed(problem, "invalid_variable_error")
