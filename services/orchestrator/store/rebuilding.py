"""Rebuilds records of jobs from their run folders, if Redis lost them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.orchestrator.runs.folder import RunFolder
from services.orchestrator.runs.found import WAS_DELETED, FoundRun
from services.orchestrator.store import identity
from services.orchestrator.store.connection import Connection
from services.orchestrator.store.records import recovered_fields
from shared.errors import Failed
from shared.job import Job
from shared.wire import RecoveredJob

PAUSED = (
    "its record was lost with Redis's data and rebuilt from its run folder, which does not say "
    "that it has ended; `hone resume {id}` {goes_on}"
)
"""Why a job with a rebuilt record is paused."""

TOO_OLD = "ended before the newest ended jobs, of which HONE_KEEP_JOBS are kept"


async def rebuild(
    connection: Connection, runs: Sequence[FoundRun], runs_dir: Path, key_ttl_s: float
) -> list[RecoveredJob]:
    """Makes a record for each run folder whose job has none, as `Store.recover` says. The Redis is
    noted as the jobs' Redis when all have a record, so a crash in between loses nothing. An
    idempotency key is remembered again for the rest of its `key_ttl_s`."""
    found = await identity.identify(connection)
    connection.accept(found)
    others = identity.others(connection, runs_dir)
    jobs: dict[str, RecoveredJob] = {}
    for run in sorted(runs, key=lambda run: -(run.finished_at or 0.0)):  # newest first
        if run.job is None:
            jobs[run.id] = RecoveredJob(id=run.id, problem=run.problem)
        elif other := others.get(run.redis or ""):
            why = f"is a job of another Redis; if that is no more, remove {str(other)!r} first"
            jobs[run.id] = RecoveredJob(id=run.id, problem=why)
        else:
            jobs[run.id] = await _rebuilt(connection, run, run.job, key_ttl_s)
    await connection.call("open")
    identity.adopt(connection, found, runs_dir)
    return [jobs[run.id] for run in runs]


async def _rebuilt(
    connection: Connection, run: FoundRun, job: Job, key_ttl_s: float
) -> RecoveredJob:
    """Notes this Redis in the folder before the record is made, so that an interrupted run can
    begin again. An unwritable folder is a problem of this job alone."""
    redis = connection.identity
    if run.end is None and redis and run.redis != redis:
        try:
            await asyncio.to_thread(RunFolder(run.path).belong_to, redis)
        except Failed as error:
            return RecoveredJob(id=run.id, problem=error.detail)
    return _answered(run, job, await connection.call("recover", **_arguments(run, job, key_ttl_s)))


def _arguments(run: FoundRun, job: Job, key_ttl_s: float) -> Mapping[str, Any]:
    key_left_s = int(run.created_at + key_ttl_s - time.time())
    has_key = run.key and run.fingerprint and key_left_s > 0
    return {
        "id": run.id,
        "fields": recovered_fields(run, job),
        "checkpoints": {str(each.step): each.model_dump_json() for each in run.checkpoints},
        "status": run.end,
        "error": run.error,
        "why": None if run.end else _why_paused(run),
        "key": run.key if has_key else None,
        "fingerprint": run.fingerprint,
        "key_left_s": key_left_s,
    }


def _why_paused(run: FoundRun) -> str:
    goes_on = f"goes on after step {run.step}" if run.step else "begins it"
    return PAUSED.format(id=run.id, goes_on=goes_on)


def _answered(run: FoundRun, job: Job, answer: str) -> RecoveredJob:
    """Returns the result for the script's answer."""
    if answer in ("deleted", "old"):
        return RecoveredJob(id=run.id, problem=WAS_DELETED if answer == "deleted" else TOO_OLD)
    new, _, status = answer.rpartition(" ")
    return RecoveredJob.model_validate(
        {"id": run.id, "status": status, "step": run.step, "steps": job.steps, "known": not new}
    )
