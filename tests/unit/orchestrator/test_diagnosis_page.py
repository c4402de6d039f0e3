"""docs/diagnosis.md has every finding, and every key that a finding names exists."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from string import Formatter
from typing import get_args

import pytest

from hone.commands.explain import find
from services.orchestrator.extensions.diagnosis.rules import Sentences, sentences
from shared.wire.jobs import FindingCode

ROOT = Path(__file__).parents[3]
DIAGNOSIS = ROOT / "services/orchestrator/extensions/diagnosis"
PAGE = (ROOT / "docs/diagnosis.md").read_text()
KEY = re.compile(r"HONE_[A-Z_]+|[a-z_]+(?:\.[a-z_]+)*")


def test_the_page_and_the_code_have_the_same_findings() -> None:
    codes = set(get_args(FindingCode))
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (?:problem|warning|notice)", PAGE, re.MULTILINE)
    assert {code for row in rows for code in re.findall(r"\w+", row)} == codes
    assert {each.code for each in sentences().values()} == codes


def test_the_keys_of_findings_are_keys_and_settings() -> None:
    texts = {each.keys for each in sentences().values()}
    keys = {key for text in texts for key in text.split()}
    assert len(keys) > 30 and all(KEY.fullmatch(key) for key in keys)
    for key in sorted(keys):
        assert find(key), key


@pytest.mark.parametrize("setting", sorted(set(re.findall(r"HONE_[A-Z_]+", PAGE))))
def test_settings_on_the_page_exist(setting: str) -> None:
    assert find(setting)


class Anything:
    """A value with every attribute, item and format."""

    def __getattr__(self, name: str) -> Anything:
        return self

    def __getitem__(self, _: object) -> Anything:
        return self

    def __format__(self, _: str) -> str:
        return "3"

    __str__ = __repr__ = lambda self: "3"


def texts_of(said: Sentences) -> tuple[str, ...]:
    return said.title, said.cause, said.remedy


def fields_of(said: Sentences) -> set[str]:
    """The names of the values that an entry's texts take: `m` of `{m.value:.1f}`."""
    parsed = [field for text in texts_of(said) for _, field, _, _ in Formatter().parse(text)]
    return {re.split(r"[.\[]", field)[0] for field in parsed if field}


def words_by_use() -> dict[str, set[str]]:
    """By an entry's name, the names and texts of the statement that uses it and of the functions
    that this names; of the whole module if the name stands in a table. What the entry is filled in
    with is among them."""
    found: dict[str, set[str]] = {}
    for file in sorted(DIAGNOSIS.glob("*.py")):
        module = ast.parse(file.read_text(encoding="utf-8"))
        functions = {
            one.name: words_in(one) for one in module.body if isinstance(one, ast.FunctionDef)
        }
        for statement in module.body:
            inner = words_in(statement)
            is_table = isinstance(statement, ast.AnnAssign | ast.Assign) and "Rule" not in inner
            called = set[str]().union(*(functions[name] for name in inner & functions.keys()))
            for name in inner & sentences().keys():
                words = words_in(module) if is_table else inner | called
                found.setdefault(name, set()).update(words)
    return found


def words_in(tree: ast.AST) -> set[str]:
    return {
        word
        for node in ast.walk(tree)
        for word in (
            getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "value", None),
        )
        if isinstance(word, str)
    }


@pytest.mark.parametrize("name", sorted(sentences()))
def test_every_sentence_is_filled_in_with_values_that_its_check_gives(name: str) -> None:
    said = sentences()[name]
    used = words_by_use()[name]
    given = used | ({"m", "job"} if "Rule" in used else set())
    assert fields_of(said) <= given, "the check gives no value of this name"
    for text in texts_of(said):
        filled = text.format_map(defaultdict(Anything))
        assert "{" not in filled and "}" not in filled, "a placeholder is left"


def test_a_sentence_with_a_value_that_no_check_gives_is_found() -> None:
    odd = sentences()["steps_skipped"].model_copy(update={"title": "{nothing} of {num:.1f}"})
    assert fields_of(odd) == {"nothing", "num"}
    assert "nothing" not in words_by_use()["steps_skipped"]
