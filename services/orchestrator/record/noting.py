"""Noting in the run folder what Redis has of a job."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.orchestrator.queue.connection import StoreEmptied, StoreUnavailable
from services.orchestrator.queue.store import Store
from services.orchestrator.record.folder import RunFolder
from services.orchestrator.record.writable import ANSWERS_WITHIN_S
from shared.errors import Conflict, HoneError
from shared.logs import get_logger
from shared.threads import in_own_thread
from shared.wire import JobState


async def note_end(store: Store, job_id: str) -> None:
    """Notes in its run folder, if there is one, how the job has ended. What goes wrong is logged:
    the job has ended, and a record rebuilt without the note would be paused. A disk that hangs
    keeps nobody waiting: what is not noted is noted at the next start."""
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
    """Notes the ends that were not: the process died before it could, its disk was full, or the job
    was cancelled as another one was taken."""
    try:
        for job_id in await store.ended_ids():
            await _note_missing_end(store, job_id)
    except (StoreEmptied, StoreUnavailable) as error:
        get_logger().warning("ends not noted in the run folders", reason=error.detail)


async def _note_missing_end(store: Store, job_id: str) -> None:
    """What is wrong with this job keeps no other one from being noted."""
    try:
        folder = await store.ended_run_dir(job_id)
        if folder and not await asyncio.to_thread(_is_noted, RunFolder(folder)):
            await note_end(store, job_id)
    except (StoreEmptied, StoreUnavailable):
        raise
    except HoneError as error:
        get_logger().warning("end not looked for", job=job_id, reason=error.detail)


def _is_noted(folder: RunFolder) -> bool:
    """Returns whether there is nothing to note: the folder says how the job ended, or is gone."""
    try:
        note = folder.note()
    except (HoneError, OSError) as error:
        get_logger().warning("run folder not read", folder=str(folder.path), reason=str(error))
        return True
    return note.has_ended if note else not folder.path.is_dir()


async def cancel(store: Store, job_id: str) -> JobState:
    """As `Store.cancel`, and notes it where the job has ended by it."""
    state = await store.cancel(job_id)
    if state.status == "cancelled":
        await note_end(store, job_id)
    return state


async def stop(store: Store, job_id: str) -> JobState:
    """As `cancel`, but a job that has ended otherwise is no error."""
    try:
        return await cancel(store, job_id)
    except Conflict:
        return await store.state(job_id)
