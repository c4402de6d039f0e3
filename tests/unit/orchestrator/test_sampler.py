"""How much one sampler has room for, worked out by hand; and a version that it loads."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast, get_args
from unittest.mock import AsyncMock

import pytest

from services.orchestrator.errors import SyncFailed
from services.orchestrator.samplers.sampler import MAX_DIRECT, NUM_MEASURED, Length, Sampler
from services.orchestrator.samplers.syncing import _write_files, change, noise
from shared.errors import Failed
from shared.http.client import Client
from shared.job import SYNC_METHODS, SyncMethod
from shared.settings import Settings
from shared.wire import (
    Canary,
    GenerateRequest,
    Logprobs,
    Rollout,
    RolloutGroup,
    Sampling,
    ServingWeights,
    TokenIds,
)


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
        sampler = Sampler(client, length)
        sampler.configure(
            ServingWeights(max_num_seqs=max_num_seqs, kv_cache_tokens=kv_cache_tokens)
        )
        assert sampler.capacity == capacity
        sampler.take(3)
        assert sampler.room == (capacity - 3 if capacity else float("inf"))


def push(drain: bool, for_sampler: Any) -> Any:
    return SimpleNamespace(drain=drain, for_sampler=for_sampler)


async def test_a_sampler_is_not_left_alone_while_its_files_are_written() -> None:
    sampler, never = Sampler(cast(Any, None)), asyncio.Event()
    waits_for_files = push(False, lambda *_, **__: never.wait())
    loading = asyncio.create_task(
        sampler.load_weights(waits_for_files, cast(Any, None), 0.0, late=True)
    )
    await asyncio.sleep(0)
    assert not sampler.is_left_alone, "its client would be closed"
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    assert sampler.is_left_alone


async def test_a_sampler_that_joins_late_is_not_held_for_a_push_that_has_ended() -> None:
    call = AsyncMock(side_effect=SyncFailed("seen enough"))
    sampler = Sampler(cast(Any, SimpleNamespace(call=call)))
    sampler.up = True  # by the end of the push, which it was part of
    with pytest.raises(SyncFailed, match="seen enough"):
        await sampler.load_weights(push(True, AsyncMock()), Settings(), 0.0, late=True)
    assert not sampler.held


async def test_files_of_other_weights_fail_the_sync_and_a_full_disk_does_not() -> None:
    journal = AsyncMock()
    await _write_files(AsyncMock(side_effect=Failed("no space left")), journal)
    journal.warn.assert_awaited_once_with("samplers that are unreachable join later: no space left")
    with pytest.raises(SyncFailed, match="other weights"):
        await _write_files(AsyncMock(side_effect=SyncFailed("weight sync: other weights")), journal)
    assert journal.warn.await_count == 1


def test_every_method_has_its_traits_and_a_live_one_becomes_files_that_are_not() -> None:
    assert SYNC_METHODS.keys() == set(get_args(SyncMethod)) | {"auto"}
    for traits in SYNC_METHODS.values():
        for other in filter(None, (traits.published_again, traits.loaded_again)):
            assert not SYNC_METHODS[other].is_live
        if traits.is_live:
            assert traits.published_again and traits.is_given_up


class Waits:
    """The client of a sampler that answers /generate once it is `free`. `asked` are the seconds
    that each request waits for its answer; None: the client's own."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.asked: list[int | None] = []

    async def call(self, *_: Any, wait_s: int | None, **__: Any) -> RolloutGroup:
        self.asked.append(wait_s)
        await self.free.wait()
        return group(1, 1)


async def test_only_so_many_single_completions_wait_on_connections_of_their_own() -> None:
    client = Waits()
    sampler = Sampler(cast(Any, client))

    def ask(n: int) -> asyncio.Task[RolloutGroup]:
        body = GenerateRequest(prompt="", sampling=Sampling(n=n))
        return asyncio.create_task(sampler.generate(body, "key", Settings(), 1.0))

    tasks = [ask(8), *(ask(1) for _ in range(MAX_DIRECT + 1))]
    await asyncio.sleep(0)
    assert client.asked == [0, *[None] * MAX_DIRECT, 0]
    client.free.set()
    await asyncio.gather(*tasks)
    await ask(1)
    assert client.asked[-1] is None


def published(version: int, *logprobs: float, rounding: float = 0.0) -> Any:
    canary = Canary(
        token_ids=TokenIds([1, 2, 3]), logprobs=Logprobs(logprobs), dtype="bfloat16", noise=rounding
    )
    return SimpleNamespace(version=version, canary=canary)


def test_a_canary_moves_by_the_step_and_by_rounding() -> None:
    """Both log-probs by 0.3 nats in two steps, of which rounding makes 0.1."""
    before, after = published(3, -1.0, -2.0), published(5, -1.3, -1.7, rounding=0.1)
    assert change(before, after) == pytest.approx(0.15)
    assert noise(before, after) == pytest.approx(0.05)
    assert noise(None, after) is None and noise(after, after) is None
