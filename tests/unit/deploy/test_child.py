"""When a process of the stack is started again."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from deploy.supervisor import Child, Supervisor
from shared.settings import Settings

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
