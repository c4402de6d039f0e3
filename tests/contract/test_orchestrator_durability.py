"""Nothing that was accepted is lost and nothing is done twice: orchestrators that die or are
stopped, and what they find in Redis and on disk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import redis.asyncio as redis

from services.orchestrator.jobs.attempt import Attempt
from services.orchestrator.store import keys, leases
from services.orchestrator.store.folder import Note, RunFolder
from services.orchestrator.store.leases import Lease, resource
from services.orchestrator.store.records import Submission, UnreadableRecord
from services.orchestrator.store.store import Store
from shared.errors import Conflict
from shared.http.client import Client
from shared.job import Job
from shared.settings import Settings
from shared.wire import JobRecord
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.orchestrator_stack import (
    Stack,
    ended,
    finish,
    orchestrator,
    orchestrator_client,
    submit,
    until_ended,
    until_noted,
)

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures


async def test_an_orchestrator_that_dies_loses_nothing(
    settings: Settings, redis_url: str, job: Job
) -> None:
    """The first one is cut off at step 5; the second takes the job up where the trainer is, before
    the next one in the queue, and trains no step twice."""
    fakes = FakeServices(settings)
    reached = asyncio.Event()

    async def block(body: Any) -> None:
        if body.step == 5 and not reached.is_set():
            reached.set()
            await asyncio.sleep(0.2)

    fakes.fault["train_step"] = block
    settings = settings.model_copy(update={"lease_s": 5.0})
    async with fakes.running(settings) as settings:
        async with orchestrator_client(settings, redis_url) as client:
            record, waiting = await submit(client, job), await submit(client, job)
            await asyncio.wait_for(reached.wait(), 60)
        await asyncio.sleep(0.3)
        async with orchestrator_client(settings, redis_url) as client:
            await ended(client, waiting.id)
            found = await client.get(f"/v1/jobs/{record.id}", JobRecord)
    assert (found.status, found.attempts, found.step) == ("succeeded", 2, 8)
    assert [(request.job_id, request.step) for request in fakes.trained] == [
        (job_id, step) for job_id in (record.id, waiting.id) for step in range(1, 9)
    ]
    assert [row.step for row in RunFolder(Path(found.run_dir)).metrics()] == list(range(9))


async def test_a_batch_on_disk_is_replayed_and_not_sampled_again(
    settings: Settings, redis_url: str, job: Job
) -> None:
    fakes = FakeServices(settings)
    async with (
        fakes.running(settings) as settings,
        orchestrator_client(settings, redis_url) as client,
    ):
        record = await finish(client, job)
        folder = RunFolder(Path(record.run_dir))
        noted = await until_noted(folder, "succeeded")
        folder.write_note(noted.model_copy(update={"status": "running", "finished_at": None}))
        first, fakes.trained = fakes.trained, []
        fakes.job = None  # the trainer lost everything and starts from the beginning
        sampled = fakes.calls["generate"]
        lease = Lease(record.id, first[0].attempt, resource(settings.trainer_url), 30)
        needs = Mock(look=AsyncMock(return_value=None))
        outcome = await Attempt(record, lease, SilentStore(), settings, needs).run()  # type: ignore[arg-type]
        assert outcome.status == "succeeded", outcome.why
        assert fakes.trained == first
        assert fakes.calls["generate"] == sampled, (
            "nothing was sampled again, nor evaluated: the keys are the same"
        )


class NoSamplers:
    async def urls(self) -> list[str]:
        return []


class SilentStore:
    """A store that a run reports to when no worker holds its lease."""

    samplers = NoSamplers()
    models_below = AsyncMock(return_value=[])
    identity = None

    async def report(self, *_: Any, **__: Any) -> None:
        pass

    async def note(self, _: str) -> Note:
        return Note(created_at=0.0, status="running")


async def test_an_orchestrator_that_is_stopped_gives_its_job_back_at_once(
    settings: Settings, redis_url: str, job: Job
) -> None:
    """With a lease of 30 s, another one continues at once; the step under way is not trained
    twice."""
    fakes = FakeServices(settings)
    step_3 = fakes.hold("train_step", lambda body: body.step == 3)
    async with fakes.running(settings) as settings:
        async with orchestrator_client(settings, redis_url, stopped=True) as client:
            record = await submit(client, job)
            await step_3.arrival()
        step_3.released.set()
        async with orchestrator(settings, redis_url) as (store, _):
            async with asyncio.timeout(90):
                while (found := await store.get(record.id)).attempts < 2:
                    await asyncio.sleep(0.02)
            found = await until_ended(store, record.id)
    assert (found.status, found.attempts, found.step) == ("succeeded", 2, 8)
    assert [request.step for request in fakes.trained] == list(range(1, 9))


async def test_the_event_of_a_step_that_a_crash_left_out_is_there_after_it(
    settings: Settings, redis_url: str, job: Job
) -> None:
    fakes = FakeServices(settings)
    async with fakes.running(settings) as settings:
        async with orchestrator(settings, redis_url) as (store, transport):
            report, cut = store.report, asyncio.Event()

            async def cut_off(lease: Lease, type: str, *rest: Any, **fields: Any) -> None:
                if type == "eval" and rest[1]["step"] == 4:
                    cut.set()
                    await asyncio.Event().wait()
                await report(lease, type, *rest, **fields)

            store.report = cut_off  # type: ignore[method-assign]
            client = Client("orchestrator", "http://localhost", transport=transport)
            record = await submit(client, job)
            await asyncio.wait_for(cut.wait(), 60)
        folder = RunFolder(Path(record.run_dir))
        assert [row.step for row in folder.metrics()] == [0, 1, 2, 3, 4], "written, not yet said"
        settings = settings.model_copy(update={"lease_s": 5.0})
        store = Store(redis_url)
        for lease_key in [key async for key in store._redis.scan_iter("hone:lease:*")]:
            await store._redis.delete(lease_key)
        await store.close()
        async with orchestrator(settings, redis_url) as (store, _):
            await until_ended(store, record.id)
            events = await store.events(record.id, "0")
    steps = [event.data["step"] for event in events if event.type == "step"]
    evals = [event.data["step"] for event in events if event.type == "eval"]
    assert steps == list(range(1, 9)) and evals == [0, 4, 8]


async def test_another_workers_batch_ends_the_work_and_not_the_job(stack: Stack) -> None:
    """As if a worker that was superseded had stored its batch at the last moment."""

    async def slip_in(_: Any) -> None:
        if stack.fakes.step == 3 and stack.fakes.job:
            del stack.fakes.fault["generate"]
            folder = stack.folder(stack.fakes.job.job_id)
            folder.write_batch(folder.batch(3).model_copy(update={"step": 4}))

    stack.settings.__dict__["lease_s"] = 3600.0
    stack.fakes.fault["generate"] = slip_in
    record = await stack.run()
    assert (record.status, record.attempts) == ("succeeded", 2), "no one waited for the lease"
    stored = stack.folder(record.id).batch(4)
    assert stored.groups == stack.folder(record.id).batch(3).groups, "what was there first"
    (why,) = await stack.warnings(record.id)
    assert why.message.startswith("another batch of step 4 is stored in ")


async def test_a_job_that_is_superseded_again_and_again_pauses(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another stack has the trainer for good: they would take it from each other."""
    monkeypatch.setattr(leases, "MAX_TRIES", 3)

    async def refuse(_: Any) -> None:
        raise Conflict("attempt 1 of job 'a' was superseded by 2", code="stale")

    stack.fakes.fault["train_step"] = refuse
    record = await stack.run("paused")
    assert (record.attempts, record.step) == (3, 0)
    assert record.error is not None and record.error.startswith("gave up after 3 attempts in a row")
    said = (
        "attempt 1 of job 'a' was superseded by 2; does another stack use the same trainer or "
        "samplers?"
    )
    assert [warning.message for warning in await stack.warnings(record.id)] == [said] * 3


