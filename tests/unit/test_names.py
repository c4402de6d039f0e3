"""The names of tests, as CONTRIBUTING.md has them."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_the_name_of_a_test_is_under_80_characters_and_no_module_has_one_twice() -> None:
    for file in TESTS.rglob("test_*.py"):
        names = [
            node.name
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name.startswith("test_")
        ]
        assert len(set(names)) == len(names), file
        assert all(len(name) < 80 for name in names), (file, max(names, key=len))
