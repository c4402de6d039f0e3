"""Which services a supervisor starts, what it tells them of the others, and when it starts one
again; whose files a stack leaves, and a child process that fails or logs to a full disk."""

from __future__ import annotations

import errno
import io
import json
import os
import pwd
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from deploy import local
from deploy.supervisor import Child, Supervisor, running
from hone.client import Client
from shared.errors import BadRequest
from shared.host.processes import free_port
from shared.settings import Settings

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


def test_a_service_that_is_not_started_needs_an_address_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HONE_REWARD_URL", "http://c:1")
    supervisor = Supervisor(Settings(), tmp_path, ["trainer", "orchestrator"])
    with pytest.raises(BadRequest) as caught:
        supervisor._check_elsewhere()
    assert caught.value.detail == (
        "HONE_ROLLOUT_URL not set; expected the addresses of the services that are not started "
        "here: at the default addresses another stack's services may answer"
    )
    monkeypatch.setenv("HONE_ROLLOUT_URL", "http://127.0.0.1:8001")
    Supervisor(Settings(), tmp_path, ["trainer", "orchestrator"])._check_elsewhere()
    Supervisor(Settings(), tmp_path)._check_elsewhere()
    Supervisor(Settings(), tmp_path, ["reward"])._check_elsewhere()


def test_shared_memory_that_another_has_laid_out_is_refused(tmp_path: Path) -> None:
    (shared := tmp_path / "shm").mkdir()
    shared.chmod(0o1777)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (shared / "hone-1").symlink_to(elsewhere)
    supervisor = Supervisor(Settings(shm_dir=shared / "hone-1"), tmp_path / "stack")
    with pytest.raises(BadRequest, match=r"is a link to .*; set HONE_SHM_DIR to another folder"):
        supervisor._own_shared_memory()
    assert not [*elsewhere.iterdir()]


