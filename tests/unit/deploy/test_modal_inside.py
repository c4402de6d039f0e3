"""What runs in the containers on Modal, with an orchestrator that answers as it is told; and a
trainer on several machines there: how its containers find each other, and end together."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.modal import inside, refresh, train, trainer
from deploy.modal.flags import Placement
from deploy.modal.inside import Node
from services.trainer.processes import launcher
from shared.errors import Failed, Unavailable
from shared.host.processes import free_port
from shared.job import Job

JOB = Job.model_validate(
    {
        "name": "a",
        "model": "m",
        "steps": 1,
        "data": {"train": "t"},
        "rewards": [{"grader": "length"}],
    }
)


class Orchestrator:
    """Has one job, whose status is the next of `statuses` each time it is asked for."""

    def __init__(self, *statuses: str) -> None:
        self._statuses = list(statuses)
        self.asked: list[str] = []

    def submit(self, job: Job, *, key: str) -> Any:
        self.asked.append(f"submit {job.name} {key}")
        return SimpleNamespace(id="a-1")

    def resume(self, job: str) -> None:
        self.asked.append(f"resume {job}")

    def get(self, job: str) -> Any:
        status = self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]
        shown = {"id": job, "status": status, "error": None, "summary": {}}
        return SimpleNamespace(status=status, model_dump=lambda **_: shown)

    def list(self, limit: int, *, status: str) -> Any:
        assert limit == 1
        found = self._statuses[0] == status
        if found or status == "running":  # the last that is asked for
            self._statuses = self._statuses[1:] or self._statuses
        return SimpleNamespace(jobs=[status] * found)


class Clock:
    """Time passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 10_000, "it never ends"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(inside, "time", clock)
    return clock


@pytest.mark.parametrize("end", ["succeeded", "failed", "cancelled", "paused"])
def test_a_run_ends_with_its_job_and_with_a_pause(end: str, clock: Clock) -> None:
    there: Any = Orchestrator("queued", "running", "running", end)
    assert inside.train(there, JOB, "run-1", clock.sleep)["status"] == end
    assert there.asked == ["submit a run-1"]


def test_a_run_that_is_started_again_continues_with_its_paused_job(clock: Clock) -> None:
    there: Any = Orchestrator("paused", "running", "succeeded")
    assert inside.train(there, JOB, "run-1", clock.sleep)["status"] == "succeeded"
    assert there.asked == ["submit a run-1", "resume a-1"]


def test_the_trainer_works_while_there_are_jobs_and_a_while_longer(clock: Clock) -> None:
    there: Any = Orchestrator("queued", *["running"] * 100, "succeeded")
    inside.work_until_idle(there, 300, clock.sleep)
    assert 101 * inside.LOOK_S + 295 <= clock.now <= 101 * inside.LOOK_S + 305


def test_a_job_that_comes_in_time_keeps_the_trainer(clock: Clock) -> None:
    there: Any = Orchestrator("succeeded", *["paused"] * 30, "queued", "succeeded")
    inside.work_until_idle(there, 300, clock.sleep)
    assert clock.now >= 31 * inside.LOOK_S + 300


class FakeVolume:
    """A file of it is open for the first `num_busy` times."""

    def __init__(self, num_busy: float) -> None:
        self.num_busy = num_busy

    def reload(self) -> None:
        self.num_busy -= 1
        if self.num_busy >= 0:
            raise RuntimeError("there are open files preventing the operation")


def test_a_volume_is_asked_until_no_file_of_it_is_open(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresh, "time", clock)
    monkeypatch.setattr(refresh, "runs", FakeVolume(3))
    refresh.main()
    assert clock.now == 3 * refresh.PAUSE_S
    monkeypatch.setattr(refresh, "runs", FakeVolume(float("inf")))
    with pytest.raises(SystemExit, match="the Volume is in use: there are open files"):
        refresh.main()


async def test_a_service_elsewhere_that_does_not_answer_is_named() -> None:
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:9"):
        await inside.wake(["http://127.0.0.1:9"], deadline_s=0.3)


def test_a_container_with_gpus_ends_without_an_error_if_a_sampler_is_unreachable() -> None:
    why = inside.why_away(["http://127.0.0.1:9"], deadline_s=0.3)
    assert why and "http://127.0.0.1:9" in why
    assert inside.why_away([], deadline_s=0.3) is None


def test_the_trainer_is_not_started_again_while_a_sampler_is_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(urls: Any, deadline_s: float) -> str:
        return f"{','.join(urls)} away for {deadline_s:g} s"

    places = {"HONE_REWARD_URL": "http://r", "HONE_ROLLOUT_URL": "http://a,http://b"}
    monkeypatch.setattr(inside, "why_away", away)
    monkeypatch.setattr(inside, "start", None)  # would be called for an error
    monkeypatch.setattr(trainer, "places", lambda: places)
    assert trainer.work.local() is None
    ended = train.train.local("run-1", {}, Placement("A100", (), {}, 1), ["http://a"])
    assert (ended["status"], ended["error"]) == ("paused", "http://a away for 1800 s")


def test_the_services_stop_however_the_work_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def note(name: str, result: Any = None) -> Callable[..., Any]:
        return lambda *_, **__: (done.append(name), result)[1]

    urls = {"orchestrator": "http://127.0.0.1:9"}
    monkeypatch.setattr(inside, "start", note("start", urls))
    monkeypatch.setattr(inside, "stop", note("stop"))
    with pytest.raises(ZeroDivisionError), inside.stack(["orchestrator"], {}):
        raise ZeroDivisionError
    assert done == ["start", "stop"]


