"""The token that a stack in containers has."""

from __future__ import annotations

import re
import stat
import sys
from pathlib import Path

import pytest

from deploy import make_token


def test_a_token_is_made_once_and_a_given_one_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    monkeypatch.setattr(sys, "argv", ["make_token", str(file)])
    monkeypatch.delenv("HONE_TOKEN", raising=False)
    make_token.main()
    made = file.read_text()
    assert re.fullmatch(r"[0-9a-f]{64}", made)
    assert stat.S_IMODE(file.stat().st_mode) == 0o400
    monkeypatch.setenv("HONE_TOKEN", "")
    make_token.main()
    assert file.read_text() == made
    monkeypatch.setenv("HONE_TOKEN", "chosen-by-hand")
    make_token.main()
    assert file.read_text() == "chosen-by-hand"
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
