"""Which services a supervisor starts, and what it tells them of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy import local
from deploy.supervisor import Supervisor, running
from hone.client import Client
from shared.config import Settings
from shared.ports import free_port

ELSEWHERE = {"HONE_ROLLOUT_URL": "http://a:1,http://b:1", "HONE_REWARD_URL": "http://c:1"}


@pytest.fixture
def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Supervisor, dict[str, dict[str, str]]]:
    """A supervisor of trainer and orchestrator, and the environment of each process it starts."""
    for name, value in ELSEWHERE.items():
        monkeypatch.setenv(name, value)
    settings = Settings(shm_dir=tmp_path / "shm", redis_dir=tmp_path / "volume" / "redis")
    supervisor = Supervisor(settings, tmp_path, ["trainer", "orchestrator"])
    environments: dict[str, dict[str, str]] = {}

    def add(name: str, command: list[str], environment: dict[str, str]) -> None:
        environments[name] = environment | {"command": " ".join(command)}

    monkeypatch.setattr(supervisor, "_add", add)
    monkeypatch.setattr(supervisor, "_wait_for", lambda *_: None)
    return supervisor, environments


def test_services_that_are_left_out_are_where_the_environment_says(started: Any) -> None:
    supervisor, environments = started
    supervisor._start_redis()
    for name in supervisor._services:
        supervisor._start_service(name)
    assert list(environments) == ["redis", "trainer", "orchestrator"]
    for name in ("trainer", "orchestrator"):
        environment = environments[name]
        assert {key: environment[key] for key in ELSEWHERE} == ELSEWHERE
        assert environment["HONE_TRAINER_URL"] == "http://127.0.0.1:8002"
    assert {*supervisor._state()["urls"]} == {"trainer", "orchestrator"}
    assert supervisor._state()["settings"] == {"trainer_url": "http://127.0.0.1:8002"}


def test_the_file_of_redis_may_lie_elsewhere_than_its_socket(started: Any, tmp_path: Path) -> None:
    supervisor, environments = started
    supervisor._start_redis()
    command = environments["redis"]["command"]
    assert f"--dir {tmp_path}/volume/redis" in command
    assert f"--unixsocket {tmp_path}/volume" not in command
    supervisor._start_service("orchestrator")
    assert environments["orchestrator"]["HONE_REDIS_URL"] == f"unix://{supervisor._redis_socket()}"


def test_without_an_orchestrator_there_is_no_redis(tmp_path: Path) -> None:
    assert not Supervisor(Settings(), tmp_path, ["rollout"])._has_redis()
    assert Supervisor(Settings(), tmp_path)._has_redis()


@pytest.mark.slow
def test_an_orchestrator_alone_is_started_and_stopped_with_its_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = tmp_path / "volume" / "redis"
    own = {
        "HONE_ORCHESTRATOR_PORT": str(free_port()),
        "HONE_REDIS_DIR": str(volume),
        "HONE_RUNS_DIR": str(tmp_path / "runs"),
        "HONE_SHM_DIR": str(tmp_path / "shm"),
    }
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "stack"
    state = local.up(folder, quiet=True, services=["orchestrator"])
    try:
        assert list(state["urls"]) == ["orchestrator"]
        with Client(state["urls"]["orchestrator"]) as client:
            assert client.list(1).jobs == ()
        assert any(volume.iterdir())
    finally:
        assert local.down(folder)
    assert running(folder) is None
