"""Which stored rollouts and checkpoints a job still needs."""

from __future__ import annotations

from collections.abc import Iterable

from shared.job import Job
from shared.wire import MetricsRow

WRITTEN = "time/checkpoint"
"""The metric that a step has if its checkpoint was written."""


def best_step(job: Job, rows: Iterable[MetricsRow]) -> int | None:
    """Returns the step whose checkpoint did best in its evaluation: of those that have both, the
    first of the best. None: there is none, or the job keeps none for that."""
    metric = f"eval/{job.checkpoints.keep_best}"
    found = [row for row in rows if WRITTEN in row.metrics and metric in row.metrics]
    best = max(found, key=lambda row: row.metrics[metric], default=None)
    return best.step if best else None


def first_needed(job: Job, checkpoint_step: int) -> int:
    """Returns the oldest step whose batch is kept once there is a checkpoint of `checkpoint_step`.

    Kept are the newest `rollouts.keep_last`, and all that a trainer replays that goes on from the
    oldest of the newest `checkpoints.keep_last` checkpoints, the others being damaged.
    """
    if not job.rollouts.keep_last:
        return 1
    spec = job.checkpoints
    regular = range(spec.every, checkpoint_step, spec.every) if spec.every else ()
    oldest = [0, *regular, checkpoint_step][-spec.keep_last :][0]
    return max(min(checkpoint_step - job.rollouts.keep_last, oldest) + 1, 1)
