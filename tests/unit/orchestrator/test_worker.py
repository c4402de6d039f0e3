"""A worker that is asked to end."""

from __future__ import annotations

from unittest.mock import AsyncMock, Mock

from services.orchestrator.queue.connection import StoreEmptied
from services.orchestrator.queue.leases import Lease
from services.orchestrator.queue.worker import Worker
from shared.config import Settings


async def test_a_worker_leaves_also_where_redis_was_emptied() -> None:
    store = Mock(halt=AsyncMock(side_effect=StoreEmptied("it was emptied")))
    worker = Worker(store, Settings())
    worker._lease = Lease("a", 1, "trainer", 30.0)
    await worker.leave()
    store.halt.assert_awaited_once()
