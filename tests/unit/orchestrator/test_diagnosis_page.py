"""docs/diagnosis.md has every finding, and every key that a finding names exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from hone.commands.explain import find
from services.orchestrator.extensions.diagnosis.facts import entries
from shared.wire.jobs import FindingCode

ROOT = Path(__file__).parents[3]
DIAGNOSIS = ROOT / "services/orchestrator/extensions/diagnosis"
PAGE = (ROOT / "docs/diagnosis.md").read_text()
KEY = re.compile(r"HONE_[A-Z_]+|\b[a-z]+_?[a-z]*\.(?!md\b)[a-z]+_?[a-z_]*\b")


def test_the_page_and_the_code_have_the_same_findings() -> None:
    codes = set(get_args(FindingCode))
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (?:problem|warning|notice)", PAGE, re.MULTILINE)
    assert {code for row in rows for code in re.findall(r"\w+", row)} == codes
    assert {each.code for each in entries().values()} == codes


def test_the_keys_that_remedies_name_are_keys_and_settings() -> None:
    keys = {key for each in entries().values() for key in KEY.findall(each.remedy)}
    assert len(keys) > 25
    for key in sorted(keys):
        assert find(key), key


@pytest.mark.parametrize("setting", sorted(set(re.findall(r"HONE_[A-Z_]+", PAGE))))
def test_settings_on_the_page_exist(setting: str) -> None:
    assert find(setting)


CODE = "".join(file.read_text() for file in DIAGNOSIS.glob("*.py"))


@pytest.mark.parametrize("name", sorted({*entries()} - {"failed", "paused"}))
def test_every_entry_of_findings_toml_is_used(name: str) -> None:
    assert f'"{name}"' in CODE
