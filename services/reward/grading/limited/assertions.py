"""Evaluates the assertions of tests, on the trusted side, over plain values: a small language, read
from Python's syntax tree.

Constants, collections, arithmetic, comparisons, `and`/`or`/`not`, subscripts, a few functions and
methods. `supported` says before anything runs whether an expression stays within it. Equality is
Python's own, so 1 is True, as where others run these tests; of results that are given as data, and
to a strict judge, it is `same` of expressions.py. Values have exact types, so no equality is the
program's.

Values come from untrusted code. Operations that are known to take long or much memory are refused
before they cost anything; the limits of this process end all others.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import operator
import sys
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar

from services.reward.grading.codec import NotPlain, UnfinishedIterator, decode, has_hash_collisions
from services.reward.grading.expressions import Evaluator, parse_expression, same

MAX_SIZE = 1_000_000
MAX_BITS = 100_000
MAX_DIGITS = 1000
MAX_TEXT_DIGITS = 30_000
"""Most digits of a number as text: writing or reading it takes time that grows with their
square."""

MAX_JOINED = 10_000

Equal = Callable[[Any, Any], bool]


class UnsatisfiableAssertion(Exception):
    """The assertion cannot hold for these values; the message says why."""


def _range(*arguments: int) -> range:
    return _bounded(range(*arguments))


def _bounded(value: Any) -> Any:
    if isinstance(value, range | str | bytes | list | tuple | deque) and len(value) > MAX_SIZE:
        raise UnsatisfiableAssertion(f"more than {MAX_SIZE} items")
    return value


def _times(left: Any, right: Any) -> Any:
    for many, count in ((left, right), (right, left)):
        if (
            isinstance(many, str | bytes | list | tuple | deque)
            and isinstance(count, int)
            and len(many) * count > MAX_SIZE
        ):
            raise UnsatisfiableAssertion(f"more than {MAX_SIZE} items")
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() + right.bit_length() > MAX_BITS
    ):
        raise UnsatisfiableAssertion(f"a number of more than {MAX_BITS} bits")
    return left * right


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str | bytes):
        raise UnsatisfiableAssertion("text formatting")
    return left % right


def _round(number: Any, digits: Any = None) -> Any:
    if isinstance(digits, int) and abs(digits) > MAX_DIGITS:
        raise UnsatisfiableAssertion(f"rounding to {digits} digits")
    return round(number) if digits is None else round(number, digits)


def _sum(items: Any, start: Any = 0) -> Any:
    parts = list(items)
    if isinstance(start, list | tuple) and sum(len(part) for part in parts) > MAX_JOINED:
        raise UnsatisfiableAssertion(f"more than {MAX_JOINED} items added up one by one")
    return sum(parts, start)


def _join(between: Any, items: Any) -> Any:
    parts = list(items)
    if len(between) * len(parts) + sum(len(part) for part in parts) > MAX_SIZE:
        raise UnsatisfiableAssertion(f"more than {MAX_SIZE} items")
    return between.join(parts)


def _power(base: Any, exponent: Any) -> Any:
    bits = _bits(base)
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        exponent = exponent.numerator  # as Python takes it
    if isinstance(exponent, int) and bits * abs(exponent) > MAX_BITS:
        raise UnsatisfiableAssertion(f"a number of more than {MAX_BITS} bits")
    return base**exponent


def _bits(number: Any) -> int:
    """Returns at least as many bits as an exact number has, 0 of others."""
    if isinstance(number, Decimal):
        return abs(number.adjusted()) + 1
    if isinstance(number, int | Fraction):
        return number.numerator.bit_length() + number.denominator.bit_length()
    return 0


_KNOWN = """
abs all any bool complex dict divmod enumerate float frozenset int isinstance len list max min
reversed set sorted str tuple type zip
"""
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in _KNOWN.split()},
    "range": _range,
    "round": _round,
    "sum": _sum,
}
AGREES = "_agrees_with_one_of"
"""The function of tests that are given as data. Its arguments: a result, the results that are
right, and a tolerance."""


def _agrees(value: Any, wanted: list[Any], tolerance: float) -> bool:
    return any(same(_as_json(value), _as_json(one), tolerance) for one in wanted)


def _as_json(value: Any) -> Any:
    """Returns a value as it would be once written as JSON and read again."""
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    if isinstance(value, dict):
        return {_key(key): _as_json(part) for key, part in value.items()}
    return value


def _key(key: Any) -> Any:
    return json.dumps(key) if isinstance(key, int | float | None) else key


FUNCTIONS[AGREES] = _agrees
_MATH = "ceil cos e exp fabs floor inf isclose isinf isnan log nan pi sin sqrt"
MATH: dict[str, Any] = {name: getattr(math, name) for name in _MATH.split()}
METHODS = {"count", "get", "items", "join", "keys", "lower", "split", "strip", "upper", "values"}

_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _times,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: _modulo,
    ast.Pow: _power,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_MEMBERS = (ast.In, ast.NotIn)
_LEAVES = (
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.Set,
    ast.Dict,
    ast.BoolOp,
    ast.IfExp,
    ast.Subscript,
    ast.Slice,
)


def supported(node: ast.AST, names: frozenset[str]) -> bool:
    """Returns whether `evaluate` can evaluate this, given values for `names`."""
    if isinstance(node, ast.Name):
        return node.id in names or node.id in FUNCTIONS or node.id == "isclose"
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id == "math" and node.attr in MATH
    if isinstance(node, ast.Call):
        keywords = [keyword.value for keyword in node.keywords if keyword.arg not in (None, "key")]
        if len(keywords) < len(node.keywords) or any(
            isinstance(argument, ast.Starred) for argument in node.args
        ):
            return False
        return _supported_function(node.func, names) and all(
            supported(part, names) for part in (*node.args, *keywords)
        )
    if isinstance(node, ast.Compare):
        for kind, right in zip(node.ops, node.comparators, strict=True):
            singleton = isinstance(right, ast.Constant) and (
                right.value is None or isinstance(right.value, bool)
            )
            if isinstance(kind, ast.Is | ast.IsNot) and not singleton:
                return False
    elif isinstance(node, ast.UnaryOp):
        return type(node.op) in _UNARY and supported(node.operand, names)
    elif isinstance(node, ast.BinOp):
        is_text = isinstance(node.left, ast.Constant | ast.JoinedStr) and isinstance(
            getattr(node.left, "value", ""), str | bytes
        )
        formats = isinstance(node.op, ast.Mod) and is_text
        return (
            type(node.op) in _BINARY
            and not formats
            and supported(node.left, names)
            and supported(node.right, names)
        )
    elif not isinstance(node, _LEAVES) or (isinstance(node, ast.Dict) and None in node.keys):
        return False
    return all(
        supported(part, names) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)
    )


def _supported_function(node: ast.expr, names: frozenset[str]) -> bool:
    if isinstance(node, ast.Attribute) and not supported(node, names):
        return node.attr in METHODS and supported(node.value, names)
    return isinstance(node, ast.Attribute | ast.Name) and supported(node, names)


def prepare(function: str) -> None: ...


def judged(
    cases: list[tuple[str, str, list[str]]], special: list[str], is_strict: bool = False
) -> list[list[str]]:
    """Returns verdict and reason of each case, which has its source to show, the test, and the
    encoded results `_0`, `_1`, ... `special` are the special floats that results may have. To a
    strict judge True is not 1."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(MAX_TEXT_DIGITS)
    try:
        equal = same if is_strict else operator.eq
        return [_verdict(*case, frozenset(special), equal) for case in cases]
    finally:
        sys.set_int_max_str_digits(before)


