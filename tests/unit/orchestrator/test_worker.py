"""A worker that is asked to end, what its heartbeat waits for, and what run folders and records are
told of a job's end, late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from services.orchestrator import tasks
from services.orchestrator.jobs import worker as worker_module
from services.orchestrator.jobs.after_step import AfterStep
from services.orchestrator.jobs.decisions import Outcome, outcome_from_disk
from services.orchestrator.jobs.results import JobUsage, Price
from services.orchestrator.jobs.worker import SharedTrainer, Worker
from services.orchestrator.samplers.status import AttemptStatus
from services.orchestrator.seams import NO_EXTENSIONS
from services.orchestrator.store import leases
from services.orchestrator.store.connection import StoreEmptied, StoreUnavailable
from services.orchestrator.store.folder import Note, RunFolder
from services.orchestrator.store.leases import Journal, Lease, LeaseLost, NoHeartbeat
from services.orchestrator.store.run_folders import note_ends
from services.orchestrator.tasks import gather_all, stop, write_despite_cancel
from shared.errors import Conflict, HoneError, NotFound
from shared.http import connecting
from shared.http.connecting import Presence
from shared.settings import Settings
from shared.wire import MetricsRow
from tests.support.job_records import JOB
from tests.support.slow_disk import SlowDisk

LEASE = Lease("a", 1, "trainer", 30.0)


def worker_with(store: Mock, *, lease: Lease | None = LEASE) -> Worker:
    """A worker that has the lease."""
    settings = Settings()
    worker = Worker(store, settings, NO_EXTENSIONS, SharedTrainer(settings, store, set()))
    worker._lease = lease
    return worker


@pytest.fixture
def registering(monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker without a lease that may register its trainer all the time."""
    monkeypatch.setattr(worker_module, "REGISTER_TRAINER_S", 0.0)
    monkeypatch.setattr(worker_module, "POLL_S", 0.0)
    store = Mock(get=AsyncMock(), beat=AsyncMock(return_value=None))
    store.trainers.register = AsyncMock()
    worker = worker_with(store, lease=None)
    worker._needs = Mock(checked_at=0.0, missing=None)
    return worker


def attempt_that(run: Callable[[], Awaitable[Outcome]], **close: Any) -> Mock:
    return Mock(return_value=Mock(run=run, close=AsyncMock(**close), status=Mock()))


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
    await end(worker)
    assert (RunFolder(tmp_path).note(), worker._lease) == (note, None)


async def test_a_worker_leaves_also_where_redis_was_emptied() -> None:
    store = Mock(halt=AsyncMock(side_effect=StoreEmptied("it was emptied")))
    await worker_with(store).leave()
    store.halt.assert_awaited_once()


