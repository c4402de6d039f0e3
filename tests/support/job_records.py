"""A job's record in any state, as the API shows it."""

from __future__ import annotations

from typing import Any

from shared.job import DataSpec, Job, RewardSpec
from shared.wire import JobRecord

JOB = Job(
    name="demo",
    model="m",
    steps=9,
    data=DataSpec(train="t.jsonl"),
    rewards=(RewardSpec(grader="length"),),
)


def job_with(**changes: Any) -> Job:
    """A job with the keys that every job needs, and these."""
    document: dict[str, Any] = {
        "name": "t",
        "model": "m/m",
        "steps": 5,
        "data": {"train": "x.jsonl"},
        "rewards": [{"grader": "length"}],
        "sampling": {"prompts_per_step": 4},
    }
    return Job.model_validate(document | changes)


def record(status: str, error: str | None = None) -> JobRecord:
    return JobRecord.model_validate(
        {
            "id": "demo-1",
            "name": "demo",
            "model": "m",
            "status": status,
            "job": JOB,
            "run_dir": "/runs/demo-1",
            "created_at": 1.0,
            "step": 3,
            "steps": 9,
            "error": error,
        }
    )
