"""Warnings about a job: allowed values that are probably mistakes."""

from __future__ import annotations

from collections.abc import Sequence

from services.orchestrator.runs.tracking import missing_key
from shared.job import Job


def findings(job: Job) -> Sequence[str]:
    """Returns a sentence for each finding. It may take seconds: call it off the event loop."""
    found = (_learns_nothing(job), _is_paid_nothing(job), missing_key(job))
    return [said for said in found if said]


def _learns_nothing(job: Job) -> str | None:
    if job.learning_rate:
        return None
    return (
        "training.learning_rate is 0: the job samples, grades and changes no weight; expected a "
        "rate above 0, such as 1e-6"
    )


def _is_paid_nothing(job: Job) -> str | None:
    if any(reward.weight for reward in job.rewards):
        return None
    whose = "the only reward" if len(job.rewards) == 1 else "every reward"
    return (
        f"the weight of {whose} is 0: every completion earns the same, so nothing is learned; "
        "expected a weight other than 0"
    )
