"""A learning curve in characters."""

from __future__ import annotations

from hone.view import HEIGHT, WIDTH, text_curve
from shared.wire import MetricsRow


def rows(*metrics: dict[str, float]) -> list[MetricsRow]:
    return [MetricsRow(step=step, metrics=each) for step, each in enumerate(metrics)]


def test_the_first_step_is_at_the_left_and_the_greatest_reward_at_the_top() -> None:
    shown = text_curve(rows({"eval/reward": 0.0}, {"reward": 0.0}, {"reward": 1.0}), "demo-1")
    title, *lines = shown.splitlines()
    assert title == "demo-1" and len(lines) == HEIGHT + 2
    assert lines[0] == f"  1.00 {' ' * (WIDTH - 1)}·"
    assert lines[HEIGHT - 1] == f"  0.00 ●{' ' * (round((WIDTH - 1) / 2) - 1)}·"
    assert lines[HEIGHT].split() == ["0", "step", "2"]
    assert lines[-1] == "· reward of the steps   ● held-out reward"


def test_rewards_beyond_0_and_1_stretch_the_axis_and_nothing_is_a_sentence() -> None:
    shown = text_curve(rows({"reward": -1.0}, {"reward": 3.0}), "j").splitlines()
    assert (shown[1].split()[0], shown[HEIGHT].split()[0]) == ("3.00", "-1.00")
    assert shown[-1] == "· reward of the steps"
    assert text_curve(rows({"loss": 1.0}), "j") == "j: no step has a reward yet"
