"""When a process of the stack is started again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.child import Child

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