# --- a trainer on several machines ---------------------------------------------------------------

INTERFACES = """\
00000000000000000000000000000001 01 80 10 80       lo
fdaa0000000000000000000000000007 03 40 00 80    i6pn0
fe8000000000000000429afffe000002 02 40 20 80     eth0
"""


@pytest.fixture
def interfaces(tmp_path: Path) -> Path:
    table = tmp_path / "if_inet6"
    table.write_text(INTERFACES)
    return table


def test_the_nodes_are_set_up_to_meet_at_the_first_over_their_private_network(
    interfaces: Path,
) -> None:
    addresses = ("fdaa::3", "fdaa::7")
    assert Node(1, addresses).environment(interfaces) == {
        "HONE_TRAINER_NODES": "2",
        "HONE_TRAINER_NODE_RANK": "1",
        "HONE_TRAINER_RENDEZVOUS": "[fdaa::3]:29500",
        "HONE_TRAINER_INTERFACE": "i6pn0",
    }
    assert Node(0, ("::1",)).environment(interfaces) == {}
    with pytest.raises(Unavailable, match=r"no network interface of this container .*'fdaa::3'"):
        Node(0, addresses).environment(interfaces)


class Ranks:
    """A command that stands for a node's ranks: it notes that it runs, and that it was stopped."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
        self.runs, self.stopped = folder / "runs", folder / "stopped"
        program = folder / "ranks.sh"
        program.write_text(f"#!/bin/sh\ntrap 'touch {self.stopped}; exit 0' TERM\n{code}")
        program.chmod(0o755)
        monkeypatch.setattr(inside.sys, "executable", str(program))
        monkeypatch.setattr(inside, "LIFE_PORT", free_port())
        monkeypatch.setattr(inside, "NODE_LOOK_S", 0.05)

    def wait(self) -> None:
        deadline = time.monotonic() + 30
        while not self.runs.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)


NODE = Node(1, ("::1", "::1"))
LONG = "touch RUNS; while true; do sleep 0.05; done"


def test_a_node_trains_until_the_first_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(tmp_path, monkeypatch, LONG.replace("RUNS", str(tmp_path / "runs")))
    follower = threading.Thread(target=inside.follow, args=(NODE, {}))
    follower.start()  # before the first one: it waits for it
    with pytest.raises(ZeroDivisionError), inside.leading(Node(0, NODE.addresses)):
        ranks.wait()
        assert follower.is_alive() and not ranks.stopped.exists()
        raise ZeroDivisionError
    follower.join(30)
    assert not follower.is_alive() and ranks.stopped.exists()


def test_a_node_whose_ranks_end_before_the_first_one_does_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ranks(tmp_path, monkeypatch, "exit 7")
    with (
        inside.leading(Node(0, NODE.addresses)),
        pytest.raises(Failed, match="the ranks of node 1 ended with exit code 7"),
    ):
        inside.follow(NODE, {})


def test_a_node_without_a_first_one_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Ranks(tmp_path, monkeypatch, "exit 7")
    monkeypatch.setattr(inside, "FIRST_NODE_S", 0.1)
    with pytest.raises(Failed, match="node 0 does not answer at ::1"):
        inside.follow(NODE, {})


class SlowRanks:
    """Are at a checkpoint when they are to end: they take `needed_s` seconds more."""

    def __init__(self, needed_s: float) -> None:
        self._needed_s = needed_s
        self.done: list[str] = []

    def poll(self) -> None:
        return None

    def terminate(self) -> None:
        self.done.append("asked to end")

    def wait(self, timeout: float | None = None) -> None:
        if "killed" not in self.done and timeout is not None and timeout < self._needed_s:
            raise subprocess.TimeoutExpired("ranks", timeout)
        self.done.append("ended")

    def kill(self) -> None:
        self.done.append("killed")


@pytest.mark.parametrize(
    ("needed_s", "done"),
    [
        (launcher.SAVE_S + 2 * launcher.STOP_S, ["asked to end", "ended"]),
        (301.0, ["asked to end", "killed", "ended"]),
    ],
)
def test_a_nodes_ranks_may_finish_their_checkpoint_and_take_no_longer(
    needed_s: float, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowRanks(needed_s)
    monkeypatch.setattr(inside, "LIFE_PORT", free_port())
    monkeypatch.setattr(inside.subprocess, "Popen", lambda *_, **__: slow)
    monkeypatch.setattr(inside, "_has_ended", lambda _: True)
    with inside.leading(Node(0, NODE.addresses)):
        inside.follow(NODE, {})
    assert slow.done == done


def test_a_first_node_whose_machine_vanishes_is_noticed_within_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inside, "LIFE_PORT", free_port())
    with inside.leading(Node(0, NODE.addresses)), inside._first(NODE) as first:
        assert first.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        silent_s, probe_s, num_probes = (
            first.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert (silent_s, probe_s, num_probes) == (15, 10, 4)
        assert silent_s + probe_s * num_probes == 55


def test_a_look_that_ends_without_a_word_is_no_lost_connection() -> None:
    class Connection:
        def __init__(self, error: OSError) -> None:
            self._error = error

        def recv(self, _: int) -> bytes:
            raise self._error

    def has_ended(error: OSError) -> bool:
        connection: Any = Connection(error)
        return inside._has_ended(connection)

    vanished = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    assert type(vanished) is TimeoutError, "as the look's error, which has no number"
    assert has_ended(TimeoutError("timed out")) is False
    assert has_ended(vanished) is True
    assert has_ended(ConnectionResetError(errno.ECONNRESET, "reset")) is True