async def test_a_trainer_whose_work_cannot_be_stopped_is_registered_no_more(
    registering: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that hangs keeps the work, though its lease has expired: others are to take it."""
    is_cancelled, go_on = asyncio.Event(), asyncio.Event()

    async def hang() -> Outcome:
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()
            await go_on.wait()
        raise AssertionError

    async def lost(*_: object) -> None:
        await asyncio.sleep(0)
        raise NoHeartbeat("a")

    monkeypatch.setattr(worker_module, "Attempt", attempt_that(hang))
    monkeypatch.setattr(worker_module.leases, "keep", lost)
    register: Any = registering._store.trainers.register
    keeping = asyncio.create_task(registering._keep_registered())
    working = asyncio.create_task(registering._work(LEASE, 0.0))
    await asyncio.wait_for(is_cancelled.wait(), 60)
    await _turns(3)
    num_registered = register.await_count
    await _turns(20)
    assert register.await_count == num_registered
    go_on.set()
    with pytest.raises(NoHeartbeat):
        await working
    await _turns(20)
    assert register.await_count > num_registered
    await stop(keeping)


async def test_a_lease_is_given_back_only_once_nothing_is_written_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The user ends a worker cancels it again and again; a disk may be slower than that."""
    monkeypatch.setattr(tasks, "PATIENCE_S", 0.01)
    disk = SlowDisk()

    async def write() -> Outcome:
        await gather_all([write_despite_cancel(disk.write, "group")])
        raise AssertionError

    attempt = attempt_that(write)
    monkeypatch.setattr(worker_module, "Attempt", attempt)
    halted = AsyncMock(side_effect=lambda *_: disk.written.append("lease given back"))
    store = Mock(halt=halted, get=AsyncMock(), beat=AsyncMock(return_value=None))
    store.note = AsyncMock(side_effect=NotFound("a"))
    worker = worker_with(store)
    working = asyncio.create_task(worker._work(LEASE, time.monotonic()))

    async def end() -> None:
        await stop(working)
        await worker.leave()

    await disk.until_begun()
    ending = asyncio.create_task(end())
    await asyncio.wait({ending}, timeout=0.1)
    disk.goes_on.set()
    await ending
    assert disk.written == ["group", "lease given back"]
    attempt.return_value.close.assert_awaited_once()


async def test_a_trainer_is_noted_again_after_work_that_could_not_be_closed(
    registering: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where Redis was emptied before the job's samplers were known."""
    emptied = StoreEmptied("it was emptied")
    attempt = attempt_that(AsyncMock(side_effect=LeaseLost("a")), side_effect=emptied)
    monkeypatch.setattr(worker_module, "Attempt", attempt)
    monkeypatch.setattr(worker_module.leases, "keep", AsyncMock(side_effect=emptied))
    with pytest.raises(StoreEmptied):
        await registering._work(LEASE, 0.0)
    await _check_registered(registering, 1)


async def test_registering_a_trainer_and_heartbeats_continue_after_an_unexpected_error(
    registering: Worker,
) -> None:
    store: Any = registering._store
    store.trainers.register.side_effect = [ValueError("a bug"), *[None] * 100]
    await _check_registered(registering, 2)
    status = Mock(line=Mock(side_effect=KeyError("a bug")))
    assert await worker_module._beat(store, status, LEASE) is None
    store.beat.assert_awaited_once_with(LEASE, None, None)


async def _check_registered(worker: Worker, least: int) -> None:
    keeping = asyncio.create_task(worker._keep_registered())
    await _turns(20)
    register: Any = worker._store.trainers.register
    assert register.await_count >= least
    await stop(keeping)


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_saying_that_redis_is_back_does_not_keep_the_next_heartbeat_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connecting, "AWAY_S", 0.0)
    said: list[bool] = []

    async def tell(_message: str, away: bool) -> None:
        said.append(away)
        if not away:
            await asyncio.sleep(3600)  # it is unreachable again, and the client patient

    lease = Lease("a", 1, "trainer", lease_s=1.0)
    beat = AsyncMock(side_effect=[StoreUnavailable("away"), None, None, "cancel"])
    async with asyncio.timeout(90):
        redis = Presence("Redis", tell)
        assert await leases.keep(beat, lease, time.monotonic(), redis) == "cancel"
    assert said == [True, False]


ENDED = Note(created_at=1.0, finished_at=2.0, status="failed", error="no such model")


def test_a_job_that_was_deleted_does_not_run_again(tmp_path: Path) -> None:
    """Redis was brought back from before its end, which could not be noted."""
    folder = RunFolder(tmp_path)
    folder.write_note(Note(created_at=1.0, status="running"))
    assert outcome_from_disk(folder) is None
    folder.mark_deleted()
    assert outcome_from_disk(folder) == Outcome("cancelled", "was deleted; its run folder was kept")
    folder.write_note(ENDED)
    assert outcome_from_disk(folder) == Outcome("failed", "no such model")


def store_with_ends(folder: Path, **runs: Path | HoneError) -> Mock:
    store = Mock(ended_ids=AsyncMock(return_value=[*runs]), note=AsyncMock(return_value=ENDED))
    store.ended_run_dir = AsyncMock(side_effect=list(runs.values()))
    store.get = AsyncMock(return_value=Mock(run_dir=str(folder)))
    return store


async def test_one_end_that_cannot_be_noted_keeps_no_other_from_it(tmp_path: Path) -> None:
    await note_ends(store_with_ends(tmp_path, a=Conflict("it runs"), b=tmp_path))
    assert RunFolder(tmp_path).note() == ENDED


@pytest.mark.parametrize("error", [StoreUnavailable("away"), StoreEmptied("emptied")])
async def test_no_more_ends_are_looked_for_once_redis_is_unreachable(
    tmp_path: Path, error: HoneError
) -> None:
    store = store_with_ends(tmp_path, a=error, b=tmp_path)
    await note_ends(store)
    assert (store.ended_run_dir.await_count, RunFolder(tmp_path).note()) == (1, None)


async def test_a_row_that_is_said_again_has_the_currency_of_its_cost() -> None:
    store, unused = Mock(report=AsyncMock()), cast(Any, Mock())
    services = cast(Any, Mock(status=AttemptStatus()))
    journal = Journal(store, Lease("a", 1, "trainer", 30.0))
    spent = JobUsage([], price=Price(2.0, "EUR"))
    after = AfterStep(JOB, unused, services, unused, journal, unused, spent, unused)
    await after.repeat_events(MetricsRow(step=1, metrics={"total/cost": 3.0}))
    told = store.report.await_args.kwargs
    assert (told["cost"], told["currency"], told["missing_only"]) == (3.0, "EUR", True)
