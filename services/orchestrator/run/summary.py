"""The summary of a job that has succeeded: `summary.json`."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any

from services.orchestrator.run.retention import best_step
from shared.http.service import hone_version
from shared.wire import Checkpoint, EvaluationReport, JobRecord, MetricsRow


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
