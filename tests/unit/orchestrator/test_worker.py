"""A worker that is asked to end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from services.orchestrator.queue.connection import StoreEmptied
from services.orchestrator.queue.leases import Lease
from services.orchestrator.queue.worker import Worker
from services.orchestrator.record.folder import RunFolder
from services.orchestrator.record.note import Note
from shared.config import Settings


@pytest.mark.parametrize("end", [Worker.leave, Worker._give_back])
async def test_a_job_that_is_cancelled_as_its_worker_stops_is_noted_as_ended(
    tmp_path: Path, end: Callable[[Worker], Awaitable[None]]
) -> None:
    note = Note(created_at=1.0, finished_at=2.0, status="cancelled")
    store = Mock(halt=AsyncMock(), note=AsyncMock(return_value=note))
    store.get = AsyncMock(return_value=Mock(run_dir=str(tmp_path)))
    worker = Worker(store, Settings())
    worker._lease = Lease("a", 1, "trainer", 30.0)
    await end(worker)
    assert RunFolder(tmp_path).note() == note


async def test_a_worker_leaves_also_where_redis_was_emptied() -> None:
    store = Mock(halt=AsyncMock(side_effect=StoreEmptied("it was emptied")))
    worker = Worker(store, Settings())
    worker._lease = Lease("a", 1, "trainer", 30.0)
    await worker.leave()
    store.halt.assert_awaited_once()
