"""What `hone logs` says of a step's conversations."""

from __future__ import annotations

from hone.view import conversations


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