def test_the_folder_of_a_stack_that_is_gone_is_not_written_into(tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    shm = tmp_path / "shm"
    (left := shm / "left").mkdir(parents=True)
    (left / "of-stack").symlink_to(gone)
    (tmp_path / "stack").mkdir()
    Supervisor(Settings(shm_dir=shm), tmp_path / "stack")._own_shared_memory()
    assert not left.exists()
    assert not [*gone.iterdir()], "looking whether it runs makes no lock there"


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The state of a stack of an orchestrator alone."""
    own = {
        "HONE_ORCHESTRATOR_PORT": str(free_port()),
        "HONE_REDIS_DIR": str(tmp_path / "volume" / "redis"),
        "HONE_RUNS_DIR": str(tmp_path / "runs"),
        "HONE_SHM_DIR": str(tmp_path / "shm"),
        "HONE_TRAINER_URL": "http://127.0.0.1:9",
        "HONE_ROLLOUT_URL": "http://127.0.0.1:9",
        "HONE_REWARD_URL": "http://127.0.0.1:9",
    }
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "stack"
    yield local.up(folder, quiet=True, services=["orchestrator"])
    assert local.down(folder)
    assert running(folder) is None


@pytest.mark.slow
def test_an_orchestrator_alone_is_its_users_and_is_named_to_another_stack(
    alone: dict[str, Any], tmp_path: Path
) -> None:
    url = alone["urls"]["orchestrator"]
    assert list(alone["urls"]) == ["orchestrator"]
    with Client(url) as client:
        assert client.list(1).jobs == ()
    assert any((tmp_path / "volume" / "redis").iterdir())
    made = [tmp_path / "stack", tmp_path / "volume", tmp_path / "runs", tmp_path / "shm"]
    found = [path for folder in made for path in (folder, *folder.rglob("*"))]
    names = {path.name for path in found}
    assert {"redis.sock", "orchestrator.log", "stack.json", "lock", "supervisor.err"} <= names
    readable = [path for path in found if not path.is_symlink() and path.stat().st_mode & 0o077]
    assert readable == []
    with pytest.raises(BadRequest) as caught:
        local.up(tmp_path / "second", quiet=True, services=["orchestrator"])
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert caught.value.detail == (
        f"port {url.rpartition(':')[2]} is taken by the orchestrator service of another Hone stack "
        f"of user {user!r} in {tmp_path / 'stack'}: HONE_ORCHESTRATOR_URL={url} leads to it, `hone "
        f"down --dir {tmp_path / 'stack'}` stops it, or let this stack have ports of its own "
        "(HONE_REWARD_PORT, HONE_TRAINER_PORT, HONE_ROLLOUT_PORT, HONE_ORCHESTRATOR_PORT)"
    )


def test_what_is_waited_for_is_said_with_growing_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(
        "deploy.supervisor.time", SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    )
    report = io.StringIO()
    Supervisor(Settings(), tmp_path)._wait_for("trainer", lambda: now > 80.0, report)
    said = [json.loads(line) for line in report.getvalue().splitlines()]
    assert [(each["event"], each["service"]) for each in said] == [("waiting", "trainer")] * 5
    assert [each["seconds"] for each in said] == [3, 6, 12, 24, 48]


# --- when a process is started again ----------------------------------------------------------

Make = Callable[[str], Child]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda code: Child("it", ["sh", "-c", code], {**os.environ}, tmp_path / "log")


def ended(child: Child) -> None:
    assert child.process is not None
    child.process.wait(30)


def starts(child: Child, ended_at: float, lived_s: float = 0.0) -> float:
    """Returns how many seconds after its end the child is started again, and waits until that one
    has ended too."""
    child._started_at = ended_at - lived_s
    now = ended_at
    while child.revive(now) is None:
        now += 0.25
    ended(child)
    return now - ended_at


def test_what_fails_again_and_again_is_started_ever_more_slowly_and_never_given_up(
    make: Make,
) -> None:
    child = make("exit 3")
    child.start(0.0)
    ended(child)
    pauses = [starts(child, 100.0 * number) for number in range(10)]
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert starts(child, 5000.0, lived_s=10.0) == 0.25, "it was steady"


def test_a_machine_that_cannot_start_it_now_is_asked_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = make("exit 3")
    child.start(0.0)
    ended(child)
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        assert [child.revive(1.0 + now / 4) for now in range(8)] == [None] * 8
    assert full.call_count == 3, "after 0.25 s, 0.5 s and 1 s"
    assert child.revive(10.0) == 3
    ended(child)


def test_what_is_started_again_is_said(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = make("exit 3")
    monkeypatch.setattr(child, "revive", lambda _now: 3)
    supervisor = Supervisor(Settings(), tmp_path)
    supervisor._children.append(child)
    supervisor._restart_the_dead()
    said = json.loads(capsys.readouterr().out)
    assert said.pop("time") > 0
    assert said == {
        "event": "restarted",
        "service": "it",
        "exit_code": 3,
        "reason": "ended with exit code 3",
    }


def test_a_full_disk_under_the_log_ends_no_stack(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = make("exit 3")
    child.start(0.0)
    ended(child)
    supervisor = Supervisor(Settings(), tmp_path)
    supervisor._children.append(child)
    monkeypatch.setattr(child, "revive", lambda _now: 3)
    full = Mock(flush=Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        supervisor._restart_the_dead()
    full.flush.assert_called_once()


def test_what_runs_is_left_alone_and_its_exit_code_told_once(make: Make) -> None:
    child = make("sleep 60")
    child.start(0.0)
    assert child.revive(1000.0) is None
    child.signal(signal.SIGKILL)
    ended(child)
    assert child.revive(2000.0) is None, "not before its pause is over"
    assert child.revive(2000.25) == -signal.SIGKILL
    assert child.revive(2001.0) is None
    child.signal(signal.SIGKILL)
    ended(child)
