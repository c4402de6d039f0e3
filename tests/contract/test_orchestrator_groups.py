"""Finished groups outlive the orchestrator that asked for them, and none is sampled twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.store import Store
from shared.errors import Failed
from shared.http.client import Client
from shared.job import Job
from shared.settings import Settings
from shared.wire import (
    Batch,
    GenerateRequest,
    JobRecord,
    JobState,
    Part,
    RolloutGroup,
    ScoreItem,
    TrainStepRequest,
)
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.orchestrator_stack import (
    finish,
    orchestrator,
    orchestrator_client,
    submit,
    until_ended,
)

pytestmark = pytest.mark.slow

job = orchestrator_stack.job  # a fixture

STEPS, PROMPTS = 5, 6


@pytest.fixture
async def fakes(settings: Settings) -> AsyncGenerator[tuple[FakeServices, Settings]]:
    fakes = FakeServices(settings)
    async with fakes.running(settings) as running:
        yield fakes, running


def small(job: Job, **changes: Any) -> Job:
    """A job of few steps that is not evaluated, and draws the same samples each time."""
    data = job.data.model_copy(update={"eval": None})
    more = {"repeatable": True, "prompts_per_step": PROMPTS}
    sampling = job.sampling.model_copy(update=more)
    changes = {"steps": STEPS, "data": data, "sampling": sampling, **changes}
    return job.model_copy(update=changes)


def stop_at(fakes: FakeServices, call: int) -> asyncio.Event:
    """Lets no group finish from that call of the sampler on, until the fault is cleared; the event
    says that it came."""
    reached = asyncio.Event()

    async def hold(_: GenerateRequest) -> None:
        if fakes.calls["generate"] >= call:
            reached.set()
            while fakes.fault:
                await asyncio.sleep(0.01)

    fakes.fault["generate"] = hold
    return reached


async def killed(
    settings: Settings, redis_url: str, job: Job, when: asyncio.Event, num_groups: int
) -> JobRecord:
    """Submits the job, and kills its orchestrator when the event is set and the groups that had
    been sampled by then, so many, are on disk; its lease ends with it."""
    async with orchestrator(settings, redis_url) as (store, transport):
        client = Client("orchestrator", "http://localhost", transport=transport)
        record = await submit(client, job)
        await asyncio.wait_for(when.wait(), 60)
        async with asyncio.timeout(90):
            while _num_on_disk(record) != num_groups:
                await asyncio.sleep(0.01)
        assert await store.status(record.id) == "running"
    store = Store(redis_url)
    for lease in [key async for key in store._redis.scan_iter("hone:lease:*")]:
        await store._redis.delete(lease)
    await store.close()
    return record


def _num_on_disk(record: JobRecord) -> int | None:
    """None: a batch has just taken the place of some."""
    with contextlib.suppress(Failed):
        return sum(groups_on_disk(record).values())
    return None


async def goes_on(settings: Settings, redis_url: str, job_id: str) -> JobRecord:
    async with orchestrator(settings, redis_url) as (store, _):
        return await until_ended(store, job_id)


def groups_on_disk(record: JobRecord) -> dict[int, int]:
    """How many groups each step has that has no batch yet."""
    folder = RunFolder(Path(record.run_dir))
    counts = {step: len(folder.groups(step)[0]) for step in range(1, STEPS + 1)}
    return {step: count for step, count in counts.items() if count}


def batches(record: JobRecord) -> list[Batch]:
    folder = RunFolder(Path(record.run_dir))
    return [folder.batch(step) for step in folder.batch_steps()]


@pytest.mark.parametrize("call", [3, PROMPTS * 2 + 5])
async def test_a_killed_orchestrator_samples_only_what_was_under_way_again(
    fakes: tuple[FakeServices, Settings], redis_url: str, job: Job, call: int
) -> None:
    services, settings = fakes
    async with orchestrator_client(settings, redis_url) as client:
        undisturbed = await finish(client, small(job))
    assert services.calls.pop("generate") == STEPS * PROMPTS
    services.lose_trainer()
    finished = (call - 1) % PROMPTS  # each group before that one is on disk
    record = await killed(settings, redis_url, small(job), stop_at(services, call), finished)
    at_kill = services.calls["generate"]
    assert sum(groups_on_disk(record).values()) == finished
    services.fault.clear()
    found = await goes_on(settings, redis_url, record.id)
    assert (found.status, found.attempts) == ("succeeded", 2)
    under_way = at_kill - finished - (call - 1) // PROMPTS * PROMPTS
    assert services.calls["generate"] == STEPS * PROMPTS + under_way
    assert batches(found) == batches(undisturbed), "as if nothing had died"
    assert groups_on_disk(found) == {}, "a batch takes the place of its groups"


async def test_groups_of_steps_ahead_are_kept_and_stay_within_the_staleness_bound(
    fakes: tuple[FakeServices, Settings], redis_url: str, job: Job
) -> None:
    services, settings = fakes
    when = stop_at(services, PROMPTS * 3 + 2)

    async def hold(body: TrainStepRequest) -> None:
        while body.step == 2 and services.fault:
            await asyncio.sleep(0.01)

    services.fault["train_step"] = hold
    record = await killed(settings, redis_url, small(job, max_staleness=2), when, PROMPTS + 1)
    done, groups = len(batches(record)), groups_on_disk(record)
    at_kill = services.calls["generate"]
    assert sorted(groups) == [3, 4]
    services.fault.clear()
    found = await goes_on(settings, redis_url, record.id)
    assert found.status == "succeeded"
    under_way = at_kill - sum(groups.values()) - done * PROMPTS
    assert services.calls["generate"] == STEPS * PROMPTS + under_way
    assert all(0 <= batch.step - 1 - batch.version <= 2 for batch in batches(found))


async def test_groups_of_versions_that_a_rewind_undid_are_sampled_again(
    fakes: tuple[FakeServices, Settings], redis_url: str, job: Job
) -> None:
    services, settings = fakes
    record = await killed(settings, redis_url, small(job), stop_at(services, PROMPTS * 3 + 4), 3)
    assert groups_on_disk(record) == {4: 3}, "sampled by version 3"
    services.fault.clear()
    services.restart_trainer()  # without a checkpoint: back to version 0
    sampled = services.calls["generate"]
    found = await goes_on(settings, redis_url, record.id)
    assert found.status == "succeeded"
    assert services.calls["generate"] - sampled == 2 * PROMPTS, "steps 4 and 5, whole"


async def test_a_damaged_group_is_named_and_sampled_again(
    fakes: tuple[FakeServices, Settings], redis_url: str, job: Job
) -> None:
    services, settings = fakes
    record = await killed(settings, redis_url, small(job), stop_at(services, 4), 3)
    first, *others = sorted(Path(record.run_dir).glob("rollouts/000001.groups/*.msgpack"))
    whole = first.read_bytes()
    first.unlink()
    num_others = sum(groups_on_disk(record).values())
    assert num_others < 3 and (num_others == 0) == (others == [])
    first.write_bytes(whole.replace(b"wrong", b"right"))
    aside = first.with_name(f".{first.name}.0a1b2c3d")  # what a crash leaves of a write
    aside.write_bytes(b"half")
    services.fault.clear()
    sampled = services.calls["generate"]
    async with orchestrator(settings, redis_url) as (store, _):
        await until_ended(store, record.id)
        events = await store.events(record.id, "0")
    warnings = [event for event in events if event.level == "warning"]
    assert [event.message for event in warnings if "finding" not in event.data] == [
        f"step 1: the file of groups {str(first)!r} is damaged: its checksum differs; "
        "its groups are sampled again"
    ]
    assert services.calls["generate"] - sampled == STEPS * PROMPTS - num_others
    assert not first.parent.exists()


async def test_groups_that_were_not_done_in_time_are_sampled_again_when_resumed(
    fakes: tuple[FakeServices, Settings], redis_url: str, job: Job
) -> None:
    services, settings = fakes

    def too_late(group: RolloutGroup) -> RolloutGroup:
        late = {"finish_reason": "timeout", "error": "not done after 1 s"}
        rollouts = tuple(rollout.model_copy(update=late) for rollout in group.rollouts)
        return group.model_copy(update={"rollouts": rollouts})

    services.change["generate"] = too_late
    async with orchestrator(settings, redis_url) as (store, transport):
        client = Client("orchestrator", "http://localhost", transport=transport)
        record = await finish(client, small(job, steps=1), "paused")
        assert record.error and "not done after 1 s" in record.error
        services.change.clear()
        await client.call("POST", f"/v1/jobs/{record.id}/resume", None, JobState, deadline_s=30)
        async with asyncio.timeout(90):
            while (found := await store.get(record.id)).status in ("queued", "running"):
                await asyncio.sleep(0.02)
    assert found.status == "succeeded", found.error


async def test_a_group_whose_rewards_are_missing_is_graded_again_and_not_sampled(
    fakes: tuple[FakeServices, Settings], redis_url: str, job: Job
) -> None:
    services, settings = fakes
    grade = services.grade

    def away(_: ScoreItem) -> Part:
        return Part(value=None, verdict="error", detail="the judge is unreachable")

    services.grade = away
    record = await killed(settings, redis_url, small(job, steps=1), stop_at(services, 4), 3)
    services.grade = grade
    services.fault.clear()
    sampled, finished = services.calls["generate"], sum(groups_on_disk(record).values())
    assert finished == 3
    found = await goes_on(settings, redis_url, record.id)
    assert (found.status, found.attempts) == ("succeeded", 2)
    assert services.calls["generate"] - sampled == PROMPTS - finished
    (batch,) = batches(found)
    assert all(score.value is not None for scores in batch.scores for score in scores)
