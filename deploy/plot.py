"""The learning curve of a run as a PNG: `python -m deploy.plot runs/demo`; of several runs, in one
picture: `python -m deploy.plot runs/a runs/b --out both.png`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared.wire import MetricsList, MetricsRow

WINDOW = 10


def plot_learning_curve(rows: Sequence[MetricsRow], path: Path, title: str) -> Path:
    """Draws the mean reward of each step, its running mean and the held-out evaluations; returns
    `path`, the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    trained = [
        (row.step, row.metrics["reward"]) for row in rows if row.step and "reward" in row.metrics
    ]
    evaluated = [
        (row.step, row.metrics["eval/reward"]) for row in rows if "eval/reward" in row.metrics
    ]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    if trained:
        steps, rewards = zip(*trained, strict=True)
        axes.plot(
            steps, rewards, color="#9db8d9", linewidth=1, label="reward of the step's rollouts"
        )
        axes.plot(
            steps,
            running_mean(rewards),
            color="#1f5fa8",
            linewidth=2,
            label=f"mean of {WINDOW} steps",
        )
    if evaluated:
        steps, accuracies = zip(*evaluated, strict=True)
        axes.plot(steps, accuracies, "o-", color="#c2410c", linewidth=2, label="held-out, greedy")
        for (step, accuracy), above in ((evaluated[0], -16), (evaluated[-1], 8)):
            axes.annotate(
                f"{accuracy:.2f}",
                (step, accuracy),
                textcoords="offset points",
                xytext=(0, above),
                ha="center",
            )
    axes.set(xlabel="step", ylabel="mean reward", title=title, ylim=(0, 1.08))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    # without a suffix matplotlib would add one, and write another file
    figure.savefig(path, format=path.suffix.lstrip(".") or "png")
    pyplot.close(figure)
    return path


def plot_comparison(jobs: Mapping[str, Sequence[MetricsRow]], path: Path, title: str) -> Path:
    """Draws several jobs' rewards of the steps, each as its running mean, and their held-out
    rewards as points of the same colour; returns `path`, the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    for job, rows in jobs.items():
        rewards = {row.step: row.metrics["reward"] for row in rows if "reward" in row.metrics}
        held_out = {
            row.step: row.metrics["eval/reward"] for row in rows if "eval/reward" in row.metrics
        }
        (line,) = axes.plot([*rewards], running_mean([*rewards.values()]), label=job)
        axes.plot([*held_out], [*held_out.values()], "o", color=line.get_color())
    axes.set(xlabel="step", ylabel="mean reward; points: held-out", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.tight_layout()
    figure.savefig(path, format=path.suffix.lstrip(".") or "png")
    pyplot.close(figure)
    return path


def running_mean(values: Sequence[float]) -> list[float]:
    """Returns for each value the mean of it and the up to `WINDOW - 1` before it."""
    return [
        sum(values[max(0, end - WINDOW) : end]) / min(end, WINDOW)
        for end in range(1, len(values) + 1)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.plot", description=__doc__)
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="run",
        help="a run folder, with its metrics.jsonl; -: metrics come on stdin",
    )
    parser.add_argument("--out", type=Path, help="the picture (default: in the run folder)")
    parser.add_argument("--title", help="(default: the folder's name)")
    parser.add_argument("--names", help="of several runs, with commas (default: the folders')")
    arguments = parser.parse_args()
    runs: list[Path] = arguments.runs
    run = runs[0]
    out = arguments.out or run / "learning_curve.png"
    title = arguments.title or run.name
    given = json.load(sys.stdin) if str(run) == "-" else {}
    jobs = {job: MetricsList.model_validate(e).rows for job, e in given.get("jobs", {}).items()}
    if len(runs) > 1:
        names = arguments.names.split(",") if arguments.names else [each.name for each in runs]
        jobs = dict(zip(names, map(_stored, runs), strict=True))
    if jobs:
        print(plot_comparison(jobs, out, title))
        return
    rows = MetricsList.model_validate(given).rows if given else _stored(run)
    print(plot_learning_curve(rows, out, title))


def _stored(run: Path) -> Sequence[MetricsRow]:
    documents = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [MetricsRow(step=document.pop("step"), metrics=document) for document in documents]


if __name__ == "__main__":
    main()
