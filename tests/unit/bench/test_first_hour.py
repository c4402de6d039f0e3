"""The figures of `bench.first_hour`, of lines whose times are given."""

from __future__ import annotations

from bench.first_hour import FIRST_STEP, Line, Start, measured


def test_times_and_the_longest_silence_by_hand() -> None:
    lines = [
        Line(1.0, "  waiting for rollout, 3 s"),
        Line(4.0, "job demo-1 accepted; results go to runs/demo-1"),
        Line(5.5, "10:00:00 queued"),
        Line(9.0, "10:00:04 step 1/80  reward 0.250"),
    ]
    assert measured(lines) == Start(4.0, 5.0, 3.5, "10:00:00 queued")
    assert FIRST_STEP.search(lines[-1].text) and not FIRST_STEP.search("step 11/80  reward")
    late = [Line(6.0, "job demo-1 accepted; x"), Line(7.0, "step 1/2  reward 0.1")]
    assert measured(late).before == "(the command was started)"
