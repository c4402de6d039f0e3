"""Which tests mean something, and who defines the names that tests use and do not define: the
program or Python. Decided from the row alone: a program that could say what `isclose` means would
judge itself."""

from __future__ import annotations

import ast
import builtins
import unittest
from collections.abc import Iterable, Iterator
from functools import lru_cache

from services.reward.grading.expressions import parse_program

BUILTINS = frozenset(dir(builtins))

_EVALUATING = frozenset({"eval", "exec", "compile", "__import__", "pickle", "marshal"})
_CATCH_OUTPUT = frozenset({"redirect_stdout", "redirect_stderr", "capsys", "capfd"})
_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_OF_PLAIN_DATA = frozenset(
    name
    for kind in (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
    for name in dir(kind)
)

_MODULES = """
asyncio bisect cmath collections contextlib copy datetime decimal fractions functools heapq io
itertools json math numbers numpy operator os pytest random re statistics string sys time typing
unittest
"""
_OF_MODULES = {
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "contextlib": "suppress",
    "copy": "copy deepcopy",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal getcontext",
    "fractions": "Fraction",
    "functools": "cmp_to_key lru_cache partial reduce",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "io": "BytesIO StringIO",
    "itertools": "accumulate chain combinations combinations_with_replacement compress count cycle "
    "dropwhile filterfalse groupby islice pairwise permutations product repeat starmap takewhile "
    "tee zip_longest",
    "math": "acos acosh asin asinh atan atan2 atanh ceil comb copysign cos cosh degrees dist e erf "
    "exp expm1 fabs factorial floor fmod frexp fsum gamma gcd hypot inf isclose isfinite isinf "
    "isnan isqrt lcm ldexp lgamma log log10 log1p log2 modf nan perm pi prod radians remainder sin "
    "sinh sqrt tan tanh tau trunc",
    "operator": "attrgetter itemgetter methodcaller",
    "pytest": "approx raises",
    "random": "choice choices randint randrange sample seed shuffle uniform",
    "statistics": "fmean mean median mode multimode pstdev pvariance stdev variance",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation whitespace",
    "typing": "Any Callable Dict Iterable Iterator List Optional Sequence Set Tuple Union",
}
_ONE_BY_ONE = {
    "np": "import numpy as np",
    "assert_allclose": "from numpy.testing import assert_allclose",
    "assert_array_equal": "from numpy.testing import assert_array_equal",
    "assert_array_almost_equal": "from numpy.testing import assert_array_almost_equal",
}


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def _of_unittest() -> Iterator[tuple[str, str]]:
    """Yields `assertEqual` and `assert_equal`, and so on, as functions: as nose had them."""
    for name in dir(unittest.TestCase):
        if name.startswith("assert") and name != "assert_":
            for own in (name, _snake(name)):
                yield own, f"import unittest\n{own} = unittest.TestCase().{name}"


STANDARD: dict[str, str] = {
    **dict(_of_unittest()),
    **{name: f"import {name}" for name in _MODULES.split()},
    **{
        name: f"from {module} import {name}"
        for module, names in _OF_MODULES.items()
        for name in names.split()
    },
    **_ONE_BY_ONE,
}
"""The source that defines a name, for names that tests may use without an import."""


def of_program(tests: ast.Module, setup: str, entry_point: str | None) -> frozenset[str]:
    """Returns the names that the program has to define: `entry_point`, the undefined names that are
    not Python's, and names of Python that are tested themselves, as in `assert gcd(12, 18) ==
    6`."""
    unknown = _unknown(tests, setup)
    others = unknown - STANDARD.keys()
    if entry_point is not None:
        return frozenset({*others, entry_point})
    looked_at = [part for node in ast.walk(tests) for part in _looked_at(node, not others)]
    return frozenset(
        name
        for part in looked_at
        if not loaded_names(part) & others
        for name in _innermost_calls(part, unknown)
    ).union(others)


def _looked_at(node: ast.AST, is_alone: bool) -> list[ast.expr]:
    """Returns the expressions that a statement of the tests asserts something about. If no other
    name is the program's (`is_alone`), expressions that it only uses count too."""
    if isinstance(node, ast.Assert):
        return [node.test]
    if isinstance(node, ast.Call) and _last_name(node).lower().startswith("assert"):
        return node.args[:1]
    return [node.value] if is_alone and isinstance(node, ast.Assign | ast.Expr) else []


def _unknown(tests: ast.Module, setup: str) -> set[str]:
    known = BUILTINS | bound_names(tests) | names_of(setup)
    return loaded_names(tests) - known


def _innermost_calls(test: ast.expr, names: set[str]) -> list[str]:
    """Returns the name that is called first of all, as a list of at most one."""
    for child in ast.iter_child_nodes(test):
        if isinstance(child, ast.expr) and (found := _innermost_calls(child, names)):
            return found
        if isinstance(child, ast.keyword) and (found := _innermost_calls(child.value, names)):
            return found
    is_call = isinstance(test, ast.Call) and isinstance(test.func, ast.Name)
    return [test.func.id] if is_call and test.func.id in names else []  # pyright: ignore[reportAttributeAccessIssue]


def needs_program(setup: str) -> bool:
    """Returns whether a setup uses names that are the program's, as a class of which it makes
    objects for the tests."""
    tree = parse_program(setup)
    return bool(loaded_names(tree) - BUILTINS - bound_names(tree) - STANDARD.keys())


def completed(text: str, setup: str, names: frozenset[str]) -> str:
    """Returns the tests with the imports that they lack, of standard names that the program does
    not define itself (`names`)."""
    tree = parse_program(text)
    missing = sorted((_unknown(tree, setup) & STANDARD.keys()) - names)
    modules = {
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    } & {*_MODULES.split()}
    imports = [f"import {name}" if name in modules else STANDARD[name] for name in missing]
    return "\n".join([*imports, text])


def fault(tree: ast.Module, names: frozenset[str]) -> str | None:
    """Returns why the verdict of these tests would mean nothing because of `names`, which they take
    from the program; None if it means something."""
    if name := _class_of_its_own(tree, names):
        return (
            f"the tests ask for the class {name!r}, which is the program's, and only Python's own "
            "errors and plain data cross"
        )
    if name := _compared(tree, names):
        return f"the tests compare with {name!r}, and nothing defines it"
    if name := _judge(tree, names):
        return (
            f"the tests take {name!r} from the program, which would judge itself by it; expected "
            "tests that define or import what judges a result"
        )
    return None


def _class_of_its_own(tree: ast.Module, names: frozenset[str]) -> str | None:
    kinds: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type:
            kinds.append(node.type)
        elif isinstance(node, ast.Call):
            called = _last_name(node)
            if called in ("raises", "assertRaises", "assertRaisesRegex", "suppress"):
                kinds += node.args[:1]
            elif called in ("isinstance", "issubclass", "assertIsInstance"):
                kinds += node.args[1:2]
    parts = [one for kind in kinds for one in getattr(kind, "elts", [kind])]
    return next((one.id for one in parts if isinstance(one, ast.Name) and one.id in names), None)


def _compared(tree: ast.Module, names: frozenset[str]) -> str | None:
    """Returns a name that the tests use only as an operand of `==` or another comparison."""
    loaded = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in names]
    operands = [
        operand
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for operand in (node.left, *node.comparators)
        if isinstance(operand, ast.Name)
    ]
    compared = {*map(id, operands)}
    elsewhere = {node.id for node in loaded if id(node) not in compared}
    return next((one.id for one in operands if one.id in names - elsewhere), None)


