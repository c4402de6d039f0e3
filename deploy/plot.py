"""The learning curve of a run as a PNG: `python -m deploy.plot runs/demo`; of several runs, in one
picture: `python -m deploy.plot runs/a runs/b --out both.png`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from shared.wire import MetricsRow

WINDOW = 10


def plot_learning_curve(rows: Sequence[MetricsRow], path: Path, title: str) -> Path:
    """Draws the mean reward of each step, its running mean and the held-out evaluations; returns
    `path`, the picture."""
    rewards, held_out = _by_step(rows, "reward"), _by_step(rows, "eval/reward")
    rewards.pop(0, None)
    with _picture(path, title) as axes:
        if rewards:
            label = "reward of the step's rollouts"
            axes.plot(*_points(rewards), color="#9db8d9", linewidth=1, label=label)
            steps, values = _points(rewards)
            label = f"mean of {WINDOW} steps"
            axes.plot(steps, running_mean(values), color="#1f5fa8", linewidth=2, label=label)
        if held_out:
            label = "held-out, greedy"
            axes.plot(*_points(held_out), "o-", color="#c2410c", linewidth=2, label=label)
            for step, above in ((min(held_out), -16), (max(held_out), 8)):
                axes.annotate(
                    f"{held_out[step]:.2f}",
                    (step, held_out[step]),
                    textcoords="offset points",
                    xytext=(0, above),
                    ha="center",
                )
        axes.set(ylabel="mean reward", ylim=(0, 1.08))
        axes.legend(loc="lower right")
    return path


def plot_comparison(jobs: Mapping[str, Sequence[MetricsRow]], path: Path, title: str) -> Path:
    """Draws several jobs' rewards of the steps, each as its running mean, and their held-out
    rewards as points of the same colour; returns `path`, the picture."""
    with _picture(path, title) as axes:
        for job, rows in jobs.items():
            steps, rewards = _points(_by_step(rows, "reward"))
            (line,) = axes.plot(steps, running_mean(rewards), label=job)
            axes.plot(*_points(_by_step(rows, "eval/reward")), "o", color=line.get_color())
        axes.set(ylabel="mean reward; points: held-out")
        axes.legend(loc="best")
    return path


def _by_step(rows: Sequence[MetricsRow], name: str) -> dict[int, float]:
    return {row.step: row.metrics[name] for row in rows if name in row.metrics}


def _points(values: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return [*values], [*values.values()]


@contextlib.contextmanager
def _picture(path: Path, title: str) -> Generator[Any]:
    """Yields axes, and writes what is drawn on them to `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120)
    axes = figure.subplots()
    yield axes
    axes.set(xlabel="step", title=title)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    # without a suffix matplotlib would add one, and write to another file
    figure.savefig(path, format=path.suffix.lstrip(".") or "png")


def running_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Returns for each value the mean of it and of up to `window - 1` values before it."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.plot", description=__doc__)
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="run",
        help="a run folder, with its metrics.jsonl",
    )
    parser.add_argument("--out", type=Path, help="the picture (default: in the run folder)")
    parser.add_argument("--title", help="(default: the folder's name)")
    parser.add_argument("--names", help="of several runs, with commas (default: the folders')")
    arguments = parser.parse_args()
    runs: list[Path] = arguments.runs
    run = runs[0]
    out = arguments.out or run / "learning_curve.png"
    title = arguments.title or run.name
    names = arguments.names.split(",") if arguments.names else [each.name for each in runs]
    rows = [MetricsRow.stored(each / "metrics.jsonl") for each in runs]
    jobs = dict(zip(names, rows, strict=True))
    if len(jobs) > 1:
        print(plot_comparison(jobs, out, title))
    else:
        (own,) = jobs.values()
        print(plot_learning_curve(own, out, title))


if __name__ == "__main__":
    main()
