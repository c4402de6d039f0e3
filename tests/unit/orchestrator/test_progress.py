"""The time that is left, by hand."""

from __future__ import annotations

from services.orchestrator.jobs.progress import Progress


def test_the_time_left_is_that_of_a_mean_step_times_the_steps_left() -> None:
    times = iter([100.0, 110.0, 116.0])
    progress = Progress(4, 10, clock=lambda: next(times))
    assert progress.eta_s(5, replayed=False) == 10.0 * 5
    assert progress.eta_s(6, replayed=False) == 8.0 * 4


def test_replayed_steps_are_no_measure() -> None:
    times = iter([0.0, 1.0, 2.0, 12.0, 22.0])
    progress = Progress(0, 5, clock=lambda: next(times))
    assert progress.eta_s(1, replayed=True) is None and progress.eta_s(2, replayed=True) is None
    assert progress.eta_s(3, replayed=False) == 10.0 * 2
    assert progress.eta_s(4, replayed=False) == 10.0 * 1