def _judge(tree: ast.Module, names: frozenset[str]) -> str | None:
    """Returns a function that the tests call only on results of other functions, as a judge of
    them, and never on data."""
    results = names | _variables_of(tree, names)
    tests: list[ast.expr] = []
    for node in ast.walk(tree):
        tests += [node.test] if isinstance(node, ast.Assert) else []
        tests += [node.value] if isinstance(node, ast.Expr) else []
    judges = [
        name
        for condition in (one for test in tests for one in _conditions(test))
        if (name := _called(condition)) in names and (_of_arguments(condition) & results) - {name}
    ]
    if not judges:
        return None
    asserted = [node for test in tests for node in ast.walk(test)]
    tested = {_called(node) for node in asserted if not _of_arguments(node) & results}
    return next((name for name in judges if name not in tested), None)


_DECIDING = frozenset({"all", "any", "bool", "asserttrue", "assertfalse"})


def _conditions(test: ast.expr) -> Iterable[ast.expr]:
    """Returns the parts of a test whose truth decides it: of `not f()`, `f() == True`, `f() and
    g()`, `all([f(), g()])`, `assertTrue(f())`."""
    parts: list[ast.expr] = []
    if isinstance(test, ast.UnaryOp):
        parts = [test.operand]
    elif isinstance(test, ast.BoolOp):
        parts = test.values
    elif isinstance(test, ast.Compare):
        sides = [test.left, *test.comparators]
        others = [side for side in sides if not isinstance(getattr(side, "value", None), bool)]
        parts = others if len(others) == 1 else []
    elif isinstance(test, ast.Call) and _last_name(test).replace("_", "").lower() in _DECIDING:
        parts = test.args[:1]
    elif isinstance(test, ast.List | ast.Tuple):
        parts = test.elts
    elif isinstance(test, ast.GeneratorExp | ast.ListComp):
        parts = [test.elt]
    return [one for part in parts for one in _conditions(part)] or [test]


