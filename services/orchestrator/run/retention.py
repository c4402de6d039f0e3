"""Which stored rollouts and checkpoints a job still needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.orchestrator.evals.held_out import IGNORED
from services.orchestrator.loop.advantages import reaches
from services.orchestrator.loop.metrics import WRITTEN
from shared.job import CheckpointSpec, Job
from shared.wire import MetricsRow


def best_step(job: Job, rows: Iterable[MetricsRow]) -> int | None:
    """Returns the earliest checkpointed step with the best score, rounding apart. None: no step has
    both checkpoint and evaluation, or the job keeps no best checkpoint."""
    metric = _best_metric(job)
    found = {
        row.step: value
        for row in rows
        if WRITTEN in row.metrics and (value := measured(row.metrics, metric)) is not None
    }
    best = max(found.values(), default=0.0)
    return next((step for step, value in found.items() if reaches(value, best)), None)


def _best_metric(job: Job) -> str | None:
    """Returns the metric of `keep_best`. If the job has only named held-out sets, "reward" is the
    first set's."""
    metric, sets = job.checkpoints.keep_best, job.evaluation.sets
    if metric == CheckpointSpec().keep_best and job.data.eval is None and sets:
        return f"{next(iter(sets))}/{metric}"
    return metric


def measured(metrics: Mapping[str, float], metric: str | None) -> float | None:
    """Returns the metric ("reward", "<set>/reward") of a step's evaluation; None if there is none,
    or its set is ignored."""
    name = (metric or "").partition("/")[0]
    of_set = f"eval/{name}/errored_rollouts" in metrics
    ignored = f"eval/{name}/{IGNORED}" if of_set else f"eval/{IGNORED}"
    return None if ignored in metrics else metrics.get(f"eval/{metric}")


def first_needed(job: Job, checkpoint_step: int) -> int:
    """Returns the oldest step whose batch is kept once `checkpoint_step` has a checkpoint.

    Batches kept: the newest `rollouts.keep_last`, and all that a trainer replays if it resumes from
    the oldest of the newest `checkpoints.keep_last` checkpoints, the others being damaged.
    """
    if not job.rollouts.keep_last:
        return 1
    spec = job.checkpoints
    regular = range(spec.every, checkpoint_step, spec.every) if spec.every else ()
    oldest = [0, *regular, checkpoint_step][-spec.keep_last :][0]
    return max(min(checkpoint_step - job.rollouts.keep_last, oldest) + 1, 1)
