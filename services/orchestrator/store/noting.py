"""Writes a job's end into its run folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.orchestrator.runs.folder import RunFolder
from services.orchestrator.runs.writable import ANSWERS_WITHIN_S
from services.orchestrator.store.connection import StoreEmptied, StoreUnavailable
from services.orchestrator.store.store import Store
from shared.errors import Conflict, HoneError
from shared.host.logs import get_logger
from shared.host.processes import in_own_thread
from shared.wire import JobState


async def note_end(store: Store, job_id: str) -> None:
    """Notes in the run folder, if it exists, how the job has ended. Faults are only logged, because
    the job has ended; a record rebuilt without the note would be paused. A hanging disk keeps
    nobody waiting: the note is then made at the next start."""
    try:
        note = await store.note(job_id)
        if note.has_ended:
            record = await store.get(job_id)
            folder = RunFolder(Path(record.run_dir))
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                await in_own_thread(lambda: folder.write_note(note))
    except TimeoutError:
        get_logger().warning("end not noted in the run folder", job=job_id, reason="its disk hangs")
    except HoneError as error:
        get_logger().warning("end not noted in the run folder", job=job_id, reason=error.detail)


async def note_ends(store: Store) -> None:
    """Notes ends that were not noted: the process died before, its disk was full, or the job was
    cancelled while a worker took another one."""
    try:
        for job_id in await store.ended_ids():
            await _note_missing_end(store, job_id)
    except (StoreEmptied, StoreUnavailable) as error:
        get_logger().warning("ends not noted in the run folders", reason=error.detail)


async def _note_missing_end(store: Store, job_id: str) -> None:
    """Notes one job's end. A fault of this job does not hold up the others."""
    try:
        folder = await store.ended_run_dir(job_id)
        if folder and not await asyncio.to_thread(_is_noted, RunFolder(folder)):
            await note_end(store, job_id)
    except (StoreEmptied, StoreUnavailable):
        raise
    except HoneError as error:
        get_logger().warning("end not looked for", job=job_id, reason=error.detail)


def _is_noted(folder: RunFolder) -> bool:
    """Returns whether nothing needs to be noted: the folder has the job's end, or is gone."""
    try:
        note = folder.note()
    except (HoneError, OSError) as error:
        get_logger().warning("run folder not read", folder=str(folder.path), reason=str(error))
        return True
    return note.has_ended if note else not folder.path.is_dir()


async def cancel(store: Store, job_id: str) -> JobState:
    """As `Store.cancel`, and notes the end if the job has ended."""
    state = await store.cancel(job_id)
    if state.status == "cancelled":
        await note_end(store, job_id)
    return state


async def stop(store: Store, job_id: str) -> JobState:
    """As `cancel`, but raises no error for a job that has ended otherwise."""
    try:
        return await cancel(store, job_id)
    except Conflict:
        return await store.state(job_id)
