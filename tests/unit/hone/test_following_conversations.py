"""What `hone logs` says of a step's conversations, and how often of a wait."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from hone.view import Follower, conversations
from shared.wire import Event, JobProgress


def test_a_steps_line_tells_turns_errors_and_idle_samplers() -> None:
    assert conversations({"reward": 1.0, "utilization/rollout": 0.5}) == ""
    metrics = {
        "conversations/mean_turns": 4.25,
        "conversations/mean_tool_errors": 0.125,
        "conversations/mean_environment_s": 1.5,
        "utilization/rollout": 0.75,
    }
    expected = "  4.2 turns, 0.1 tool errors, environment 1.5 s, samplers idle 25%"
    assert conversations(metrics) == expected
    assert conversations({"conversations/mean_turns": 1.0}) == "  1.0 turns"


def test_a_long_wait_is_told_ever_less_often_where_there_is_no_live_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    told = io.StringIO()
    follower = Follower(Console(file=told, width=80))

    def progress_until(end: float) -> list[str]:
        nonlocal now
        while now < end:
            now += 2.0
            follower.progress(JobProgress(message=f"loading, {now:g} s", time=0.0))
        lines = told.getvalue().splitlines()
        told.truncate(0)
        told.seek(0)
        return [line.partition("loading, ")[2] for line in lines if "loading" in line]

    # Waits of 2.5, 5, 10, 20 s and then 30 s, each up to the next report.
    assert progress_until(120.0) == ["4 s", "10 s", "22 s", "44 s", "76 s", "108 s"]
    event = Event(id="1", job_id="demo-1", time=0.0, type="log", message="loaded")
    follower.show(event)
    assert progress_until(132.0) == ["124 s", "130 s"]
