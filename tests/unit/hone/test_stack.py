"""Which service the shell talks to."""

from __future__ import annotations

import json
import os
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


def test_a_stack_that_runs_is_not_to_be_started_again(tmp_path: Path) -> None:
    """Its supervisor starts an orchestrator that ended; this process stands for it."""
    url = "http://127.0.0.1:18000"
    state = {"pid": os.getpid(), "urls": {"orchestrator": url}, "logs": str(tmp_path / "logs")}
    (tmp_path / "stack.json").write_text(json.dumps(state))
    said = stack.restarting(tmp_path, url)
    assert said == (
        f"the stack in {str(tmp_path)!r} runs and starts it again: try again soon, or see "
        f"{tmp_path}/logs/orchestrator.log"
    )
    assert stack.restarting(tmp_path, "http://elsewhere:8000") == ""
    (tmp_path / "stack.json").write_text(json.dumps(state | {"pid": 2**22 + 1}))
    assert stack.restarting(tmp_path, url) == "", "no process has this number"
