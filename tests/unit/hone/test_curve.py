"""A learning curve in characters."""

from __future__ import annotations

from rich.console import Console

from hone.view import HEIGHT, WIDTH, learning_curve, side_by_side
from shared.wire import MetricsList, MetricsRow


def rows(*metrics: dict[str, float]) -> MetricsList:
    return MetricsList(
        rows=tuple(MetricsRow(step=step, metrics=each) for step, each in enumerate(metrics))
    )


def test_the_first_step_is_at_the_left_and_the_greatest_reward_at_the_top() -> None:
    metrics = rows({"eval/reward": 0.0}, {"reward": 0.0}, {"reward": 1.0})
    shown = learning_curve({"demo-1": metrics})
    title, *lines = shown.splitlines()
    assert title == "demo-1" and len(lines) == HEIGHT + 2
    assert lines[0] == f"  1.00 {' ' * (WIDTH - 1)}·"
    assert lines[HEIGHT - 1] == f"  0.00 ●{' ' * (round((WIDTH - 1) / 2) - 1)}·"
    assert lines[HEIGHT].split() == ["0", "step", "2"]
    assert lines[-1] == "· reward of the steps   ● held-out reward"


def test_rewards_beyond_0_and_1_stretch_the_axis_and_nothing_is_a_sentence() -> None:
    shown = learning_curve({"j": rows({"reward": -1.0}, {"reward": 3.0})}).splitlines()
    assert (shown[1].split()[0], shown[HEIGHT].split()[0]) == ("3.00", "-1.00")
    assert shown[-1] == "· reward of the steps"
    assert learning_curve({"j": rows({"loss": 1.0})}) == "j: no step has a reward yet"
    assert learning_curve({"j": rows({"loss": 1.0, "supervised": 1.0})}).endswith("\n· loss")


def test_several_jobs_are_in_one_picture_each_with_a_letter() -> None:
    low = rows({"reward": 0.0}, {"reward": 0.5, "eval/reward": 0.25})
    high = rows({"reward": 0.0}, {"loss": 1.0}, {"reward": 1.0})
    title, *lines = learning_curve({"low": low, "high": high}).splitlines()
    assert (title, lines[-1]) == ("reward of the steps", "a low   b high")
    assert lines[0] == f"  1.00 {' ' * (WIDTH - 1)}b"
    assert lines[HEIGHT - 1].split() == ["0.00", "b"]
    title, *lines = learning_curve({"low": low, "again": low}).splitlines()
    assert (title, lines[-1]) == ("held-out reward", "a low   b again")


def test_several_jobs_metrics_stand_side_by_side_by_step() -> None:
    low = rows({"reward": 0.0}, {"reward": 0.5, "eval/reward": 0.25})
    high = MetricsList(rows=rows({}, {"reward": 1.0}).rows[1:])
    console = Console(width=80)
    with console.capture() as shown:
        console.print(side_by_side({"low": low, "high": high}, ["reward", "eval/reward"]))
    assert [line.split() for line in shown.get().splitlines()] == [
        ["reward", "reward", "eval/reward", "eval/reward"],
        ["step", "low", "high", "low", "high"],
        ["0", "0"],
        ["1", "0.5", "1", "0.25"],
    ]
