"""Which service the shell talks to."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from deploy.local import said_of
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
    """Its supervisor starts a service that ended; this process stands for it."""
    url, trainer = "http://127.0.0.1:18000", "http://127.0.0.1:18002"
    urls = {"orchestrator": url, "trainer": trainer}
    state = {"pid": os.getpid(), "urls": urls, "logs": str(tmp_path / "logs")}
    (tmp_path / "stack.json").write_text(json.dumps(state))
    said = stack.restarting(tmp_path, url)
    assert said == (
        f"the stack in {str(tmp_path)!r} runs and starts it again: try again soon, or see "
        f"{tmp_path}/logs/orchestrator.log"
    )
    assert stack.restarting(tmp_path, trainer).endswith(f"see {tmp_path}/logs/trainer.log")
    assert stack.restarting(tmp_path, "http://elsewhere:8000") == ""
    (tmp_path / "stack.json").write_text(json.dumps(state | {"pid": 2**22 + 1}))
    assert stack.restarting(tmp_path, url) == "", "no process has this number"


def test_a_stack_of_its_own_ports_and_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the ports of the environment, and in its folder: not at the default port."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HONE_ORCHESTRATOR_PORT", "18000")
    assert stack.orchestrator()[0] == "http://127.0.0.1:18000"
    monkeypatch.delenv("HONE_ORCHESTRATOR_PORT")
    urls = {"orchestrator": "http://127.0.0.1:18100"}
    (tmp_path / "stack.json").write_text(json.dumps({"urls": urls}))
    assert stack.orchestrator()[0] == "http://127.0.0.1:18100"
    monkeypatch.setenv("HONE_ORCHESTRATOR_URL", "http://there:1")
    assert stack.orchestrator()[0] == "http://there:1"


def test_the_commands_that_hone_up_prints_are_of_its_own_folder() -> None:
    state = {"urls": {"orchestrator": "http://127.0.0.1:18000"}, "logs": "/x/logs"}
    assert said_of(state, Path(".hone")) == (
        "up: jobs go to http://127.0.0.1:18000, where the page is too; logs are in /x/logs; "
        "`hone down` stops it"
    )
    assert said_of(state, Path("my stack")).endswith(
        "`hone down --dir 'my stack'` stops it; for other commands: export "
        "HONE_ORCHESTRATOR_URL=http://127.0.0.1:18000"
    )
