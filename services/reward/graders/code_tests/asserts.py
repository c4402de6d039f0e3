"""Reads assert-style tests, on the trusted side: which calls to make in the sandbox, and what must
hold of their results.

    assert add(1, 2) == 3     ->   call "add(1, 2)", and afterwards, outside: _0 == 3

A call of the candidate is sent whole, with its arguments (`f(g(1))`, `Solution().f([1])`,
`f(1)[0]`); everything around it is evaluated in another sandbox (`inside_tests.py`). Tests with
anything else in them (loops, helper functions, `try`) are not converted: they run unchanged there
(`proxy.py`).
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from typing import Any

from services.reward.graders.code_tests.sound import (
    BUILTINS,
    always_holds,
    bound_names,
    evaluated,
    loaded_names,
    names_of,
    nodes,
)
from services.reward.grading.expressions import parse_program

_REDEFINED = """
abs all any bool complex dict divmod enumerate float frozenset int isinstance len list max min range
reversed round set sorted str sum tuple type zip
"""
"""Functions of Python that may be the candidate's, as in `sum(10, 15) == 6`."""

_PROGRAM = "solution"
"""The module as which tests for pytest import the program."""


@dataclass(frozen=True)
class Case:
    """One assertion. `calls` are expressions, as source. `test`, also source, uses their values
    under the names `_0`, `_1`, ..."""

    source: str
    calls: tuple[str, ...]
    test: str


Suite = tuple[str, list[Case]]
"""Tests that were all converted: the source of the imports that their calls may use, and the
cases."""


def from_asserts(tests: str, entry_point: str | None = None, setup: str = "") -> Suite | None:
    """Returns `tests` converted if each statement is an assert or an import, else None. Raises
    SyntaxError.

    The candidate's names are `entry_point`, or else all called names that Python, `setup` and
    `tests` do not know.
    """
    body = parse_program(tests).body
    of_setup = names_of(setup)
    called = {
        node.func.id
        for node in nodes(body)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    } - (BUILTINS | of_setup | bound_names(ast.Module(body, [])))
    return _suite(body, frozenset([entry_point]) if entry_point else frozenset(called), of_setup)


def from_check(tests: str, entry_point: str) -> Suite | None:
    """Returns HumanEval's `def check(candidate): assert ...` converted to calls of `entry_point`,
    or None. Raises SyntaxError."""
    tree = parse_program(tests)
    checks = [
        part for part in tree.body if isinstance(part, ast.FunctionDef) and part.name == "check"
    ]
    if len(checks) != 1 or len(checks[0].args.args) != 1:
        return None
    argument = checks[0].args.args[0].arg
    for node in ast.walk(checks[0]):
        if isinstance(node, ast.Name) and node.id == argument:
            node.id = entry_point
    body = [*(part for part in tree.body if part not in checks), *checks[0].body]
    return _suite(body, frozenset([entry_point]), frozenset())


@dataclass(frozen=True)
class _Known:
    """The names that calls may use in the program's sandbox, and the names that tests may use in
    the other one, where they read the results of calls."""

    of_calls: frozenset[str]
    of_tests: frozenset[str]


def _suite(
    body: list[ast.stmt], candidates: frozenset[str], of_setup: frozenset[str]
) -> Suite | None:
    bound = of_setup | bound_names(ast.Module(body, []))
    known = _Known(
        BUILTINS | of_setup | bound_names(ast.Module([*filter(_imports, body)], [])),
        (BUILTINS - bound) | bound_names(ast.Module([*filter(_imports_standard, body)], [])),
    )
    imports: list[str] = []
    cases: list[Case] = []
    is_sound = False
    for part in body:
        if _imports(part):
            imports.append(ast.unparse(part))
        elif isinstance(part, ast.Assert):
            case = _case(part.test, candidates, known)
            if case is None:
                return None
            cases += [case] if case.calls else []
            is_sound = is_sound or (bool(case.calls) and not always_holds(part.test))
        elif not _idle(part):
            return None
    return ("\n".join(imports), cases) if is_sound else None


def _case(test: ast.expr, candidates: frozenset[str], known: _Known) -> Case | None:
    source = ast.unparse(test)
    extraction = _Extraction(candidates if loaded_names(test) & candidates else _head(test))
    rest: Any = extraction.visit(test)
    of_calls = known.of_calls | extraction.candidates
    results = frozenset(f"_{number}" for number in range(len(extraction.calls)))
    if (
        not all(_free(call) <= of_calls for call in extraction.calls)
        or not _free(rest) <= known.of_tests | results
        or evaluated(rest)
        or any(isinstance(node, ast.Await | ast.Yield | ast.YieldFrom) for node in ast.walk(rest))
        or (not results and not isinstance(test, ast.Constant))
    ):
        return None
    return Case(source, tuple(ast.unparse(call) for call in extraction.calls), ast.unparse(rest))


