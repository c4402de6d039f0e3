"""Evaluates formulas such as `0.8 * right + 0.2 * min(style, 1)`: numbers, names, arithmetic, a few
functions. Nothing else.

Read from Python's syntax tree and never run as Python, so a formula can do nothing but arithmetic.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_CHARS = 1000

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}
_BINARY: dict[type[ast.operator], Callable[[float, float], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class FormulaError(ValueError):
    """What is wrong with a formula, or with it for these values."""


@dataclass(frozen=True)
class Formula:
    """A parsed formula. `names` are those of the values it needs."""

    tree: ast.expr
    names: frozenset[str]

    def value(self, values: dict[str, float]) -> float:
        """Returns the value for these `values` by name. Raises FormulaError where it is no finite
        number."""
        try:
            result = _value(self.tree, {name: float(value) for name, value in values.items()})
        except (ArithmeticError, ValueError, TypeError) as error:
            raise FormulaError(f"the formula has no value for {values}: {error}") from error
        if isinstance(result, complex) or not math.isfinite(result):
            raise FormulaError(f"the formula is {result} for {values}")
        return float(result)


def parse(source: str) -> Formula:
    """Returns the formula. Raises FormulaError for anything that is not arithmetic."""
    if len(source) > MAX_CHARS:
        raise FormulaError(f"a formula of {len(source)} characters; at most {MAX_CHARS} are taken")
    try:
        tree = ast.parse(source.strip(), mode="eval").body
        return Formula(tree, frozenset(_names(tree)))
    except FormulaError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FormulaError(f"formula {source!r:.80} cannot be read: {error}") from error


def _names(node: ast.expr) -> set[str]:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return set()
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _names(node.left) | _names(node.right)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _names(node.operand)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in FUNCTIONS
        and not node.keywords
    ):
        return {name for part in node.args for name in _names(part)}
    known = f"numbers, names of graders, + - * / ** and {', '.join(FUNCTIONS)}"
    raise FormulaError(f"{ast.unparse(node)!r:.80} is not allowed in a formula; it has {known}")


def _value(node: ast.expr, values: dict[str, float]) -> Any:
    if isinstance(node, ast.Constant):
        return float(node.value)  # pyright: ignore[reportArgumentType]
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_value(node.left, values), _value(node.right, values))
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](_value(node.operand, values))
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return FUNCTIONS[node.func.id](*(_value(part, values) for part in node.args))
