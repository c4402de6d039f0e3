"""A worker that is asked to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from services.orchestrator import tasks
from services.orchestrator.jobs import worker as worker_module
from services.orchestrator.jobs.decisions import Outcome
from services.orchestrator.jobs.worker import SharedTrainer, Worker
from services.orchestrator.seams import NO_EXTENSIONS
from services.orchestrator.store.connection import StoreEmptied
from services.orchestrator.store.folder import Note, RunFolder
from services.orchestrator.store.leases import Lease, LeaseLost, NoHeartbeat
from services.orchestrator.tasks import gather_all, stop, write_despite_cancel
from shared.errors import NotFound
from shared.settings import Settings
from tests.support.slow_disk import SlowDisk


def worker_with(store: Mock) -> Worker:
    settings = Settings()
    return Worker(store, settings, NO_EXTENSIONS, SharedTrainer(settings, store, set()))


@pytest.mark.parametrize(
    ("end", "halted"),
    [
        (Worker.leave, None),
        (Worker._give_back, None),
        (Worker._give_back, LeaseLost("a")),
    ],
    ids=["as the worker leaves", "as a lease is given back", "though the answer to it was lost"],
)
async def test_a_job_that_ends_as_its_worker_stops_is_noted_as_ended(
    tmp_path: Path, end: Callable[[Worker], Awaitable[None]], halted: Exception | None
) -> None:
    note = Note(created_at=1.0, finished_at=2.0, status="cancelled")
    store = Mock(halt=AsyncMock(side_effect=halted), note=AsyncMock(return_value=note))
    store.get = AsyncMock(return_value=Mock(run_dir=str(tmp_path)))
    worker = worker_with(store)
    worker._lease = Lease("a", 1, "trainer", 30.0)
    await end(worker)
    assert (RunFolder(tmp_path).note(), worker._lease) == (note, None)


async def test_a_worker_leaves_also_where_redis_was_emptied() -> None:
    store = Mock(halt=AsyncMock(side_effect=StoreEmptied("it was emptied")))
    worker = worker_with(store)
    worker._lease = Lease("a", 1, "trainer", 30.0)
    await worker.leave()
    store.halt.assert_awaited_once()


async def test_a_trainer_whose_work_cannot_be_stopped_is_registered_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A folder that hangs keeps the work, though its lease has expired: others are to take it."""
    monkeypatch.setattr(worker_module, "REGISTER_TRAINER_S", 0.0)
    monkeypatch.setattr(worker_module, "POLL_S", 0.0)
    is_cancelled, go_on = asyncio.Event(), asyncio.Event()

    class Hanging:
        close = AsyncMock()
        status = Mock()

        def __init__(self, *_: object) -> None: ...

        async def run(self) -> Outcome:
            try:
                await asyncio.Event().wait()
            finally:
                is_cancelled.set()
                await go_on.wait()
            raise AssertionError

    async def lost(*_: object) -> None:
        await asyncio.sleep(0)
        raise NoHeartbeat("a")

    monkeypatch.setattr(worker_module, "Attempt", Hanging)
    monkeypatch.setattr(worker_module.leases, "keep", lost)
    store = Mock(get=AsyncMock())
    store.trainers.register = AsyncMock()
    worker = worker_with(store)
    worker._needs = Mock(checked_at=0.0, missing=None)
    registering = asyncio.create_task(worker._keep_registered())
    working = asyncio.create_task(worker._work(Lease("a", 1, "trainer", 30.0), 0.0))
    await asyncio.wait_for(is_cancelled.wait(), 60)
    await _turns(3)
    num_registered = store.trainers.register.await_count
    await _turns(20)
    assert store.trainers.register.await_count == num_registered
    go_on.set()
    with pytest.raises(NoHeartbeat):
        await working
    await _turns(20)
    assert store.trainers.register.await_count > num_registered
    await stop(registering)


async def test_a_lease_is_given_back_only_once_nothing_is_written_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The user ends a worker cancels it again and again; a disk may be slower than that."""
    monkeypatch.setattr(tasks, "PATIENCE_S", 0.01)
    disk = SlowDisk()

    class Writing:
        close = AsyncMock()
        status = Mock()

        def __init__(self, *_: object) -> None: ...

        async def run(self) -> Outcome:
            await gather_all([write_despite_cancel(disk.write, "group")])
            raise AssertionError

    monkeypatch.setattr(worker_module, "Attempt", Writing)
    lease = Lease("a", 1, "trainer", 30.0)
    halted = AsyncMock(side_effect=lambda *_: disk.written.append("lease given back"))
    store = Mock(halt=halted, get=AsyncMock(), beat=AsyncMock(return_value=None))
    store.note = AsyncMock(side_effect=NotFound("a"))
    worker = worker_with(store)
    worker._lease = lease
    working = asyncio.create_task(worker._work(lease, time.monotonic()))

    async def end() -> None:
        await stop(working)
        await worker.leave()

    await disk.until_begun()
    ending = asyncio.create_task(end())
    await asyncio.wait({ending}, timeout=0.1)
    disk.goes_on.set()
    await ending
    assert disk.written == ["group", "lease given back"]
    Writing.close.assert_awaited_once()


async def test_a_trainer_is_noted_again_after_work_that_could_not_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where Redis was emptied before the job's samplers were known."""
    monkeypatch.setattr(worker_module, "REGISTER_TRAINER_S", 0.0)
    monkeypatch.setattr(worker_module, "POLL_S", 0.0)
    emptied = StoreEmptied("it was emptied")
    run = Mock(run=AsyncMock(side_effect=LeaseLost("a")), close=AsyncMock(side_effect=emptied))
    monkeypatch.setattr(worker_module, "Attempt", Mock(return_value=run))
    monkeypatch.setattr(worker_module.leases, "keep", AsyncMock(side_effect=emptied))
    store = Mock(get=AsyncMock())
    store.trainers.register = AsyncMock()
    worker = worker_with(store)
    worker._needs = Mock(checked_at=0.0, missing=None)
    with pytest.raises(StoreEmptied):
        await worker._work(Lease("a", 1, "trainer", 30.0), 0.0)
    registering = asyncio.create_task(worker._keep_registered())
    await _turns(20)
    assert store.trainers.register.await_count > 0
    await stop(registering)


async def test_registering_a_trainer_and_heartbeats_continue_after_an_unexpected_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "REGISTER_TRAINER_S", 0.0)
    store = Mock(beat=AsyncMock(return_value=None))
    store.trainers.register = AsyncMock(side_effect=[ValueError("a bug"), *[None] * 100])
    worker = worker_with(store)
    worker._needs = Mock(checked_at=0.0, missing=None)
    registering = asyncio.create_task(worker._keep_registered())
    await _turns(20)
    assert store.trainers.register.await_count > 1
    await stop(registering)
    lease = Lease("a", 1, "trainer", 30.0)
    status = Mock(line=Mock(side_effect=KeyError("a bug")))
    assert await worker_module._beat(store, status, lease) is None
    store.beat.assert_awaited_once_with(lease, None, None)


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
