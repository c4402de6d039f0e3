"""Which service the shell talks to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hone import stack
from shared.settings import load_settings


def test_the_environment_comes_before_the_stack_of_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = {"trainer": "http://stack:1", "reward": "http://stack:2"}
    (tmp_path / "stack.json").write_text(json.dumps({"urls": urls}))
    monkeypatch.setenv("HONE_TRAINER_URL", "http://named:1")
    settings = stack.with_stack_urls(load_settings(), tmp_path)
    assert settings.trainer_url == "http://named:1"
    assert settings.reward_url == "http://stack:2"
    assert settings.rollout_url == "http://127.0.0.1:8001"
