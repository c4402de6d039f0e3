"""docs/diagnosis.md has every finding, and every key that a finding names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from hone.commands.explain import find
from shared.wire.jobs import FindingCode

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/diagnosis.md").read_text()
KEY = re.compile(r"HONE_[A-Z_]+|[a-z_]+(?:\.[a-z_]+)*")


def nodes() -> Iterator[ast.AST]:
    for file in sorted((ROOT / "services/orchestrator/extensions/diagnosis").glob("*.py")):
        yield from ast.walk(ast.parse(file.read_text()))


def strings(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def named(keyword: str) -> set[str]:
    """Every string in an argument of this name."""
    found = [node.value for node in nodes() if isinstance(node, ast.keyword) if node.arg == keyword]
    return {text for value in found for text in strings(value)}


def test_the_page_and_the_code_have_the_same_findings() -> None:
    codes = set(get_args(FindingCode))
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (?:problem|warning|notice)", PAGE, re.MULTILINE)
    assert {code for row in rows for code in re.findall(r"\w+", row)} == codes
    assert named("code") == codes


def test_the_keys_of_findings_are_keys_and_settings() -> None:
    from services.orchestrator.extensions.diagnosis.running import SIDES

    texts = named("keys") | {keys for _, _, keys in SIDES.values()}
    keys = {key for text in texts for key in text.split()}
    assert len(keys) > 30 and all(KEY.fullmatch(key) for key in keys)
    for key in sorted(keys):
        assert find(key), key


@pytest.mark.parametrize("setting", sorted(set(re.findall(r"HONE_[A-Z_]+", PAGE))))
def test_settings_on_the_page_exist(setting: str) -> None:
    assert find(setting)
