"""Evaluates expressions that are read from Python's syntax tree and never run as Python.

Two languages are subclasses of `Evaluator`. They differ in their values and operators: exact
arithmetic is here, formulas over graders' values are in `graders/multi.py`.
"""

from __future__ import annotations

import ast
import operator
import threading
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, ClassVar

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


class Evaluator:
    """A language of literals, names, operators and calls of `FUNCTIONS`. `values` are the values of
    the names."""

    BINARY: ClassVar[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {}
    UNARY: ClassVar[Mapping[type[ast.unaryop], Callable[[Any], Any]]] = {}
    FUNCTIONS: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    LITERALS: ClassVar[tuple[type, ...]] = (int, float)
    REFUSAL: ClassVar[str] = "is not part of this language"
    """Ends the sentence about a part that the language does not have."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @classmethod
    def names(cls, node: ast.AST) -> set[str]:
        """Returns the names in an expression. Raises ValueError for a part of it that the language
        does not have."""
        if isinstance(node, ast.Constant) and type(node.value) in cls.LITERALS:
            return set()
        if isinstance(node, ast.Name):
            return {node.id}
        if isinstance(node, ast.BinOp) and type(node.op) in cls.BINARY:
            return cls.names(node.left) | cls.names(node.right)
        if isinstance(node, ast.UnaryOp) and type(node.op) in cls.UNARY:
            return cls.names(node.operand)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in cls.FUNCTIONS
            and not node.keywords
        ):
            return {name for part in node.args for name in cls.names(part)}
        raise ValueError(f"{ast.unparse(node)!r:.80} {cls.REFUSAL}")

    def of(self, node: ast.AST | None) -> Any:
        """Returns the value of an expression of this language."""
        return getattr(self, f"_{type(node).__name__.lower()}")(node)

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _name(self, node: ast.Name) -> Any:
        return self._values[node.id]

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        return self.UNARY[type(node.op)](self.of(node.operand))

    def _binop(self, node: ast.BinOp) -> Any:
        return self.BINARY[type(node.op)](self.of(node.left), self.of(node.right))

    def _call(self, node: ast.Call) -> Any:
        assert isinstance(node.func, ast.Name)
        return self.FUNCTIONS[node.func.id](*map(self.of, node.args))


class _Exact(Evaluator):
    """Arithmetic of whole numbers, in fractions: 1/49*49 is 1."""

    BINARY: ClassVar = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
    }
    UNARY: ClassVar = {ast.USub: operator.neg, ast.UAdd: operator.pos}
    LITERALS: ClassVar = (int,)
    REFUSAL: ClassVar = "is not arithmetic of whole numbers"

    def _constant(self, node: ast.Constant) -> Fraction:
        return Fraction(node.value)  # pyright: ignore

    def _name(self, node: ast.Name) -> Any:
        raise ValueError(f"{node.id!r:.80} {self.REFUSAL}")

    def _binop(self, node: ast.BinOp) -> Fraction:
        return Fraction(super()._binop(node))  # 7//2 is an int, and int/int would be a float


def arithmetic(expression: str) -> Fraction:
    """Returns the value of whole numbers, + - * / // % and parentheses. Its cost grows with the
    length of `expression`, which the caller bounds. Raises ValueError for any other expression, and
    for an expression that has no value."""
    try:
        tree = parse_expression(expression)
        _Exact.names(tree)
        return _Exact({}).of(tree)
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(f"{type(error).__name__}: {error.args[0]}") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("too many operations inside each other") from error
