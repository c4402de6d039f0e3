"""How much one sampler has room for, worked out by hand."""

from __future__ import annotations

import asyncio

import pytest

from services.orchestrator.pool.replica import NUM_MEASURED, Length, Replica
from services.orchestrator.tasks import to_the_end
from shared.http.client import Client
from shared.wire import GenerateRequest, Rollout, RolloutGroup, Sampling, ServingWeights
from shared.wire.packed import TokenIds


def group(num_prompt: int, *lengths: int) -> RolloutGroup:
    rollouts = tuple(
        Rollout(text="", token_ids=TokenIds([1] * length), finish_reason="stop")
        for length in lengths
    )
    return RolloutGroup(prompt_token_ids=TokenIds([1] * num_prompt), rollouts=rollouts)


@pytest.fixture
def length() -> Length:
    length = Length()
    length.expect(GenerateRequest(prompt="", sampling=Sampling(max_tokens=100)))
    return length


def test_before_anything_is_sampled_a_completion_counts_as_long_as_it_may_become(
    length: Length,
) -> None:
    assert length.tokens == 100
    length.expect(GenerateRequest(prompt="", sampling=Sampling(max_tokens=50)))
    assert length.tokens == 100


def test_then_it_counts_as_the_last_groups_did_with_its_share_of_the_prompt(
    length: Length,
) -> None:
    length.measure(group(40, 10, 30))  # (40 + 40) / 2
    assert length.tokens == (3 * 100 + 40) / 4
    for _ in range(3):
        length.measure(group(0, 20))
    assert length.tokens == (40 + 3 * 20) / 4
    length.measure(group(0, 20))
    assert length.tokens == (40 + 4 * 20) / 5
    for _ in range(NUM_MEASURED):
        length.measure(group(8, 1, 2, 3, 4, 5, 6, 7, 8))  # (8 + 36) / 8
    assert length.tokens == 5.5
    for _ in range(NUM_MEASURED):
        length.measure(group(0, 0))
    assert length.tokens == 1


@pytest.mark.parametrize(
    ("max_num_seqs", "kv_cache_tokens", "capacity"),
    [(0, 0, 0), (8, 0, 8), (8, 1050, 8), (8, 550, 5), (0, 550, 5), (8, 99, 1)],
)
async def test_room_is_bounded_by_sequences_and_by_the_cache(
    length: Length, max_num_seqs: int, kv_cache_tokens: int, capacity: int
) -> None:
    async with Client("rollout", "http://localhost") as client:
        replica = Replica(client, length)
        replica.configure(
            ServingWeights(max_num_seqs=max_num_seqs, kv_cache_tokens=kv_cache_tokens)
        )
        assert replica.capacity == capacity
        replica.take(3)
        assert replica.room == (capacity - 3 if capacity else float("inf"))


async def test_work_to_the_end_is_done_however_often_it_is_cancelled() -> None:
    closed: list[str] = []
    may_close = asyncio.Event()

    async def close() -> None:
        await may_close.wait()
        closed.append("all")

    task = asyncio.create_task(to_the_end(close()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_close.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed == ["all"]
    assert await to_the_end(asyncio.sleep(0, "result")) == "result"
