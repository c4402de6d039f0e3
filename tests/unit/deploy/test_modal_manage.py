"""`hone modal`: what it asks of the `modal` command, and what it shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.modal import manage
from deploy.modal.manage import SERVICES, TRIAL, down, format_result, status, up
from shared.errors import BadRequest, Unavailable

LISTED = [
    {"description": "hone-rollout", "state": "deployed", "tasks": "2"},
    {"description": "hone-reward", "state": "stopped", "tasks": "0"},
    {"description": "hone-rollout", "state": "stopped", "tasks": "0"},
    {"description": "hone-orchestrator", "state": "deployed", "tasks": "1"},
    {"description": "other", "state": "deployed", "tasks": "1"},
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What `modal` was run with. Its list of apps is LISTED, newest first."""
    asked: list[tuple[str, ...]] = []

    def run(*arguments: str, quiet: bool = False) -> str:
        asked.append(arguments)
        return json.dumps(LISTED) if arguments[:2] == ("app", "list") else ""

    monkeypatch.setattr(manage, "_modal", run)
    monkeypatch.setattr(manage, "url_of", lambda service: f"https://{service}.modal.run")
    return asked


def test_services_are_deployed_before_those_that_call_them(asked: list[tuple[str, ...]]) -> None:
    result = up(SERVICES)
    assert [Path(file).stem for _, file in asked] == [
        "rollout",
        "reward",
        "trainer",
        "orchestrator",
    ]
    assert all(verb == "deploy" and Path(file).is_file() for verb, file in asked)
    assert format_result(result) == "export HONE_ORCHESTRATOR_URL=https://orchestrator.modal.run"
    asked.clear()
    up(TRIAL)
    assert [Path(call[-1]).stem for call in asked if call[0] == "deploy"] == ["trial"]


def test_a_trial_that_is_deployed_is_stopped_before_another_has_its_redis(
    asked: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed = {"description": "hone-trial", "state": "deployed", "tasks": "1"}
    monkeypatch.setattr(sys.modules[__name__], "LISTED", [deployed])
    up(TRIAL)
    assert [call[:2] for call in asked] == [("app", "list"), ("app", "stop"), asked[-1]]
    assert asked[1][-1] == "hone-trial" and Path(asked[2][1]).stem == "trial"


def test_the_page_shows_the_token_to_who_makes_it() -> None:
    page = (Path(__file__).parents[3] / "docs/modal.md").read_text()
    assert "export HONE_TOKEN=$(openssl rand -hex 32)\n" in page
    assert "modal secret create hone HONE_TOKEN=$HONE_TOKEN" in page


def test_the_state_of_each_app_is_that_of_the_newest_of_its_name(asked: Any) -> None:
    found = {app["app"]: (app["state"], app["containers"]) for app in status(SERVICES)["apps"]}
    assert found == {
        "hone-rollout": ("deployed", 2),
        "hone-reward": ("stopped", 0),
        "hone-trainer": ("absent", 0),
        "hone-orchestrator": ("deployed", 1),
    }
    assert format_result(status(TRIAL)).split() == ["hone-trial", "absent", "0", "containers"]


def test_what_is_deployed_is_stopped_and_the_rest_left_alone(asked: Any) -> None:
    assert down(SERVICES) == {"stopped": ["hone-orchestrator", "hone-rollout"]}
    assert asked[1:] == [
        ("app", "stop", "--yes", "hone-orchestrator"),
        ("app", "stop", "--yes", "hone-rollout"),
    ]
    assert format_result(down(TRIAL)) == "none was deployed"


class FakeBatch:
    def __init__(self) -> None:
        self.put: list[tuple[str, str]] = []

    def __enter__(self) -> FakeBatch:
        return self

    def __exit__(self, *_: object) -> None: ...

    def put_file(self, local: str, remote: str) -> None:
        self.put.append((local, remote))


def test_uploaded_files_are_named_as_a_job_has_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, batch = tmp_path / "train.jsonl", FakeBatch()
    file.write_text("{}\n")
    monkeypatch.setattr(manage.data, "batch_upload", lambda *, force: batch)
    result = manage.upload([file])
    assert format_result(result) == "/volumes/data/train.jsonl"
    assert batch.put == [(str(file), "/train.jsonl")]
    with pytest.raises(BadRequest, match=r"no file at '.*/none\.jsonl'"):
        manage.upload([tmp_path / "none.jsonl"])


@pytest.mark.slow
def test_a_question_that_modal_refuses_says_why() -> None:
    """Its answer is not shown as it comes, for it is JSON where all is well."""
    with pytest.raises(Unavailable, match=r"ended with exit code 2: .*No such command 'nosuch'"):
        manage._modal("nosuch", quiet=True)
