"""Processes that end with another, with real ones that are killed; how a service begins and ends;
free ports; work in a thread of its own; what has to be in common for one process to read another's
memory of a GPU, and how groups are made; and secrets, which never reach the log."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import structlog
from pydantic import SecretStr

from shared.host import logs, processes
from shared.host.processes import BoundedProbe, free_port, run_in_thread
from shared.settings import Settings
from shared.weights.meeting import ERROR_HANDLING, memory_space, surviving_peers
from tests.support.running import lives

ROOT = Path(__file__).parents[3]

STARTS_A_CHILD = """
import subprocess, sys, time
from shared.host.processes import ending_with_parent
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], preexec_fn={how})
print(child.pid, flush=True)
time.sleep(60)
"""

ASKS_ITSELF = """
import os, subprocess, sys, time
source = "import os, sys, time; from shared.host.processes import {how}; time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", source, str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""
SAY_AND_SLEEP = "(int(sys.argv[1])); print(flush=True)"


@pytest.mark.parametrize(
    "source",
    [
        STARTS_A_CHILD.format(how="ending_with_parent()"),
        ASKS_ITSELF.format(how="end_with_parent; end_with_parent" + SAY_AND_SLEEP),
        ASKS_ITSELF.format(how="die_with; die_with" + SAY_AND_SLEEP),
    ],
    ids=["ending_with_parent", "end_with_parent", "die_with"],
)
def test_a_child_ends_with_a_parent_that_is_killed(source: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert lives(child)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 5
    while lives(child):
        assert time.monotonic() < end
        time.sleep(0.01)
    parent.stdout.close()


def test_a_process_whose_parent_is_gone_already_ends_at_once() -> None:
    source = (
        "import time; from shared.host.processes import end_with_parent as e; "
        "e(1 << 22); time.sleep(9)"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, timeout=20, check=False)
    assert done.returncode == -signal.SIGTERM


SERVES = """
import sys
from shared.http.service import Service
from shared.host.processes import run_main
run_main("reward", lambda settings: Service("reward", settings).run(int(sys.argv[1])))
"""


def test_a_service_that_is_interrupted_ends_without_a_traceback() -> None:
    command = [sys.executable, "-c", SERVES, str(free_port())]
    environment = {name: value for name, value in os.environ.items() if "HONE_" not in name}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        assert b"service started" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        said = process.stdout.read()
    assert (process.returncode, said.count(b"\n"), b"service stopped" in said) == (130, 1, True)


def test_a_free_port_is_below_the_ephemeral_ports() -> None:
    found = {processes.free_port() for _ in range(20)}
    assert len(found) > 1 and all(10_000 <= port < 32_768 for port in found)


def test_ports_of_which_one_is_taken_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    free = processes.free_port(in_a_row=4)
    drawn = iter([free - 10_000, free + 2 - 10_000])
    monkeypatch.setattr(processes.secrets, "randbelow", lambda _: next(drawn))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free + 1))
        taken.listen()
        assert processes.free_port(in_a_row=2) == free + 2


async def test_a_thread_returns_its_value_or_raises_its_error() -> None:
    assert await run_in_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(lambda: 1 // 0)


async def test_the_loop_continues_while_a_thread_works() -> None:
    release = threading.Event()
    waiting = asyncio.create_task(run_in_thread(release.wait))
    await asyncio.sleep(0)
    assert not waiting.done()
    release.set()
    assert await waiting is True


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
async def test_who_is_cancelled_does_not_wait_and_the_thread_ends_undisturbed() -> None:
    threads: list[threading.Thread] = []
    begun, release = threading.Event(), threading.Event()

    def work() -> None:
        threads.append(threading.current_thread())
        begun.set()
        release.wait()

    waiting = asyncio.create_task(run_in_thread(work))
    await asyncio.to_thread(begun.wait)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert threads[0].is_alive()
    release.set()
    threads[0].join(5)
    assert not threads[0].is_alive()


async def test_a_look_that_hangs_is_one_thread_and_keeps_no_one_waiting() -> None:
    answers, looks, look = threading.Event(), list[str](), BoundedProbe[str](0.05)

    def hangs() -> str:
        looks.append("looked")
        answers.wait(60)
        return "there"

    assert [await look.at(hangs, "late") for _ in range(3)] == ["late"] * 3
    assert looks == ["looked"]
    answers.set()
    while (said := await look.at(hangs, "late")) == "late":
        await asyncio.sleep(0)
    assert said == "there"


OWN = "from shared.weights.meeting import memory_space; print(memory_space())"


def space_of(*prefix: str) -> str:
    command = [*prefix, sys.executable, "-c", OWN]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and prefix:
        pytest.skip(f"no namespaces are to be had here: {done.stderr.strip()}")
    return done.stdout.strip()


def test_processes_of_one_host_have_one_memory_space() -> None:
    assert space_of() == memory_space()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (memory_space() or "").startswith(f"{boot}:")


@pytest.mark.parametrize(
    "apart",
    [
        ["unshare", "--pid", "--fork"],
        ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"],
    ],
    ids=["pids", "/dev/shm"],
)
def test_containers_have_memory_spaces_of_their_own(apart: list[str]) -> None:
    assert space_of(*apart) != memory_space()


@pytest.mark.parametrize("before", [None, "1"])
def test_groups_made_beside_each_other_leave_the_setting_as_it_was(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ERROR_HANDLING, raising=False)
    if before:
        monkeypatch.setenv(ERROR_HANDLING, before)
    first, second = surviving_peers(), surviving_peers()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert os.environ[ERROR_HANDLING] == "2", "the second one's is being made"
    second.__exit__(None, None, None)
    assert os.environ.get(ERROR_HANDLING) == before


def test_a_secret_in_any_field_is_masked(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("trainer", Settings(token=SecretStr("s3cr3t-token")))
    logs.get_logger().info("request", header="Bearer s3cr3t-token")
    line = json.loads(capfd.readouterr().err.strip().splitlines()[-1])
    assert (
        line["header"] == "Bearer ***"
        and line["service"] == "trainer"
        and line["event"] == "request"
    )


def test_a_commands_warnings_leave_stdout_to_what_it_was_asked_for(
    capfd: pytest.CaptureFixture[str],
) -> None:
    logs.to_stderr()
    logs.get_logger().warning("waiting for a service", service="reward")
    logs.get_logger().info("not told")
    told = capfd.readouterr()
    assert told.out == "" and "waiting for a service" in told.err and "not told" not in told.err


def test_a_traceback_in_a_commands_log_shows_no_variables(
    capfd: pytest.CaptureFixture[str],
) -> None:
    structlog.reset_defaults()  # what tests set
    token = "s3cr3t-token"
    logs.to_stderr()
    try:
        raise RuntimeError(str(len(token)))
    except RuntimeError:
        logs.get_logger().warning("not expected", exc_info=True)
    told = capfd.readouterr().err
    assert "RuntimeError: 12" in told and token not in told