class _Extraction(ast.NodeTransformer):
    """Takes the candidate's calls out of an expression and leaves `_0`, `_1`, ... in their
    places."""

    def __init__(self, candidates: frozenset[str]) -> None:
        self.candidates = candidates
        self.calls: list[ast.expr] = []

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr) and self._is_result(node):
            self.calls.append(node)
            return ast.Name(f"_{len(self.calls) - 1}", ast.Load())
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # A method of a result is called outside.
            method: Any = self.visit(node.func.value)
            parts: list[Any] = [self.visit(part) for part in (*node.args, *node.keywords)]
            count = len(node.args)
            return ast.Call(
                ast.Attribute(method, node.func.attr, ast.Load()), parts[:count], parts[count:]
            )
        return self.generic_visit(node)

    def _is_result(self, node: ast.expr) -> bool:
        """Returns whether `node` is a call of the candidate or a part of its result. Methods are
        called in the sandbox for a class of the candidate only: a result is compared outside, never
        by its own methods."""
        if isinstance(node, ast.Attribute | ast.Subscript):
            return self._is_result(node.value)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and not _is_asyncio_run(node.func)
        ):
            return self._is_result(node.func.value) and _root(node)[:1].isupper()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Call):
            return self._is_result(node.func)  # a call of a function that it returned
        if isinstance(node, ast.Call) and _is_asyncio_run(node.func):
            return any(self._is_result(argument) for argument in node.args)
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in self.candidates
        )


def _is_asyncio_run(node: ast.expr) -> bool:
    owner = node.value if isinstance(node, ast.Attribute) and node.attr == "run" else None
    return isinstance(owner, ast.Name) and owner.id == "asyncio"


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _head(test: ast.expr) -> frozenset[str]:
    """Returns the outermost function that is called first. It is the candidate's if all names are
    Python's."""
    while isinstance(test, ast.UnaryOp | ast.Compare):
        test = test.operand if isinstance(test, ast.UnaryOp) else test.left
    is_call = (
        isinstance(test, ast.Call)
        and isinstance(test.func, ast.Name)
        and test.func.id in _REDEFINED.split()
    )
    return frozenset([_root(test)]) if is_call else frozenset()


def _imports(part: ast.stmt) -> bool:
    return isinstance(part, ast.Import | ast.ImportFrom)


def _imports_standard(part: ast.stmt) -> bool:
    """Returns whether a statement imports modules that every sandbox has."""
    if isinstance(part, ast.Import):
        modules = [alias.name for alias in part.names]
    elif isinstance(part, ast.ImportFrom) and part.module and not part.level:
        modules = [part.module]
    else:
        return False
    return all(module.partition(".")[0] in sys.stdlib_module_names for module in modules)


def _idle(part: ast.stmt) -> bool:
    """Returns whether a statement does nothing that a test could depend on: a docstring, `pass`,
    data under a name."""
    if isinstance(part, ast.Assign):
        return all(
            isinstance(node, ast.Constant | ast.Dict | ast.List | ast.Tuple | ast.expr_context)
            for node in ast.walk(part.value)
        )
    return isinstance(part, ast.Pass) or (
        isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant | ast.Name)
    )


def _free(node: ast.AST) -> frozenset[str]:
    return frozenset(loaded_names(node) - bound_names(node))


def without_program(text: str) -> str:
    """Returns the tests without imports of the program, so that the imported names count as
    undefined."""
    tree = parse_program(text)
    body = [
        part
        for part in tree.body
        if not (isinstance(part, ast.ImportFrom) and part.module == _PROGRAM and not part.level)
    ]
    return text if len(body) == len(tree.body) else ast.unparse(ast.Module(body, []))


def as_asserts(text: str) -> list[str]:
    """Returns tests as pytest would run them: one text for each function `test_...` that nothing
    calls, with the statements beside these functions. Other tests are returned unchanged. Raises
    SyntaxError."""
    text = without_program(text)
    tree = parse_program(text)
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
    """Returns the asserts of a function that has nothing else; else its definition and a call of
    it."""
    plain = [part for part in test.body if not _is_text(part)]
    if plain and all(isinstance(part, ast.Assert) for part in plain):
        return list(plain)
    return [test, ast.Expr(ast.Call(ast.Name(test.name, ast.Load()), [], []))]


def _is_text(part: ast.stmt) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
