"""Reads a run's facts from its folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.orchestrator.extensions.diagnosis.facts import Facts
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.found import FoundRun, find_run
from services.orchestrator.store.worker_side import PAUSED_ON_REQUEST
from shared.errors import BadRequest, NotFound
from shared.job import Job
from shared.wire import Batch, JobRecord, MetricsRow

FIRST_ROWS, LAST_ROWS = 200, 2000
"""Rows of a very long run that are looked at, from its beginning and its end: enough for all
windows, and a bound for the time that it takes."""

TRIES = 8
"""Most stored batches that are tried for one that is graded."""


def of_folder(folder: RunFolder, job: Job, rows: Sequence[MetricsRow] | None = None) -> Facts:
    """Returns the facts that the run folder has; `rows` if they are known already."""
    rows = folder.metrics() if rows is None else rows
    if len(rows) > FIRST_ROWS + LAST_ROWS:
        rows = [*rows[:FIRST_ROWS], *rows[-LAST_ROWS:]]
    return Facts(job=job, rows=rows, batches=_batches(folder), syncs=folder.syncs())


def alone(path: Path) -> tuple[Facts, JobRecord]:
    """Returns the facts of a run folder without a stack, and the record as far as it tells. A job
    that has not ended counts as paused on request. Raises BadRequest for a folder of no job."""
    found = find_run(path.resolve())
    if found is None or found.job is None:
        raise BadRequest(
            found.problem
            if found and found.problem
            else f"{str(path)!r} is no run folder: expected one with job.json"
        )
    record = record_of(found, found.job)
    return of_folder(RunFolder(found.path), found.job).about(record, None, time.time()), record


def record_of(found: FoundRun, job: Job) -> JobRecord:
    """Returns the record as far as the folder tells."""
    known: dict[str, Any] = {
        "status": found.end or "paused",
        "error": found.error if found.end else PAUSED_ON_REQUEST,
    }
    return JobRecord(
        id=found.id,
        name=job.name,
        model=job.model,
        created_at=found.created_at,
        finished_at=found.finished_at,
        step=found.step,
        steps=job.steps,
        run_dir=str(found.path),
        summary=found.summary,
        data=found.data,
        job=job,
        **known,
    )


def _batches(folder: RunFolder) -> list[Batch]:
    """Returns the oldest and the newest graded batch; fewer if there are not two."""
    steps = folder.batch_steps()
    oldest = _first_graded(folder, steps[:TRIES])
    newest = _first_graded(folder, steps[: -TRIES - 1 : -1])
    found = {batch.step: batch for batch in (oldest, newest) if batch}
    return list(found.values())


def _first_graded(folder: RunFolder, steps: Sequence[int]) -> Batch | None:
    for step in steps:
        try:
            batch = folder.batch(step)
        except NotFound:  # removed just now
            continue
        if batch.graded:
            return batch
    return None