def _last_name(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _called(node: ast.AST) -> str:
    """Returns the name that a call begins with, as `np` of `np.isclose(...)`, "" of no call."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    while isinstance(function, ast.Attribute):
        function = function.value
    return function.id if isinstance(function, ast.Name) else ""


def _of_arguments(node: ast.AST) -> set[str]:
    """Returns the names that are called in a call's arguments, and the variables there."""
    if not isinstance(node, ast.Call):
        return set()
    parts = [*node.args, *(one.value for one in node.keywords)]
    inner = [each for part in parts for each in ast.walk(part)]
    functions = {id(each.func) for each in inner if isinstance(each, ast.Call)}
    variables = {e.id for e in inner if isinstance(e, ast.Name) and id(e) not in functions}
    return ({_called(each) for each in inner} | variables) - {""}


def _variables_of(tree: ast.Module, names: frozenset[str]) -> frozenset[str]:
    """Returns the variables that are assigned what functions of `names` return, or a part of it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=assigned):
                pass
            case (
                ast.AnnAssign(target=target, value=ast.expr() as assigned)
                | ast.NamedExpr(target=target, value=assigned)
                | ast.For(target=target, iter=assigned)
                | ast.comprehension(target=target, iter=assigned)
            ):
                targets = [target]
            case _:
                continue
        if {_called(part) for part in ast.walk(assigned)} & names:
            found |= {name for each in targets for name in bound_names(each)}
    return frozenset(found)


def calls_for_check(tree: ast.Module) -> bool:
    """Returns whether the tests define `check(candidate)` and do not call it."""
    defined = any(
        isinstance(part, ast.FunctionDef) and part.name == "check" and part.args.args
        for part in tree.body
    )
    top = [part for part in tree.body if not isinstance(part, ast.FunctionDef | ast.ClassDef)]
    called = any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "check"
        for node in nodes(top)
    )
    return defined and not called


def assert_something(tree: ast.AST) -> bool:
    """Returns whether a program could fail these tests other than by raising: whether they have an
    `assert` that does not always hold, a `raise`, or a call of `assert_equal(...)`,
    `self.fail(...)`, `pytest.raises(...)`, `exit(...)` and the like."""
    return any(
        isinstance(node, ast.Raise)
        or (isinstance(node, ast.Assert) and not always_holds(node.test))
        or (isinstance(node, ast.Call) and _judges(node.func))
        for node in ast.walk(tree)
    )


def always_holds(test: ast.expr) -> bool:
    """Returns whether an assertion holds for any program: a constant, a tuple or list that is not
    empty (`assert (f(1) == 2, "why")`), a generator, a lambda."""
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
    """Returns the name of the function by which the tests run text as Python, or None. What a
    program returns must not run beside the tests; constant text in the tests may."""
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
    Only plain data crosses. A class is recognized by its capital letter and by attributes that no
    plain data has, because functions are also called `Find_Max`."""
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
    """Returns how the tests look at more than the plain data that the candidate's functions,
    `names`, return; None if they do not. No program could pass such tests, because its functions
    run in another process."""
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


def nodes(body: Iterable[ast.AST]) -> Iterable[ast.AST]:
    return (node for part in body for node in ast.walk(part))


def loaded_names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


@lru_cache(16)
def names_of(setup: str) -> frozenset[str]:
    """Returns the names that a setup binds. It is parsed once for all tests of its row."""
    return bound_names(parse_program(setup))


def bound_names(node: ast.AST) -> frozenset[str]:
    """Returns the names that are assigned, defined or imported anywhere in `node`."""
    names: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.ClassDef):
            names.add(part.name)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            names.add(part.id)
        elif isinstance(part, ast.arg):
            names.add(part.arg)
        elif isinstance(part, ast.alias):
            names.add((part.asname or part.name).partition(".")[0])
    return frozenset(names)
