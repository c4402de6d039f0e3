"""Several trainers behind one orchestrator, each with its own sampler: several jobs at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import pytest

from services.orchestrator.jobs import needs, recovery, worker
from services.orchestrator.store.leases import resource
from shared.http.client import Client
from shared.job import Job
from shared.settings import Settings
from shared.wire import EventList, JobRecord, JobState, Obstacle
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.orchestrator_stack import orchestrator, orchestrator_client, submit

pytestmark = pytest.mark.slow

job = orchestrator_stack.job  # a fixture


@dataclass
class Several:
    """Two trainers, each with a sampler; `first` grades for both."""

    first: FakeServices
    second: FakeServices
    settings: Settings
    client: Client

    async def submit(self, job: Job, **changes: Any) -> JobRecord:
        return await submit(self.client, job.model_copy(update=changes))

    async def get(self, job_id: str) -> JobRecord:
        return await self.client.get(f"/v1/jobs/{job_id}", JobRecord)

    async def post(self, job_id: str, what: str) -> JobState:
        path = f"/v1/jobs/{job_id}/{what}"
        return await self.client.call("POST", path, None, JobState, deadline_s=30)

    async def until(self, job_id: str, status: str) -> JobRecord:
        async with asyncio.timeout(90):
            while (record := await self.get(job_id)).status != status:
                assert record.error is None, record.error
                await asyncio.sleep(0.02)
        return record


@contextlib.asynccontextmanager
async def several(settings: Settings, redis_url: str) -> AsyncGenerator[Several]:
    first, second = FakeServices(settings), FakeServices(settings)
    async with first.running(settings) as one, second.running(settings) as other:
        both = one.model_copy(
            update={
                "trainer_url": f"{one.trainer_url};{other.trainer_url}",
                "rollout_url": f"{one.rollout_url};{other.rollout_url}",
            }
        )
        async with orchestrator_client(both, redis_url) as client:
            yield Several(first, second, both, client)


def blocked(fakes: FakeServices) -> asyncio.Event:
    """Lets no step end before the event is set."""
    return fakes.hold("train_step").released


async def test_two_jobs_run_at_once_and_others_wait_in_order_and_say_for_what(
    settings: Settings, redis_url: str, job: Job
) -> None:
    async with several(settings, redis_url) as stack:
        gates = blocked(stack.first), blocked(stack.second)
        job = job.model_copy(update={"steps": 2})
        running = [await stack.submit(job) for _ in range(2)]
        for record in running:
            await stack.until(record.id, "running")
        trainers = [resource(slot.trainer_url) for slot in stack.settings.per_trainer]
        waiting = await stack.submit(job, name="third")
        last = await stack.submit(job, name="last")
        urgent = await stack.submit(job, name="urgent", priority=1)
        records = [await stack.get(record.id) for record in running]
        assert {record.trainer for record in records} == set(trainers)
        taken = {str(record.trainer): Obstacle(job=record.id) for record in records}
        found = [await stack.get(record.id) for record in (urgent, waiting, last)]
        assert [(record.place, record.waits_for) for record in found] == [
            (1, taken),
            (2, taken),
            (3, taken),
        ]
        assert (records[0].place, records[0].waits_for) == (None, {})
        gates[1].set()
        stack.second.fault.clear()
        for record in (urgent, waiting, last):
            await stack.until(record.id, "succeeded")
        assert (await stack.get(str(taken[trainers[0]].job))).status == "running"
        gates[0].set()
        for record in running:
            await stack.until(record.id, "succeeded")
        ids = [body.job_id for body in stack.second.trained if body.step == 1]
        assert ids[1:] == [urgent.id, waiting.id, last.id]
        assert len({body.job_id for body in stack.first.trained}) == 1


async def test_a_job_continues_with_another_trainer_where_it_was(
    settings: Settings, redis_url: str, job: Job
) -> None:
    """What the first trainer had is replayed from the run folder."""
    first, second = FakeServices(settings), FakeServices(settings)
    step_3 = first.hold("train_step", lambda body: body.step == 3)
    async with first.running(settings) as one, second.running(settings) as other:
        async with orchestrator_client(one, redis_url) as client:
            stack = Several(first, second, one, client)
            job_id = (await stack.submit(job)).id
            await step_3.arrival()
            await stack.post(job_id, "pause")
            async with asyncio.timeout(90):
                while (await stack.get(job_id)).status != "paused":
                    await asyncio.sleep(0.02)
            step_3.released.set()
            had = (await stack.get(job_id)).trainer
        async with orchestrator_client(other, redis_url) as client:
            stack = Several(first, second, other, client)
            await stack.post(job_id, "resume")
            record = await stack.until(job_id, "succeeded")
    assert (had, record.trainer) == (resource(one.trainer_url), resource(other.trainer_url))
    assert [body.step for body in second.trained] == list(range(1, job.steps + 1))
    replayed = [body.examples for body in second.trained[: len(first.trained)]]
    assert replayed == [body.examples for body in first.trained] and replayed


async def test_a_trainer_that_is_unreachable_takes_no_job_where_there_is_another(
    settings: Settings, redis_url: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "LOOK_AT_NEEDS_S", 0.05)
    monkeypatch.setattr(recovery, "PAUSES_S", (0.0,))
    monkeypatch.setattr(recovery, "LOOK_AT_MISSING_S", 0.05)
    fakes = FakeServices(settings)
    async with fakes.running(settings) as there:
        both = there.model_copy(
            update={
                "trainer_url": f"http://127.0.0.1:9;{there.trainer_url}",
                "rollout_url": f"http://127.0.0.1:10;{there.rollout_url}",
                "patience_s": 0.5,
            }
        )
        async with orchestrator_client(both, redis_url) as client:
            stack = Several(fakes, fakes, both, client)
            records = [await stack.submit(job, steps=2) for _ in range(3)]
            for record in records:
                ended = await stack.until(record.id, "succeeded")
                assert ended.trainer == resource(there.trainer_url)


async def test_a_job_that_was_cut_off_goes_back_to_its_own_trainer(
    settings: Settings, redis_url: str, job: Job
) -> None:
    """With the orchestrator dead and started again, each job finds what its trainer has of it."""
    first, second = FakeServices(settings), FakeServices(settings)
    async with first.running(settings) as one, second.running(settings) as other:
        both = one.model_copy(
            update={
                "trainer_url": f"{one.trainer_url};{other.trainer_url}",
                "rollout_url": f"{one.rollout_url};{other.rollout_url}",
                "lease_s": 5.0,
            }
        )
        gates = blocked(first), blocked(second)
        async with orchestrator_client(both, redis_url) as client:
            stack = Several(first, second, both, client)
            ids = [(await stack.submit(job)).id for _ in range(2)]
            had = [(await stack.until(id, "running")).trainer for id in ids]
        for gate in gates:
            gate.set()
        async with orchestrator_client(both, redis_url) as client:
            stack = Several(first, second, both, client)
            ended = [await stack.until(id, "succeeded") for id in ids]
        assert [record.trainer for record in ended] == had


@contextlib.asynccontextmanager
async def two_orchestrators(
    one: Settings, other: Settings, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[tuple[Client, Client]]:
    """Each with a trainer of its own, and jobs in common. What is unreachable is found to be at
    once."""
    monkeypatch.setattr(needs, "LOOK_AT_NEEDS_S", 0.05)
    monkeypatch.setattr(worker, "REGISTER_TRAINER_S", 0.05)
    monkeypatch.setattr(recovery, "PAUSES_S", (0.0,))
    monkeypatch.setattr(recovery, "LOOK_AT_MISSING_S", 0.05)
    both = [settings.model_copy(update={"patience_s": 0.5}) for settings in (one, other)]
    async with (
        orchestrator(both[0], redis_url) as (first_store, first),
        Client("orchestrator", "http://localhost", transport=first) as first_client,
        orchestrator(both[1], redis_url) as (second_store, second),
        Client("orchestrator", "http://localhost", transport=second) as second_client,
    ):
        async with asyncio.timeout(90):
            for store in (first_store, second_store):
                while not await store.trainers.all():
                    await asyncio.sleep(0.02)
        yield first_client, second_client


async def until_named(store_or_client: Client, job_id: str, count: int) -> JobRecord:
    """Returns the job once it says why so many trainers take it not."""
    async with asyncio.timeout(90):
        while True:
            record = await store_or_client.get(f"/v1/jobs/{job_id}", JobRecord)
            if len(record.waits_for) == count:
                return record
            await asyncio.sleep(0.02)


async def test_a_job_waits_for_a_reachable_trainer_that_another_job_has(
    settings: Settings, redis_url: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = FakeServices(settings)
    async with fakes.running(settings) as there:
        urls = {"trainer_url": "http://127.0.0.1:9", "rollout_url": "http://127.0.0.1:10"}
        away = there.model_copy(update=urls)
        async with two_orchestrators(there, away, redis_url, monkeypatch) as (_, client):
            stack = Several(fakes, fakes, away, client)
            gate = blocked(fakes)
            running = await stack.submit(job, steps=2)
            await stack.until(running.id, "running")
            waiting = await stack.submit(job, steps=2)
            found = await until_named(client, waiting.id, 2)
            assert found.status == "queued"
            assert found.waits_for[resource(there.trainer_url)].job == running.id
            assert found.waits_for[resource(away.trainer_url)].away
            gate.set()
            for record in (running, waiting):
                ended = await stack.until(record.id, "succeeded")
                assert ended.trainer == resource(there.trainer_url)


async def test_a_job_whose_trainer_stays_unreachable_continues_with_another_trainer(
    settings: Settings, redis_url: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = FakeServices(settings), FakeServices(settings)
    async with contextlib.AsyncExitStack() as running, second.running(settings) as other:
        one = await running.enter_async_context(first.running(settings))
        one = one.model_copy(update={"reward_url": other.reward_url})
        trainers = [resource(each.trainer_url) for each in (one, other)]
        async with two_orchestrators(one, other, redis_url, monkeypatch) as (_, client):
            stack = Several(first, second, other, client)
            gates = {trainers[0]: blocked(first), trainers[1]: blocked(second)}
            records = [await stack.submit(job, steps=2) for _ in range(2)]
            taken = {
                (await stack.until(record.id, "running")).trainer: record.id for record in records
            }
            gates[trainers[1]].set()
            await stack.until(taken[trainers[1]], "succeeded")
            await running.aclose()  # the first trainer and its sampler
            moved = await stack.until(taken[trainers[0]], "succeeded")
            said = await client.get(f"/v1/jobs/{moved.id}/events", EventList)
    assert moved.trainer == trainers[1]
    left = [event.message for event in said.events if "; the job goes to trainer" in event.message]
    assert [message.rpartition(" ")[2] for message in left] == [trainers[1]]