async def test_a_job_that_cannot_be_read_is_paused_and_the_next_one_runs(
    settings: Settings, redis_url: str, job: Job
) -> None:
    store = Store(redis_url)
    await store.open()
    ids = [(await store.submit(Submission(job, settings.runs_dir))).id for _ in range(2)]
    await store._redis.hset(f"hone:job:{ids[0]}", "job", '{"name": "demo"}')
    fakes = FakeServices(settings)
    async with fakes.running(settings) as settings, orchestrator(settings, redis_url):
        await until_ended(store, ids[1])
        assert await store.status(ids[0]) == "paused"
        last = (await store.events(ids[0], "0"))[-1]
        assert last.level == "warning" and "cannot be read by this version" in last.message
        page = await store.list(None, 10)
        with pytest.raises(UnreadableRecord):
            await store.get(ids[0])
    assert [(one.id, one.status) for one in page.jobs] == [
        (ids[1], "succeeded"),
        (ids[0], "paused"),  # lists read what submission wrote beside the job
    ]
    await store.close()


async def test_an_end_that_was_not_noted_is_noted_at_the_next_start(
    settings: Settings, redis_url: str, job: Job
) -> None:
    """The process died between the end of the job and the note of it."""
    fakes = FakeServices(settings)
    async with fakes.running(settings) as settings:
        async with orchestrator_client(settings, redis_url) as client:
            record = await finish(client, job.model_copy(update={"steps": 1}))
            folder = RunFolder(Path(record.run_dir))
            noted = await until_noted(folder, "succeeded")
        folder.write_note(noted.model_copy(update={"status": "running", "finished_at": None}))
        async with orchestrator(settings, redis_url):
            assert await until_noted(folder, "succeeded") == noted


@pytest.mark.parametrize("status", ["succeeded", "failed", "cancelled"])
async def test_a_job_whose_folder_says_that_it_has_ended_does_not_begin_again(
    settings: Settings, redis_url: str, job: Job, status: Any
) -> None:
    """Redis was brought back from an older file, in which the job still runs."""
    fakes = FakeServices(settings)
    async with fakes.running(settings) as settings:
        async with orchestrator_client(settings, redis_url) as client:
            first = await finish(client, job.model_copy(update={"steps": 1}))
            folder = RunFolder(Path(first.run_dir))
            note = await until_noted(folder, "succeeded")
        why = "no such model" if status == "failed" else None
        folder.write_note(note.model_copy(update={"status": status, "error": why}))
        raw = redis.from_url(redis_url)
        await raw.hset(keys.job(first.id), mapping={"status": "running"})
        await raw.hdel(keys.job(first.id), "finished_at", "summary")
        await raw.zrem(keys.ENDED, first.id)
        await raw.zadd(keys.BEGUN, {first.id: 1})
        await raw.aclose()
        num_trained, num_loaded = len(fakes.trained), fakes.calls["job"]
        async with orchestrator_client(settings, redis_url) as client:
            found = await ended(client, first.id)
        assert (found.status, found.error) == (status, why)
        assert found.finished_at is not None
        assert found.summary == (first.summary if status == "succeeded" else None)
        assert (len(fakes.trained), fakes.calls["job"]) == (num_trained, num_loaded)
