"""What tests must be like so that their verdict means something. Decided from their source alone,
before any program: no program can change it."""

from __future__ import annotations

import ast
from collections.abc import Iterable

_EVALUATING = frozenset({"eval", "exec", "compile", "__import__", "pickle", "marshal"})
_CATCH_OUTPUT = frozenset({"redirect_stdout", "redirect_stderr", "capsys", "capfd"})
_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_OF_PLAIN_DATA = frozenset(
    name
    for kind in (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
    for name in dir(kind)
)


def calls_for_check(tree: ast.Module) -> bool:
    """Returns whether the tests define `check(candidate)` and leave the call to others."""
    defined = any(
        isinstance(part, ast.FunctionDef) and part.name == "check" and part.args.args
        for part in tree.body
    )
    top = [part for part in tree.body if not isinstance(part, ast.FunctionDef | ast.ClassDef)]
    called = any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "check"
        for node in _nodes(top)
    )
    return defined and not called


def assert_something(tree: ast.AST) -> bool:
    """Returns whether a program could fail these tests other than by raising: they have an `assert`
    of anything but what always holds, a `raise`, or a call of `assert_equal(...)`,
    `self.fail(...)`, `pytest.raises(...)`, `exit(...)` and the like."""
    return any(
        isinstance(node, ast.Raise)
        or (isinstance(node, ast.Assert) and not always_holds(node.test))
        or (isinstance(node, ast.Call) and _judges(node.func))
        for node in ast.walk(tree)
    )


def always_holds(test: ast.expr) -> bool:
    """Returns whether what is asserted is true whatever is in it: a constant, a tuple or list that
    is not empty (`assert (f(1) == 2, "why")`), a generator, a lambda."""
    if isinstance(test, ast.Tuple | ast.List | ast.Set):
        return any(not isinstance(part, ast.Starred) for part in test.elts)
    return isinstance(test, ast.GeneratorExp | ast.Lambda) or (
        isinstance(test, ast.Constant) and bool(test.value)
    )


def _judges(function: ast.expr) -> bool:
    name = getattr(function, "attr", getattr(function, "id", ""))
    return name.lower().startswith("assert") or name in ("fail", "raises", "exit", "_exit")


def uncalled(tree: ast.Module) -> str | None:
    """Returns a function that the tests define and never name again, as for pytest, or None."""
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    defined = [part.name for part in tree.body if isinstance(part, ast.FunctionDef)]
    return next((name for name in defined if name not in named), None)


def evaluated(tree: ast.AST) -> str | None:
    """Returns the name by which the tests run text as Python, or None. What a program returns must
    not run beside the tests; text that stands in them may."""
    constant = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and node.args
        and all(isinstance(argument, ast.Constant) for argument in node.args)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _EVALUATING and id(node) not in constant:
            return node.id
    return None


def object_of(tree: ast.AST, names: Iterable[str]) -> str | None:
    """Returns the class of the candidate, among `names`, of which the tests use an object, or None.
    Only plain data crosses. Told by a name in capitals and by attributes that no plain data has,
    for many a function is called `Find_Max`."""
    classes = {name for name in names if name[:1].isupper()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
            made = node.value
            if isinstance(made.func, ast.Name) and made.func.id in classes and not made.args:
                return made.func.id
    objects = {
        target.id: node.value.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id in classes
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr not in _OF_PLAIN_DATA:
            made = node.value.func if isinstance(node.value, ast.Call) else node.value
            name = made.id if isinstance(made, ast.Name) else ""
            if name in classes or (made is node.value and name in objects):
                return objects.get(name, name)
    return None


def beyond_results(tree: ast.AST, names: Iterable[str]) -> str | None:
    """Returns what the tests do to know more of the candidate's functions, `names`, than the plain
    data that they return, or None. No program could pass: where they run is elsewhere."""
    functions = {*names, *_arguments_of_check(tree)}
    assigned = [
        (target.id, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    results = {name for name, value in assigned if _call_of(functions, value)}
    changeable = {name for name, value in assigned if isinstance(value, _DISPLAYS)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (
            _call_of(functions, node.func) or _call_of(results, node)
        ):
            return f"call a result, {ast.unparse(node.func)}"
        if getattr(node, "id", getattr(node, "attr", "")) in _CATCH_OUTPUT:
            return "read what a program prints"
        call = _call_of(functions, node.value) if isinstance(node, ast.Expr) else None
        if call and any(isinstance(part, ast.Name) and part.id in changeable for part in call.args):
            return f"look at what {ast.unparse(call)} changes, and calls get copies"
    return None


def _arguments_of_check(tree: ast.AST) -> Iterable[str]:
    return (
        part.args.args[0].arg
        for part in ast.walk(tree)
        if isinstance(part, ast.FunctionDef) and part.name == "check" and part.args.args
    )


def _call_of(names: set[str], node: ast.AST) -> ast.Call | None:
    """Returns `node` if it is a call of one of these names."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
        return node
    return None


def _nodes(body: Iterable[ast.AST]) -> Iterable[ast.AST]:
    return (node for part in body for node in ast.walk(part))
