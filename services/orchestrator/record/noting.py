"""Noting in the run folder what Redis has of a job."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.orchestrator.queue.store import Store
from services.orchestrator.record.folder import RunFolder
from shared.errors import HoneError
from shared.logs import get_logger
from shared.wire import JobState


async def note_end(store: Store, job_id: str) -> None:
    """Notes in its run folder, if there is one, how the job has ended. What goes wrong is logged:
    the job has ended, and a record rebuilt without the note would be paused."""
    try:
        note = await store.note(job_id)
        if note.has_ended:
            record = await store.get(job_id)
            await asyncio.to_thread(RunFolder(Path(record.run_dir)).write_note, note)
    except HoneError as error:
        get_logger().warning("end not noted in the run folder", job=job_id, reason=error.detail)


async def cancel(store: Store, job_id: str) -> JobState:
    """As `Store.cancel`, and notes it where the job has ended by it."""
    state = await store.cancel(job_id)
    if state.status == "cancelled":
        await note_end(store, job_id)
    return state
