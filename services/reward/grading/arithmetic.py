"""Evaluates arithmetic of whole numbers exactly, as fractions: 1/49*49 is 1. Read from Python's
syntax tree and never run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def value(expression: str) -> Fraction:
    """Returns the value of whole numbers, + - * / // % and parentheses. Its cost grows with the
    length of `expression`, which the caller bounds. Raises ValueError for anything else, and where
    there is no value."""
    try:
        return _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(f"{type(error).__name__}: {error.args[0]}") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("too many operations inside each other") from error


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return Fraction(_BINARY[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    raise ValueError(f"{ast.unparse(node)!r:.80} is not arithmetic of whole numbers")
