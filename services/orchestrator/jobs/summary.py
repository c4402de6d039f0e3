"""What follows from a job's rows of metrics: its best step, which of its batches and checkpoints
are kept, and at its end the summary (`summary.json`)."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.orchestrator.grpo.advantages import reaches
from services.orchestrator.grpo.held_out import IGNORED, metric_prefix
from services.orchestrator.grpo.metrics import WRITTEN
from shared.http.service import hone_version
from shared.job import CheckpointSpec, Job
from shared.wire import Checkpoint, EvaluationReport, JobRecord, MetricsRow


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
    of_set = f"{metric_prefix(name)}errored_rollouts" in metrics
    ignored = metric_prefix(name if of_set else "") + IGNORED
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


def summarize(
    record: JobRecord,
    rows: Sequence[MetricsRow],
    checkpoint: Checkpoint,
    train_s: float,
    versions: dict[str, Any],
    stopped: str | None = None,
) -> dict[str, Any]:
    """Returns the summary of a job with `rows` of metrics; the first row may be of step 0.
    `train_s` are the seconds of the last attempt, `versions` the services' versions. `stopped` says
    why the job ended before its last step, if it did."""
    evals = [(row.step, row.metrics["eval/reward"]) for row in rows if "eval/reward" in row.metrics]
    return {
        "job": record.id,
        "eval_before": evals[0][1] if evals and evals[0][0] == 0 else None,
        "eval_after": evals[-1][1] if evals else None,
        "evals": evals,
        "steps": rows[-1].step if stopped else record.steps,
        "stopped": stopped,
        "seed": record.job.seed,
        "trained_tokens": int(sum(row.metrics.get("num_tokens", 0.0) for row in rows)),
        "skipped_steps": sum(int(row.metrics.get("skipped_steps", 0)) for row in rows),
        "reward_last": rows[-1].metrics.get("reward"),
        "train_s": round(train_s, 3),
        "wall_s": round(time.time() - record.created_at, 3),
        "seconds_per_step": _seconds_per_step([row.metrics for row in rows if row.step]),
        "checkpoint": checkpoint.path,
        "best_step": best_step(record.job, rows),
        "versions": _versions(versions),
    }


def summarize_evaluation(
    record: JobRecord, report: EvaluationReport, versions: dict[str, Any]
) -> dict[str, Any]:
    """Returns the summary of a job of 0 steps."""
    return {
        "job": record.id,
        "steps": 0,
        "seed": record.job.seed,
        "wall_s": round(time.time() - record.created_at, 3),
        "evaluation": report.model_dump(mode="json"),
        "versions": _versions(versions),
    }


def _versions(services: dict[str, Any]) -> dict[str, Any]:
    return {"hone": hone_version(), "python": platform.python_version(), **services}


def _seconds_per_step(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the mean seconds of each stage. Evaluations do not count as a stage."""
    stages = sorted({name for metrics in steps for name in metrics if name.startswith("time/")})
    return {
        stage.removeprefix("time/"): statistics.fmean(metrics.get(stage, 0.0) for metrics in steps)
        for stage in stages
        if stage != "time/eval"
    }
