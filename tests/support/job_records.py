"""A job's record in any state, as the API shows it."""

from __future__ import annotations

from shared.job import DataSpec, Job, RewardSpec
from shared.wire import JobRecord

JOB = Job(
    name="demo",
    model="m",
    steps=9,
    data=DataSpec(train="t.jsonl"),
    rewards=(RewardSpec(grader="length"),),
)


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
