"""Syntax trees are made in one thread at a time."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from services.reward.grading import expressions


def test_no_two_threads_parse_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []
    parse = ast.parse

    def noting(*args: Any, **kwargs: Any) -> ast.AST:
        held.append(expressions._PARSING.locked())  # pyright: ignore[reportPrivateUsage]
        return parse(*args, **kwargs)

    monkeypatch.setattr(ast, "parse", noting)
    expressions.parse_program("x = 1")
    assert isinstance(expressions.parse_expression("1 + 2"), ast.BinOp)
    assert held == [True, True]
    assert not expressions._PARSING.locked()  # pyright: ignore[reportPrivateUsage]
