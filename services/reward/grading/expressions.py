"""Evaluates expressions that are read from Python's syntax tree and never run as Python.

There are two languages, which differ in their values and operators: exact arithmetic is here,
formulas over graders' values are in `graders/multi.py`.
"""

from __future__ import annotations

import ast
import operator
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

_PARSING = threading.Lock()


def parse_program(source: str) -> ast.Module:
    """Returns the syntax tree of a program, as `ast.parse`, in one thread at a time. CPython 3.11
    counts the depth of a tree for all threads together: two threads that parse at once may meet
    a SystemError (CPython's issue 106905), and a completion would lose its reward."""
    with _PARSING:
        return ast.parse(source)


def parse_expression(source: str) -> ast.expr:
    """Returns the syntax tree of an expression. See `parse_program`."""
    with _PARSING:
        return ast.parse(source, mode="eval").body


@dataclass(frozen=True)
class Language:
    """A language of literals of the types `literals`, names, operators and calls of `functions`.
    `number` converts a literal and a function's result. `refusal` completes the message that names
    a part which the language does not have."""

    binary: Mapping[type[ast.operator], Callable[[Any, Any], Any]]
    literals: tuple[type, ...]
    number: Callable[[Any], Any]
    refusal: str
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Any])

    def names(self, node: ast.AST) -> set[str]:
        """Returns the names in an expression. Raises ValueError for a part of it that the language
        does not have."""
        match node:
            case ast.Constant(value=value) if type(value) in self.literals:
                return set()
            case ast.Name(id=name):
                return {name}
            case ast.BinOp(left=left, op=op, right=right) if type(op) in self.binary:
                return self.names(left) | self.names(right)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
                return self.names(operand)
            case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if (
                name in self.functions
            ):
                return {one for part in parts for one in self.names(part)}
            case _:
                raise ValueError(f"{ast.unparse(node)!r:.80} {self.refusal}")

    def value(self, node: ast.AST, values: Mapping[str, Any]) -> Any:
        """Returns the value of an expression of this language, whose names have these `values`."""
        match node:
            case ast.Constant(value=value):
                return self.number(value)
            case ast.Name(id=name):
                return values[name]
            case ast.BinOp(left=left, op=op, right=right):
                return self.binary[type(op)](self.value(left, values), self.value(right, values))
            case ast.UnaryOp(op=op, operand=operand):
                return UNARY[type(op)](self.value(operand, values))
            case ast.Call(func=ast.Name(id=name), args=parts):
                given = [self.value(part, values) for part in parts]
                return self.number(self.functions[name](*given))
            case _:
                raise AssertionError("`names` refuses it")


UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_EXACT = Language(
    binary={
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        # `//` of two fractions gives an int
        ast.FloorDiv: lambda left, right: Fraction(left // right),
        ast.Mod: operator.mod,
    },
    literals=(int,),
    number=Fraction,
    refusal="is not arithmetic of whole numbers",
)
"""Arithmetic of whole numbers, in fractions: 1/49*49 is 1."""


def arithmetic(expression: str) -> Fraction:
    """Returns the value of whole numbers, + - * / // % and parentheses. Its cost grows with the
    length of `expression`, which the caller bounds. Raises ValueError for any other expression, and
    for an expression that has no value."""
    try:
        tree = parse_expression(expression)
        for name in _EXACT.names(tree):
            raise ValueError(f"{name!r:.80} {_EXACT.refusal}")
        return _EXACT.value(tree, {})
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(f"{type(error).__name__}: {error.args[0]}") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("too many operations inside each other") from error
