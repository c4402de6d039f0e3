"""What a person sees of jobs' metrics and events: `hone metrics` of one and several jobs, as a
table and with --plot, and the lines of `hone logs`."""

from __future__ import annotations

import contextlib
import io
import json
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hone import view
from hone.cli import app
from hone.commands import results
from hone.view import HEIGHT, WIDTH, Follower, conversations, learning_curve
from shared.errors import NotFound
from shared.wire import Event, JobProgress, MetricsList, MetricsRow


def rows(*metrics: dict[str, float]) -> MetricsList:
    return MetricsList(
        rows=tuple(MetricsRow(step=step, metrics=each) for step, each in enumerate(metrics))
    )


JOBS = {
    "low": rows({"reward": 0.0}, {"reward": 0.25, "eval/reward": 0.5}),
    "high": rows({}, {"reward": 0.75}, {"reward": 1.0}),
}


class Orchestrator:
    """Answers as `hone.Client` does, for two jobs."""

    def metrics(self, job: str, after_step: int = -1) -> MetricsList:
        if job not in JOBS:
            raise NotFound(f"no job {job!r}")
        return MetricsList(rows=tuple(row for row in JOBS[job] if row.step > after_step))


@pytest.fixture(autouse=True)
def orchestrator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "connect", lambda: contextlib.nullcontext(Orchestrator()))


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["metrics", *words])
    return done.exit_code, done.output


def cells(shown: str) -> list[list[str]]:
    return [line.split() for line in shown.splitlines()]


def test_metrics_of_several_jobs_stand_side_by_side_by_step() -> None:
    code, shown = run("low", "high")
    assert code == 0
    assert cells(shown) == [
        ["reward", "reward", "eval/reward", "eval/reward"],
        ["step", "low", "high", "low", "high"],
        ["0", "0"],
        ["1", "0.25", "0.75", "0.5"],
        ["2", "1"],
    ]
    _, shown = run("low", "high", "--keys", "reward", "--min-step", "1")
    assert cells(shown)[1:] == [["step", "low", "high"], ["1", "0.25", "0.75"], ["2", "1"]]
    _, shown = run("low", "high", "-o", "json")
    low = json.loads(shown)["jobs"]["low"]["rows"]
    assert low[1] == {"step": 1, "metrics": {"reward": 0.25, "eval/reward": 0.5}}
    assert run("low", "high", "--keys", "rewrd")[0] == 2


def test_plot_draws_one_job_or_several_and_refuses_keys_and_unknown_jobs() -> None:
    code, shown = run("low", "high", "--plot")
    assert code == 0 and shown.splitlines()[-1] == "a low   b high"
    code, shown = run("low", "other", "--plot")
    assert code == 2 and shown == "hone: no job 'other'\n"
    code, shown = run("low", "--plot", "--keys", "reward")
    assert code == 2 and "--plot draws the rewards" in shown
    _, shown = run("low", "-o", "json")
    assert [row["step"] for row in json.loads(shown)["rows"]] == [0, 1]
    _, shown = run("low", "--plot")
    assert shown.splitlines()[0] == "low"


def test_a_table_has_the_columns_that_the_job_has_and_none_without_steps() -> None:
    """Rows of preferences, whose metrics have TRL's names."""
    rows = [
        MetricsRow(step=0, metrics={"eval/std": 0.5}),
        MetricsRow(step=1, metrics={"loss": 0.6931, "supervised": 1.0, "rewards/margins": 0.0}),
        MetricsRow(step=2, metrics={"loss": 0.5, "rewards/accuracies": 0.75, "eval/loss": 0.25}),
    ]
    table = view.metrics_table(rows, view.columns_of(row.metrics for row in rows))
    console = Console(width=80, file=io.StringIO())
    with console.capture() as shown:
        console.print(table)
    assert cells(shown.get()) == [
        ["step", "held-out", "loss", "loss", "margin", "accuracy"],
        ["1", "0.6931", "0"],
        ["2", "0.25", "0.5", "0.75"],
    ]
    code, told = run("low", "--min-step", "99")
    assert code == 0 and told.startswith("no metrics: ") and "step" in told


# --- the learning curve, in characters -----------------------------------------------------------


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


# --- the lines of events -------------------------------------------------------------------------


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
