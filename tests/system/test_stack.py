"""What can go wrong when a stack is started: each a sentence with the value and the remedy, and
nothing left running."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.machine import on_free_ports
from deploy.supervisor import find_redis_server
from services.orchestrator.store.store import Store
from shared.errors import BadRequest, Unavailable
from shared.host.processes import free_port

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HONE_")}
    return kept | on_free_ports() | {"PYTHONPATH": str(ROOT)}


def hone(
    folder: Path, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hone.cli", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=170
    )


def left_over(folder: Path) -> list[str]:
    """The command lines of processes that work in `folder`."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink().is_relative_to(folder) and int(
                process.name
            ) != os.getpid():
                found.append((process / "cmdline").read_text())
    return [command for command in found if command]


def test_a_port_in_use_is_named_before_anything_starts(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = hone(tmp_path, environment | {"HONE_TRAINER_PORT": str(port)}, "up")
    assert done.returncode == 2
    assert (
        f"the trainer service cannot listen on 127.0.0.1:{port}: Address already in use"
        in done.stderr
    )
    assert "HONE_TRAINER_PORT" in done.stderr and "Traceback" not in done.stderr
    assert left_over(tmp_path) == []


def test_a_service_that_dies_at_start_stops_the_rest_and_says_why(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    done = hone(
        tmp_path, environment | {"HONE_REDIS_URL": f"redis://127.0.0.1:{free_port()}/0"}, "up"
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "orchestrator ended with exit code 2 at start" in done.stderr
    assert "Redis cannot be used" in done.stderr and "HONE_REDIS_URL" in done.stderr
    assert left_over(tmp_path) == []


def test_a_misspelt_setting_stops_before_anything_starts(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    done = hone(tmp_path, environment | {"HONE_TRAINER_RANK": "2"}, "up")
    assert done.returncode == 2 and "did you mean 'HONE_TRAINER_RANKS'" in done.stderr


def test_without_a_stack_a_command_says_how_to_get_one(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    done = hone(
        tmp_path, environment | {"HONE_ORCHESTRATOR_URL": f"http://127.0.0.1:{free_port()}"}, "ls"
    )
    assert done.returncode == 2 and "`hone up` starts a stack" in done.stderr


def test_a_bad_job_file_needs_no_stack_to_be_refused(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    shutil.copy(ROOT / "deploy/jobs/demo_tiny.toml", tmp_path / "job.toml")
    done = hone(tmp_path, environment, "submit", "job.toml", "--set", "sampling.group_sise=4")
    assert done.returncode == 2
    assert done.stderr == (
        "hone: --set 'sampling.group_sise=4': unknown key 'sampling.group_sise'; did you mean "
        "'group_size'?\n"
    )


def test_doctor_works_without_a_stack(tmp_path: Path, environment: dict[str, str]) -> None:
    report = json.loads(hone(tmp_path, environment, "doctor", "-o", "json").stdout)
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert report["ok"] and states["redis"] == "ok" and states["orchestrator"] == "note"


@pytest.fixture
def forgetful_redis(tmp_path: Path) -> Iterator[str]:
    """A real redis-server as it comes: without an append-only file."""
    port = free_port()
    command = [
        str(find_redis_server()),
        "--port",
        str(port),
        "--dir",
        str(tmp_path),
        "--save",
        "",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while socket.socket().connect_ex(("127.0.0.1", port)):
        assert process.poll() is None
    yield f"redis://127.0.0.1:{port}/0"
    process.terminate()
    process.wait()


async def test_a_redis_that_may_forget_is_refused_by_setting(forgetful_redis: str) -> None:
    store = Store(forgetful_redis)
    with pytest.raises(
        BadRequest, match="Redis has appendonly 'no', so it can lose jobs; set 'appendonly yes'"
    ):
        await store.open()
    await store.close()


async def test_a_redis_that_is_not_there_is_unavailable() -> None:
    store = Store(f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(Unavailable, match="Redis cannot be used"):
        await store.open()
    await store.close()
