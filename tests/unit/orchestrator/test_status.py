"""What a follower is told that an attempt is at, and the time that is left, by hand."""

from __future__ import annotations

import time
from collections.abc import Callable

from services.orchestrator.jobs.status import AttemptStatus
from services.orchestrator.samplers.waits import PendingCalls


def test_the_line_has_stage_waits_details_who_is_away_and_what_is_next() -> None:
    now, away = 100.0, dict[str, float]()
    waits = PendingCalls(lambda: now)
    status = AttemptStatus(waits, lambda: away)
    assert status.line() == "beginning"
    status.begin("loading the model", "step 1")
    with waits.on("rollout", "loading the model"):
        now = 112.0
        with waits.on("trainer", "loading the job"):
            now = 115.0
            status.details["trainer"] = "compiling"
            assert status.line() == (
                "loading the model: rollout: loading the model, 15 s; trainer: loading the job, "
                "3 s; the trainer is compiling; then step 1"
            )
    status.begin("step 3 of 9")
    with waits.on("rollout", "sampling a group"), waits.on("rollout", "sampling a group"):
        at = away["the rollout service"] = time.time() - 25
        line = status.line()
    clock = time.strftime("%H:%M:%S", time.gmtime(at))
    since = f"the rollout service is unreachable since {clock} UTC (25 s)"
    assert line == f"step 3 of 9: rollout: 2 x sampling a group, 0 s; {since}"
    assert status.waits() == since


def test_what_is_missing_has_been_missing_since_it_was_first_said() -> None:
    status = AttemptStatus(PendingCalls())
    status.begin("waiting for what it needs", missing="the reward service does not answer")
    first = status.line()
    assert first.startswith("waiting for what it needs since ") and first.endswith(" UTC (0 s)")
    status.begin("waiting 5 s", "the model is loaded again", "the folder is not mounted")
    clock = first.removeprefix("waiting for what it needs")
    assert status.line() == f"waiting 5 s{clock}; then the model is loaded again"
    assert status.waits() == "the folder is not mounted"
    status.begin("loading the model")
    assert (status.line(), status.waits()) == ("loading the model", None)


def status_at(last: int, num_steps: int, *times: float) -> AttemptStatus:
    clock: Callable[[], float] = iter(times).__next__
    status = AttemptStatus(PendingCalls(), clock=clock)
    status.begin_steps(last, num_steps)
    return status


def test_the_time_left_is_that_of_a_mean_step_times_the_steps_left() -> None:
    status = status_at(4, 10, 100.0, 110.0, 116.0)
    assert status.eta_s(5, replayed=False) == 10.0 * 5
    assert status.eta_s(6, replayed=False) == 8.0 * 4


def test_replayed_steps_are_no_measure() -> None:
    status = status_at(0, 5, 0.0, 1.0, 2.0, 12.0, 22.0)
    assert status.eta_s(1, replayed=True) is None and status.eta_s(2, replayed=True) is None
    assert status.eta_s(3, replayed=False) == 10.0 * 2
    assert status.eta_s(4, replayed=False) == 10.0 * 1
