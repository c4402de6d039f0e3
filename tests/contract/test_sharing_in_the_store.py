"""Who shares a trainer, on a real Redis: which jobs join, who waits, and what each lease covers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis

from services.orchestrator.store.leases import Lease, LeaseLost
from services.orchestrator.store.records import Submission
from services.orchestrator.store.store import Store
from shared.job import Job, LoraSpec
from tests.support import orchestrator_stack
from tests.support.job_records import JOB

TRAINER, SAMPLERS = "trainer:1", ["sampler-1:1", "sampler-2:1"]

store = orchestrator_stack.store

LORA = JOB.model_copy(update={"lora": LoraSpec(rank=4)})


async def submit(store: Store, job: Job = LORA, **changes: Any) -> str:
    return (await store.submit(Submission(job.model_copy(update=changes), Path("/runs")))).id


async def take(store: Store, places: int = 4, samplers: list[str] = SAMPLERS) -> Lease | None:
    return await store.take("worker", TRAINER, 30, samplers, places=places)


async def taken(store: Store, places: int = 4) -> Lease:
    lease = await take(store, places)
    assert lease is not None
    return lease


async def finish(store: Store, lease: Lease) -> None:
    await store.report(lease, "status", "succeeded", {"status": "succeeded"}, status="succeeded")


async def test_jobs_of_one_base_model_share_a_trainer_and_know_each_other(store: Store) -> None:
    ids = [await submit(store, seed=seed) for seed in range(3)]
    assert await store.peek(TRAINER, SAMPLERS, places=2) == ids[0]
    first, second = await taken(store, 2), await taken(store, 2)
    assert [lease.job_id for lease in (first, second)] == ids[:2]
    assert (first.beside, second.beside) == ((), (first.attempt,))
    assert await store.peek(TRAINER, SAMPLERS, places=2) is None, "both places are taken"
    assert await take(store, 2) is None
    listed = (await store.list(None, 9)).jobs
    assert [job.shares_with for job in reversed(listed)] == [(ids[1],), (ids[0],), ()]
    await finish(store, first)
    third = await taken(store, 2)
    assert (third.job_id, third.beside) == (ids[2], (second.attempt,))
    for lease in (second, third):
        assert await store.beat(lease) is None
        await finish(store, lease)


@pytest.mark.parametrize(
    "other",
    [
        {"lora": None},
        {"lora": LoraSpec(rank=8)},
        {"model": "another"},
        {"weight_sync": "http"},
        {"memory": JOB.memory.model_copy(update={"zero_stage": 3})},
        {"max_model_len": 512},
    ],
    ids=["no adapter", "another rank", "another model", "merged weights", "ZeRO-3", "length"],
)
async def test_a_job_that_cannot_share_waits_and_keeps_its_place_in_the_line(
    store: Store, other: dict[str, Any]
) -> None:
    await submit(store)
    unlike, like = await submit(store, **other), await submit(store)
    first = await taken(store)
    assert await take(store) is None, "no one overtakes the one that waits"
    await finish(store, first)
    second = await taken(store)
    assert (second.job_id, second.beside) == (unlike, ())
    assert await take(store) is None
    await finish(store, second)
    assert (await taken(store)).job_id == like


async def test_a_lease_on_a_place_is_renewed_freed_and_lost_alone(
    store: Store, redis_url: str
) -> None:
    raw: Any = redis.from_url(redis_url, decode_responses=True)
    for seed in range(2):
        await submit(store, seed=seed)
    first, second = await taken(store), await taken(store)
    lost = [f"hone:lease:{name}#2" for name in (TRAINER, *SAMPLERS)]
    assert sorted(key for key in await raw.keys("hone:lease:*") if "#" in key) == sorted(lost)
    for key in lost:
        await raw.pexpire(key, 9_000)
    await store.beat(second)
    assert [await raw.pttl(key) > 20_000 for key in lost] == [True] * 3
    await raw.delete(*lost)
    with pytest.raises(LeaseLost):
        await store.beat(second)
    assert await store.beat(first) is None
    again = await taken(store)
    assert (again.job_id, again.beside) == (second.job_id, (first.attempt,))
    await raw.aclose()


async def test_samplers_that_belong_to_another_trainer_are_not_shared(store: Store) -> None:
    for seed in range(2):
        await submit(store, seed=seed)
    await taken(store)
    other = await store.take("worker", "trainer:2", 30, SAMPLERS[:1], places=4)
    assert other is None
    assert await take(store, samplers=SAMPLERS[:1]) is None, "these are not the same samplers"
