"""Whose the names are that tests use and do not define: the program's, or Python's own. From the
row alone: a program that could say what `isclose` means would judge itself."""

from __future__ import annotations

import ast
import unittest
from collections.abc import Iterable, Iterator

from services.reward.graders.code_tests.asserts import BUILTINS, bound_names, loaded_names

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
"""What tests mean by a name that they do not import, as source that gives it."""


def of_program(tests: ast.Module, setup: str, entry_point: str | None) -> frozenset[str]:
    """Returns the names that are the program's to define: of those that nothing defines,
    `entry_point` and all that are not Python's, and of Python's those that are tested themselves,
    as in `assert gcd(12, 18) == 6`."""
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
    """Returns what a part of tests asserts something of, or, where no other name is the program's,
    makes use of."""
    if isinstance(node, ast.Assert):
        return [node.test]
    if isinstance(node, ast.Call) and _last_name(node).lower().startswith("assert"):
        return node.args[:1]
    return [node.value] if is_alone and isinstance(node, ast.Assign | ast.Expr) else []


def _unknown(tests: ast.Module, setup: str) -> set[str]:
    known = BUILTINS | bound_names(tests) | bound_names(ast.parse(setup))
    return loaded_names(tests) - known


def _innermost_calls(test: ast.expr, names: set[str]) -> list[str]:
    """Returns the name that is called first of all, as a list."""
    for child in ast.iter_child_nodes(test):
        if isinstance(child, ast.expr) and (found := _innermost_calls(child, names)):
            return found
        if isinstance(child, ast.keyword) and (found := _innermost_calls(child.value, names)):
            return found
    is_call = isinstance(test, ast.Call) and isinstance(test.func, ast.Name)
    return [test.func.id] if is_call and test.func.id in names else []  # pyright: ignore[reportAttributeAccessIssue]


def completed(text: str, setup: str, names: frozenset[str]) -> str:
    """Returns tests with the imports that they lack: of the standard names in them that are not
    among `names`, the program's."""
    tree = ast.parse(text)
    missing = sorted((_unknown(tree, setup) & STANDARD.keys()) - names)
    modules = {
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    } & {*_MODULES.split()}
    imports = [f"import {name}" if name in modules else STANDARD[name] for name in missing]
    return "\n".join([*imports, text])


def fault(tree: ast.Module, names: frozenset[str]) -> str | None:
    """Returns why no verdict could be given by these tests, or none that means anything, because of
    what they take from the program: `names` are its."""
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
    """Returns a name that is nowhere but beside a `==` or the like."""
    loaded = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in names]
    operands = [
        operand
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for operand in (node.left, *node.comparators)
        if isinstance(operand, ast.Name)
    ]
    elsewhere = {node.id for node in loaded if node not in operands}
    return next((one.id for one in operands if one.id in names - elsewhere), None)


def _judge(tree: ast.Module, names: frozenset[str]) -> str | None:
    """Returns a function that is asked what to think of what others return, and is itself never
    asked about data."""
    judges: list[str] = []
    for node in ast.walk(tree):
        tests = [node.test] if isinstance(node, ast.Assert) else []
        if isinstance(node, ast.Expr):
            tests = [node.value]
        for condition in (one for test in tests for one in _conditions(test)):
            name = _called(condition)
            if name in names and (_of_arguments(condition) & names) - {name}:
                judges.append(name)
    if not judges:
        return None
    asserts = [part for part in ast.walk(tree) if isinstance(part, ast.Assert)]
    asserted = [node for part in asserts for node in ast.walk(part)]
    tested = {_called(node) for node in asserted if not _of_arguments(node) & names}
    return next((name for name in judges if name not in tested), None)


def _conditions(test: ast.expr) -> Iterable[ast.expr]:
    if isinstance(test, ast.UnaryOp):
        return _conditions(test.operand)
    if isinstance(test, ast.BoolOp):
        return [one for value in test.values for one in _conditions(value)]
    return [test]


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
    """Returns the names that are called in a call's arguments."""
    if not isinstance(node, ast.Call):
        return set()
    parts = [*node.args, *(one.value for one in node.keywords)]
    return {_called(inner) for part in parts for inner in ast.walk(part)} - {""}
