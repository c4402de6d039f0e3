"""Reads the tests of a row, in the forms that public data sets have. Raises GradingFailed, with a
sentence, for tests that cannot be read.

    Python source    `assert f(1) == 2` (MBPP), `def check(candidate): ...` (HumanEval), functions
                     for pytest (KodCode)
    input, output    {"input": "1 2", "output": "3"}, of a program that reads and prints
    calls as data    {"fn_name": "f", "inputs": [[1]], "outputs": [2]} (APPS, TACO), or
                     {"input": "1\\n[2]", "output": "3", "testtype": "functional"}
                     (LiveCodeBench)
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from services.reward.graders.code_tests import asserts, sound
from services.reward.graders.code_tests.asserts import Case
from services.reward.graders.code_tests.candidate import MAX_OUTPUT_BYTES, Pair
from services.reward.graders.code_tests.inside_tests import AGREES
from services.reward.graders.code_tests.proxy import TestCode, unconverted
from services.reward.grading.expressions import parse_program
from services.reward.grading.failures import GradingFailed, wrong_row

MAX_PYTHON_CHARS = 200_000
"""The longest Python source of a row, setup and prefix included: Python reads 200,000 characters in
0.8 s, in which the service answers nothing else."""

_ENTRY_POINT = re.compile(r"[^\W\d]\w*(\(\)\.[^\W\d]\w*)?")
"""A function, or a method of an object that is made without arguments."""

_DEFINED = re.compile(
    r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|^[ \t]*(\w+)[ \t]*(?::[^=\n]*)?=(?!=)",
    re.MULTILINE,
)
_READS = re.compile(r"\b(?:input|stdin|fileinput)\b|\b(?:open|read)\(0")

Style = Literal["asserts", "check", "stdio"]
EXPECTED = {
    "asserts": "assert statements on calls of the program's functions, as `assert f(1) == 2`",
    "check": "a function `check(candidate)` with such statements on calls of `candidate`",
    "stdio": 'a list of {"input": "...", "output": "..."}, or {"inputs": ["..."], '
    '"outputs": ["..."]}, with "fn_name" for calls',
}


CALLS = '{"fn_name": "f", "inputs": [[...], ...], "outputs": [...]}, a list of arguments per call'


@dataclass(frozen=True)
class Tests:
    """What to run: assertions on calls, test code in a second sandbox, inputs and outputs.
    `imports` is source that calls may use. `names` are what a program has to define; of one
    function and a class `Solution` with that method, either is enough."""

    imports: str = ""
    cases: tuple[Case, ...] = ()
    codes: tuple[TestCode, ...] = ()
    pairs: tuple[Pair, ...] = ()
    names: frozenset[str] = frozenset()

    @property
    def count(self) -> int:
        return len(self.cases) + len(self.codes) + len(self.pairs)

    def fit(self, program: str) -> int:
        """Returns how many of the tested names a program defines; for tests by inputs, whether it
        reads any."""
        if self.pairs:
            has_input = any(pair.stdin.strip() for pair in self.pairs)
            return int(has_input and _READS.search(program) is not None)
        defined = {name for match in _DEFINED.findall(program) for name in match}
        is_either = "Solution" in self.names and len(self.names) == 2
        num_defined = len(self.names & defined)
        return min(num_defined, 1) if is_either else num_defined


def read(
    value: Any,
    style: Style | None,
    entry_point: str | None,
    setup: str,
    prefix: str,
    tolerance: float = 0.0,
) -> Tests:
    """Returns the tests in a column's `value`, whose style is recognized unless given. `setup` and
    `prefix` are source that test code may use; numbers may be off by `tolerance` in results that
    are given as data."""
    try:
        style = style or recognized(value)
        num_chars = len(setup) + len(prefix) + (0 if style == "stdio" else len(str(value)))
        if num_chars > MAX_PYTHON_CHARS:
            raise wrong_row(
                f"the row has {num_chars} characters of Python (tests, setup and prefix), expected "
                f"at most {MAX_PYTHON_CHARS}; fewer tests say the same, or tests as data"
            )
        if style == "stdio":
            tests = _data(_parsed(value), entry_point, tolerance)
        elif style == "check":
            tests = _check(_texts(value), entry_point, f"{setup}\n{prefix}")
        else:
            tests = _asserts(_texts(value), owner(entry_point), setup)
    except SyntaxError as error:
        raise wrong_row(_not_python(error, _texts(value))) from error
    except (RecursionError, MemoryError) as error:
        raise wrong_row("the tests nest too deeply, or are too long an expression") from error
    if not tests.count:
        raise wrong_row(f"the row has no tests: {value!r:.80}; expected {EXPECTED[style]}")
    return tests


def owner(entry_point: str | None) -> str | None:
    """Returns the name that a program defines so that its entry point can be called."""
    return entry_point and entry_point.partition("(")[0]


def recognized(value: Any) -> Style:
    """Returns the style of the tests in a column: "stdio" for inputs and outputs, "check" for
    source that defines `check(candidate)` and does not call it, "asserts" for all else."""
    try:
        data = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        data = None
    if isinstance(data, dict) or (isinstance(data, list) and data and isinstance(data[0], dict)):
        return "stdio"
    if len(str(value)) > MAX_PYTHON_CHARS:  # it is refused and not parsed
        return "asserts"
    try:
        tree = parse_program("\n".join(_texts(value)))
    except SyntaxError:
        return "asserts"
    return "check" if sound.calls_for_check(tree) else "asserts"


def _not_python(error: SyntaxError, texts: list[str]) -> str:
    what = "the setup, or the prefix that the tests use, is"
    try:
        parse_program("\n".join(texts))
    except SyntaxError:
        what = "the tests are"
    line = f": {error.text.strip()!r:.80}" if error.text else ""
    return f"{what} not Python: {error.msg} (line {error.lineno}{line})"


def _texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if isinstance(value, str) and value.lstrip().startswith("["):  # a list in a CSV
        with contextlib.suppress(ValueError):
            texts = json.loads(value)
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise wrong_row(f"the tests are {value!r:.80}; expected Python source, or a list of it")
    return list(texts)


def _asserts(texts: list[str], entry_point: str | None, setup: str) -> Tests:
    imports: list[str] = []
    cases: list[Case] = []
    codes: list[TestCode] = []
    texts = [part for text in texts for part in asserts.as_asserts(text)]
    names = _of_program("\n".join(texts), setup, entry_point)
    if not all(sound.assert_something(parse_program(text)) for text in texts):
        texts = ["\n".join(texts)]  # a text may be for the texts after it, as imports are
    for text in [sound.completed(text, setup, names) for text in texts]:
        suite = asserts.from_asserts(text, entry_point, setup)
        if suite is None:
            codes.append(_sound(unconverted(text, setup), "asserts"))
        else:
            imports.append(suite[0])
            cases += suite[1]
    return Tests("\n".join(imports).strip(), tuple(cases), tuple(codes), names=names)


def _check(texts: list[str], entry_point: str | None, setup: str) -> Tests:
    if entry_point is None or not _ENTRY_POINT.fullmatch(entry_point):
        raise wrong_row(
            f"the tests define check(candidate), and the entry point is {entry_point!r:.80}; "
            "expected the name of a function, or `Solution().name`, in the column that the param "
            "entry_point names"
        )
    source = asserts.without_program("\n".join(texts))
    name = owner(entry_point) or entry_point
    names = _of_program(source, setup, name)
    source = sound.completed(source, setup, names)
    suite = asserts.from_check(source, entry_point)
    if suite is None:
        code = _sound(unconverted(source, setup, entry_point), "check")
        return Tests(codes=(code,), names=frozenset({name}))
    imports, cases = suite
    return Tests(imports, tuple(cases), names=frozenset({name}))


def _of_program(source: str, setup: str, entry_point: str | None) -> frozenset[str]:
    """Returns the names that the tests take from the program. Raises GradingFailed if their verdict
    would mean nothing, or no program could pass."""
    tree = parse_program(source)
    names = sound.of_program(tree, setup, entry_point)
    if fault := sound.fault(tree, names):
        raise wrong_row(fault)
    return names


def _sound(code: TestCode, style: Style) -> TestCode:
    """Returns tests that run unchanged. Raises GradingFailed if their verdict would mean nothing
    for any program."""
    tree = parse_program(code.source)
    if style == "asserts" and sound.calls_for_check(tree):
        problem = 'the tests define check(candidate) and never call it; expected style "check"'
    elif not sound.assert_something(tree):
        problem = f"the tests assert nothing: {code.source!r:.80}; expected {EXPECTED[style]}"
    elif name := sound.evaluated(tree) or sound.evaluated(parse_program(code.setup)):
        problem = f"the tests use {name!r}, and what a program returns must not run beside them"
    elif name := sound.object_of(tree, code.names):
        problem = f"the tests use an object of the class {name!r}, and only plain data crosses"
    elif doing := sound.beyond_results(tree, code.names):
        problem = f"the tests {doing}; expected {EXPECTED[style]}"
    else:
        return code
    raise wrong_row(problem)


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise wrong_row(f"the tests are {value!r:.80}; expected JSON: {error}") from error


def _data(value: Any, entry_point: str | None, tolerance: float) -> Tests:
    """Returns tests that are given as data: what a program prints, or what a function returns."""
    function = value.get("fn_name") if isinstance(value, dict) else None
    tests = _in_pairs(value) if isinstance(value, dict) else value
    if not isinstance(tests, list | tuple):
        raise _no_pairs(value)
    if any(isinstance(test, dict) and test.get("testtype") == "functional" for test in tests):
        function = function or entry_point
        if not function:
            raise wrong_row(
                "the tests call a function (functional) and do not name it; expected its name in "
                "the column that the param entry_point names"
            )
    if not function:
        return Tests(pairs=_pairs(tests))
    if not all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests):
        raise _no_pairs(value)
    function = str(function).rpartition(".")[2]
    given, wanted = ([test[key] for test in tests] for key in ("input", "output"))
    return Tests(
        cases=calls(function, given, wanted, tolerance) if tests else (),
        names=frozenset({function, "Solution"}),
    )


def _pairs(value: list[Any] | tuple[Any, ...]) -> tuple[Pair, ...]:
    pairs = tuple(_pair(number, test) for number, test in enumerate(value, 1))
    if pairs and not any(pair.stdout.strip() for pair in pairs):
        raise wrong_row(
            f"no test expects any output: {value!r:.80}; a program that does nothing would pass"
        )
    return pairs


def _in_pairs(value: dict[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
        raise _no_pairs(value)
    if len(inputs) != len(outputs):
        raise wrong_row(
            f"the tests have {len(inputs)} inputs and {len(outputs)} outputs; expected as many of "
            "one as of the other"
        )
    return [
        {"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)
    ]


def _pair(number: int, test: Any) -> Pair:
    given, wanted = (
        _text(test.get(key)) if isinstance(test, dict) else None for key in ("input", "output")
    )
    if not isinstance(given, str) or not isinstance(wanted, str):
        raise wrong_row(
            f'test {number} is {test!r:.80}; expected {{"input": "...", "output": "..."}}, text in '
            "both"
        )
    if len(wanted.encode()) > MAX_OUTPUT_BYTES:
        raise GradingFailed(
            f"a test expects {len(wanted)} characters of output, at most {MAX_OUTPUT_BYTES} bytes "
            "can be compared"
        )
    return Pair(given, wanted)


def _text(part: Any) -> Any:
    """Returns lines as one text."""
    is_lines = isinstance(part, list | tuple) and all(isinstance(line, str) for line in part)
    return "\n".join(part) if is_lines else part


def _no_pairs(value: Any) -> GradingFailed:
    return wrong_row(f"the tests are {value!r:.80}; expected {EXPECTED['stdio']}")


def calls(
    function: str, inputs: Sequence[Any], outputs: Sequence[Any], tolerance: float
) -> tuple[Case, ...]:
    """Returns one case per call. A program may define the function, or a class `Solution` with it
    as a method. Arguments and results may be JSON as text, one per line. Where each result is a
    list of one item, that item may be meant. Raises GradingFailed."""
    if not function.isidentifier():
        raise wrong_row(f"the tests call the function {function!r:.80}; expected a name")
    pairs = [_call(*pair) for pair in zip(inputs, outputs, strict=True)]
    wanted = [result for _, result in pairs]
    if all(one is None for one in wanted):
        raise wrong_row(f"no test expects a result of {function}: one that does nothing would pass")
    is_wrapped = all(isinstance(one, list) and len(one) == 1 for one in wanted)
    return tuple(
        _case_of_call(function, arguments, [result, *(result if is_wrapped else [])], tolerance)
        for arguments, result in pairs
    )


def _case_of_call(function: str, arguments: list[Any], wanted: list[Any], tolerance: float) -> Case:
    called = f"({function} if {function!r} in globals() else Solution().{function})"
    given = ", ".join(map(repr, arguments))
    test = f"{AGREES}(_0, {wanted!r}, {tolerance!r})"
    return Case(f"{function}({given}) == {wanted[-1]!r}", (f"{called}({given})",), test)


def _call(given: Any, wanted: Any) -> tuple[list[Any], Any]:
    if isinstance(given, list | tuple):
        return list(given), wanted
    try:
        return [json.loads(line) for line in given.split("\n") if line.strip()], json.loads(wanted)
    except (AttributeError, TypeError, ValueError) as error:
        raise wrong_row(
            f"a call is {given!r:.80} with the result {wanted!r:.80}; expected {CALLS}, or both as "
            "JSON in text, an argument per line"
        ) from error