def _verdict(
    shown: str, test: str, results: list[str], special: frozenset[str], equal: Equal
) -> list[str]:
    try:
        values = [decode(text, special=special) for text in results]
    except NotPlain as error:
        return ["wrong", f"returned {error} in {shown:.100}"]
    got = ", ".join(map(_shown, values))
    try:
        holds = evaluate(
            parse_expression(test),
            {f"_{number}": value for number, value in enumerate(values)},
            equal,
        )
    except (
        UnsatisfiableAssertion,
        UnfinishedIterator,
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
        AttributeError,
    ) as error:
        return ["wrong", f"{shown:.100} cannot hold for {got} ({error!s:.80})"]
    return ["ok", ""] if holds else ["wrong", f"{shown:.100} does not hold: it got {got}"]


def evaluate(node: ast.expr, values: dict[str, Any], equal: Equal = operator.eq) -> Any:
    """Returns the value of a supported expression; `values` has the values of its free names.
    Raises UnsatisfiableAssertion, or what Python would."""
    return _Evaluation(values, equal).of(node)


class _Evaluation(Evaluator):
    BINARY: ClassVar = _BINARY
    UNARY: ClassVar = _UNARY
    FUNCTIONS: ClassVar = FUNCTIONS

    def __init__(self, values: dict[str, Any], equal: Equal) -> None:
        super().__init__(values)
        self._equal = equal

    def _name(self, node: ast.Name) -> Any:
        if node.id in self._values:
            return self._values[node.id]
        return FUNCTIONS[node.id] if node.id in FUNCTIONS else MATH[node.id]

    def _attribute(self, node: ast.Attribute) -> Any:
        return MATH[node.attr]

    def _list(self, node: ast.List) -> list[Any]:
        return [self.of(part) for part in node.elts]

    def _tuple(self, node: ast.Tuple) -> tuple[Any, ...]:
        return tuple(self.of(part) for part in node.elts)

    def _set(self, node: ast.Set) -> set[Any]:
        return {self.of(part) for part in node.elts}

    def _dict(self, node: ast.Dict) -> dict[Any, Any]:
        return {
            self.of(key): self.of(value) for key, value in zip(node.keys, node.values, strict=True)
        }

    def _boolop(self, node: ast.BoolOp) -> Any:
        value: Any = None
        for part in node.values:
            value = self.of(part)
            if bool(value) is isinstance(node.op, ast.Or):
                break
        return value

    def _ifexp(self, node: ast.IfExp) -> Any:
        return self.of(node.body if self.of(node.test) else node.orelse)

    def _subscript(self, node: ast.Subscript) -> Any:
        return self.of(node.value)[self.of(node.slice)]

    def _slice(self, node: ast.Slice) -> slice:
        return slice(
            *(
                None if part is None else self.of(part)
                for part in (node.lower, node.upper, node.step)
            )
        )

    def _call(self, node: ast.Call) -> Any:
        arguments = [_bounded(self.of(part)) for part in node.args]
        keywords = {str(keyword.arg): self.of(keyword.value) for keyword in node.keywords}
        if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            value = self.of(node.func.value)
            if node.func.attr == "join":
                return _join(value, *arguments, **keywords)
            return getattr(value, node.func.attr)(*arguments, **keywords)
        function = self.of(node.func)
        if function in (set, frozenset, dict):
            arguments = [_to_hash(function, argument) for argument in arguments]
        return function(*arguments, **keywords)

    def _compare(self, node: ast.Compare) -> bool:
        left = self.of(node.left)
        for kind, comparator in zip(node.ops, node.comparators, strict=True):
            right = self.of(comparator)
            if not _holds(kind, left, right, self._equal):
                return False
            left = right
        return True


def _to_hash(function: Any, items: Any) -> Any:
    """Returns the argument of `set`, `frozenset` or `dict` if making that is quick. Raises
    UnsatisfiableAssertion if not."""
    if isinstance(items, set | frozenset | dict):
        return items
    parts = list(items)
    if has_hash_collisions(part[0] if function is dict else part for part in parts):
        raise UnsatisfiableAssertion("too many items of one hash")
    return parts


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:
        return f"a number of more than {MAX_TEXT_DIGITS} digits"


def _holds(kind: ast.cmpop, left: Any, right: Any, equal: Equal) -> bool:
    if isinstance(kind, ast.Eq | ast.NotEq):
        return bool(equal(left, right)) is isinstance(kind, ast.Eq)
    if isinstance(kind, ast.Is | ast.IsNot):
        return (left is right) is isinstance(kind, ast.Is)
    if isinstance(kind, _MEMBERS):
        found = (
            left in right
            if isinstance(right, str | bytes)
            else any(equal(left, part) for part in right)
        )
        return found is isinstance(kind, ast.In)
    if left != left or right != right:
        raise UnsatisfiableAssertion("NaN has no order")  # so that "not x > 3" does not hold for it
    return _ORDER[type(kind)](left, right)
