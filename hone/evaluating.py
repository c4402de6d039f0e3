"""Jobs of 0 steps, which evaluate models: made of another job, and followed to their report."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shared.errors import BadRequest, Failed, HoneError, Unavailable
from shared.job import MAX_NAME, EvaluatedModel, Job
from shared.job.file import parse_job
from shared.wire import EvaluationReport, JobProgress, JobRecord

if TYPE_CHECKING:
    from hone.async_client import AsyncClient

NAME = "eval"
"""The name of a job that evaluates; `eval-demo` if it is made of a job called `demo`, so that
`demo` is still the newest job that trained."""

OF_TRAINING = ("checkpoints", "stop", "wandb", "request")
"""Sections of a job that are not taken over, because they are about its training."""


class Paused(HoneError):
    """The evaluation is paused, and waits for an operator."""


def evaluation_of(job: Job, models: Sequence[EvaluatedModel | Mapping[str, Any]]) -> Job:
    """Returns the job of 0 steps that evaluates at least one model on the held-out problems of
    `job`, by its rewards and its `[evaluation]`. Raises BadRequest."""
    given = [dict(model) for model in models]
    if not given:
        raise BadRequest("no model to evaluate; expected at least one")
    document = job.model_dump(mode="json", exclude={"data": {"train", "epochs"}})
    for section in OF_TRAINING:
        del document[section]
    document["evaluation"]["models"] = given
    is_named = job.name == NAME or job.name.startswith(f"{NAME}-")
    changes = {
        "name": job.name if is_named else f"{NAME}-{job.name}"[:MAX_NAME],
        "model": given[0].get("model", job.model),
        "model_revision": given[0].get("revision"),
        "steps": 0,
    }
    return parse_job(document | changes, "the evaluation")


async def follow(
    client: AsyncClient, job_id: str, progress: Callable[[JobProgress], None]
) -> EvaluationReport:
    """Returns the report once the job has ended. If the call is interrupted, the job is cancelled.
    Raises Paused if the job is paused, Failed if it has failed or was cancelled, and Unavailable if
    the orchestrator is unreachable for long, while the job continues."""
    try:
        events = client.events(job_id, follow=True, progress=progress)
        async with contextlib.aclosing(events):
            async for _ in events:
                pass
        return _report_of(await client.get(job_id))
    except asyncio.CancelledError:
        with contextlib.suppress(HoneError):  # the interruption says more
            await client.cancel(job_id)
        raise
    except Unavailable as error:
        raise Unavailable(
            f"{error.detail}; job {job_id} continues, and `hone wait {job_id}` shows its report"
        ) from error


def _report_of(record: JobRecord) -> EvaluationReport:
    if record.status == "paused":
        raise Paused(
            f"job {record.id} is paused: {record.error}; `hone resume {record.id}` continues where "
            f"it was, and `hone wait {record.id}` shows its report"
        )
    if report := report_in(record):
        return report
    why = f": {record.error}" if record.error else ""
    raise Failed(f"job {record.id} is {record.status}{why}")


def report_in(record: JobRecord) -> EvaluationReport | None:
    """Returns the report of a job of 0 steps that has succeeded; None for any other job."""
    found = (record.summary or {}).get("evaluation")
    return EvaluationReport.model_validate(found) if found else None
