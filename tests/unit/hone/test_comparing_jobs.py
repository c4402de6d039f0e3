"""`hone metrics A B`, as a table and with --plot, as typed."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hone import view
from hone.cli import app
from hone.commands import results
from shared.errors import NotFound
from shared.wire import MetricsList, MetricsRow

REWARDS = {"low": (0.0, 0.25), "high": (0.0, 0.75, 1.0)}


class Orchestrator:
    """Answers as `hone.Client` does, for two jobs."""

    def metrics(self, job: str, after_step: int = -1) -> MetricsList:
        if job not in REWARDS:
            raise NotFound(f"no job {job!r}")
        rewards = list(enumerate(REWARDS[job]))[after_step + 1 :]
        rows = [MetricsRow(step=step, metrics={"reward": value}) for step, value in rewards]
        return MetricsList(rows=tuple(rows))


@pytest.fixture(autouse=True)
def orchestrator(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def connect() -> Iterator[Orchestrator]:
        yield Orchestrator()

    monkeypatch.setattr(results, "connect", connect)


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, words)
    return done.exit_code, done.output


def test_metrics_of_two_jobs_stand_side_by_side() -> None:
    code, shown = run("metrics", "low", "high", "--keys", "reward", "--min-step", "1")
    assert code == 0
    assert [line.split() for line in shown.splitlines()] == [
        ["reward", "reward"],
        ["step", "low", "high"],
        ["1", "0.25", "0.75"],
        ["2", "1"],
    ]
    _, shown = run("metrics", "low", "high", "-o", "json")
    jobs = json.loads(shown)["jobs"]
    assert jobs["low"]["rows"][1] == {"step": 1, "metrics": {"reward": 0.25}}
    assert run("metrics", "low", "high", "--keys", "rewrd")[0] == 2


def test_two_jobs_are_plotted_in_one_picture() -> None:
    code, shown = run("metrics", "low", "high", "--plot")
    assert code == 0 and shown.splitlines()[-1] == "a low   b high"
    code, shown = run("metrics", "low", "other", "--plot")
    assert code == 2 and shown == "hone: no job 'other'\n"
    code, shown = run("metrics", "low", "--plot", "--keys", "reward")
    assert code == 2 and "--plot draws the rewards" in shown


def test_one_job_is_shown_as_ever() -> None:
    _, shown = run("metrics", "low", "-o", "json")
    assert [row["step"] for row in json.loads(shown)["rows"]] == [0, 1]
    _, shown = run("metrics", "low", "--plot")
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
    lines = [line.split() for line in shown.get().splitlines()]
    assert lines == [
        ["step", "held-out", "loss", "loss", "margin", "accuracy"],
        ["1", "0.6931", "0"],
        ["2", "0.25", "0.5", "0.75"],
    ]
    code, told = run("metrics", "low", "--min-step", "99")
    assert code == 0 and told.startswith("no metrics: ") and "step" in told
