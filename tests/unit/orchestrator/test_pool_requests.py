"""Which sampler is given a group, what becomes of room that was given to a cancelled group, that a
group that two samplers were asked for is counted once, and where a conversation continues."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from services.orchestrator.samplers.admission import PrefixAffinity, choose
from services.orchestrator.samplers.pool import Pool
from services.orchestrator.samplers.sampler import Sampler
from services.orchestrator.samplers.status import Caller
from services.orchestrator.samplers.transport import client_to
from shared.errors import Failed, HoneError, StateLost, Unavailable
from shared.http.connecting import Absence
from shared.settings import Settings
from shared.wire import (
    Aborted,
    AbortRequest,
    ConversationPrefix,
    GenerateRequest,
    Rollout,
    RolloutGroup,
    Sampling,
    Span,
    TokenIds,
    WeightsRef,
)
from tests.support.job_records import JOB

BODY = GenerateRequest(
    job_id="demo-1", attempt=1, epoch=1, prompt="a", sampling=Sampling(n=4, max_tokens=2)
)


class Asked:
    """The client of a sampler that answers /generate as it is told. `aborted` are the keys that it
    was to end."""

    def __init__(self, name: str, answer: Callable[[], Awaitable[None]]) -> None:
        self.url, self._answer = f"http://{name}", answer
        self.num_asked = 0
        self.aborted: list[str] = []

    async def close(self) -> None: ...

    async def call(self, _: str, path: str, body: Any, *__: Any, **___: Any) -> Any:
        if path == "/abort":
            assert isinstance(body, AbortRequest)
            self.aborted += body.keys
            return Aborted(num_requests=1)
        self.num_asked += 1
        await self._answer()
        rollout = Rollout(text="", token_ids=TokenIds((1,)), finish_reason="stop")
        return RolloutGroup(
            prompt_token_ids=TokenIds((1,)), rollouts=(rollout,) * 4, replica=self.url
        )


class Pair:
    """Two samplers with room, of which the first is slow enough for the second to be asked too."""

    def __init__(self, *answers: Callable[[], Awaitable[None]]) -> None:
        clients: Any = [Asked(f"r{number}", answer) for number, answer in enumerate(answers)]
        self.clients: list[Asked] = clients
        self.first, self.second = (Sampler(client, up=True) for client in clients)
        self.pool = Pool(Caller(JOB, Settings(generate_deadline_s=0.06)))
        self.pool.samplers = {each.url: each for each in (self.first, self.second)}
        self.unretrieved: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: self.unretrieved.append(context)
        )

    async def sample(self) -> RolloutGroup:
        return await self.pool.generate(BODY, "step-1")

    async def check_nothing_is_left(self) -> None:
        await self.pool.close()
        gc.collect()
        await asyncio.sleep(0)
        assert self.unretrieved == []
        assert (self.first.under_way, self.second.under_way) == (0, 0)
        assert [client.num_asked for client in self.clients] == [1, 1]


def when(gate: asyncio.Event, error: HoneError | None = None) -> Callable[[], Awaitable[None]]:
    async def answer() -> None:
        await gate.wait()
        if error:
            raise error

    return answer


async def asked_twice(pair: Pair) -> asyncio.Task[RolloutGroup]:
    sampling = asyncio.create_task(pair.sample())
    while not pair.clients[1].num_asked:
        await asyncio.sleep(0.001)
    assert (pair.first.under_way, pair.second.under_way) == (4, 4)
    return sampling


async def test_two_copies_that_end_at_once_are_one_group() -> None:
    gate = asyncio.Event()
    pair = Pair(when(gate), when(gate))
    sampling = await asked_twice(pair)
    gate.set()
    assert (await sampling).replica in (pair.first.url, pair.second.url)
    assert [client.aborted for client in pair.clients] == [[], []], "both have ended"
    await pair.check_nothing_is_left()


@pytest.mark.parametrize("failing", [0, 1])
async def test_of_two_copies_that_end_at_once_the_one_that_was_sampled_counts(
    failing: int,
) -> None:
    gate = asyncio.Event()
    answers = [when(gate), when(gate)]
    answers[failing] = when(gate, StateLost("the engine process died"))
    pair = Pair(*answers)
    sampling = await asked_twice(pair)
    gate.set()
    assert (await sampling).replica == (pair.second, pair.first)[failing].url
    await pair.check_nothing_is_left()


async def test_a_copy_that_fails_while_it_is_ended_leaves_no_trace() -> None:
    gate = asyncio.Event()

    async def fail_when_cancelled() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise Unavailable("the connection was closed") from None

    pair = Pair(fail_when_cancelled, when(gate))
    sampling = await asked_twice(pair)
    gate.set()
    assert (await sampling).replica == pair.second.url
    await pair.check_nothing_is_left()
    assert [client.aborted for client in pair.clients] == [["step-1"], []]


async def test_if_both_copies_fail_at_once_it_is_the_first_ones_error() -> None:
    gate = asyncio.Event()
    pair = Pair(when(gate, StateLost("first")), when(gate, Failed("second")))
    pair.first.take(4)
    sampling = asyncio.create_task(pair.pool._sample(pair.first, BODY, "step-1"))
    while not pair.clients[1].num_asked:
        await asyncio.sleep(0.001)
    gate.set()
    with pytest.raises(StateLost, match="first"):
        await sampling
    pair.first.give_back(4)
    await pair.check_nothing_is_left()


async def test_room_given_to_a_group_that_is_cancelled_goes_to_the_next() -> None:
    gate = asyncio.Event()
    pair = Pair(when(gate), when(gate))
    only = pair.first
    only.max_num_seqs = 4
    del pair.pool.samplers[pair.second.url]
    under_way, first, second = (asyncio.create_task(pair.sample()) for _ in range(3))
    while not pair.clients[0].num_asked:
        await asyncio.sleep(0)
    gate.set()
    while not under_way.done():
        await asyncio.sleep(0)
    first.cancel()  # it was given room, and does not know yet
    async with asyncio.timeout(60):
        await second
    assert first.cancelled() and only.under_way == 0
    assert pair.clients[0].num_asked == 2


def test_the_least_loaded_sampler_with_room_is_chosen_of_those_that_take_groups() -> None:
    def sampler(taken: int, **state: Any) -> Sampler:
        found = Sampler(cast(Any, None), up=True, max_num_seqs=8, **state)
        found.take(taken)
        return found

    full, half, less = sampler(8), sampler(4), sampler(2)
    assert choose([full, half, less]) is less
    assert choose([full]) is None and choose([]) is None
    for away in (sampler(0, listed=False), sampler(0, held=True)):
        assert choose([away, half]) is half
    less.end("it died")
    assert choose([full, half, less]) is half


async def test_a_sampler_that_is_out_does_not_hide_that_the_last_one_is_unreachable() -> None:
    caller = Caller(JOB, Settings(rollout_url="http://r0:1,http://r1:1"))
    pool, who = Pool(caller), "the rollout service"
    pool.samplers = {
        url: Sampler(client_to("rollout", url, caller, reports=False), up=True)
        for url in caller.settings.rollout_urls
    }
    first, second = pool.samplers.values()
    second.end("it does not answer")
    caller.status.unreachable[second.client.presence] = Absence(who, 100.0, is_told=False)
    assert caller.status.unreachable_since(who) is None, "the first one serves"
    del caller.status.unreachable[second.client.presence]
    caller.status.unreachable[first.client.presence] = Absence(who, 130.0, is_told=False)
    assert caller.status.unreachable_since(who) == 130
    await pool.close()
    assert not caller.status.unreachable


NEXT = GenerateRequest(
    prompt=({"role": "user", "content": "a"},),
    known=ConversationPrefix(num_messages=2, token_ids=TokenIds((1, 2))),
)


def sampled_by(*versions: int) -> RolloutGroup:
    spans = tuple(Span(version=version, start=at) for at, version in enumerate(versions))
    rollout = Rollout(
        text="", token_ids=TokenIds(range(len(versions))), finish_reason="stop", spans=spans
    )
    return RolloutGroup(prompt_token_ids=TokenIds((1,)), rollouts=(rollout,))


def version() -> WeightsRef:
    return cast(WeightsRef, object())


@pytest.fixture
def sampler() -> Sampler:
    found = Sampler(cast(Any, None))
    found.begin(version())
    return found


@pytest.mark.parametrize("keeps", [False, True])
def test_newer_weights_end_the_use_of_a_cache_unless_prefixes_are_kept(
    sampler: Sampler, keeps: bool
) -> None:
    affinity = PrefixAffinity()
    affinity.keeps_prefixes = keeps
    affinity.note("c", None, sampler, sampled_by(3))
    assert (holder := affinity.find("c")) and holder.sampler is sampler
    assert affinity.find("d") is None and affinity.find(None) is None
    sampler.begin(version())
    assert (affinity.find("c") is not None) == keeps


def test_kept_prefixes_are_of_the_version_that_began_the_conversation_there(
    sampler: Sampler,
) -> None:
    affinity = PrefixAffinity()
    affinity.keeps_prefixes = True
    affinity.note("c", None, sampler, sampled_by(3, 4))
    sampler.begin(version())
    affinity.note("c", affinity.find("c"), sampler, sampled_by(5))
    holder = affinity.find("c")
    assert affinity.request(NEXT, holder, sampler).known == ConversationPrefix(
        num_messages=2, token_ids=TokenIds((1, 2)), version=3
    )
    other = Sampler(cast(Any, None))
    assert affinity.request(NEXT, holder, other) is NEXT, "another sampler has no such cache"
    affinity.note("c", holder, other, sampled_by(5))
    other.begin(version())
    affinity.note("c", None, other, sampled_by(6))
    assert affinity.request(NEXT, affinity.find("c"), other).known == ConversationPrefix(
        num_messages=2, token_ids=TokenIds((1, 2)), version=6
    )


def test_a_sampler_that_was_unreachable_has_no_cache(sampler: Sampler) -> None:
    affinity = PrefixAffinity()
    affinity.keeps_prefixes = True
    affinity.note("c", None, sampler, sampled_by(3))
    sampler.end("gone")
    assert affinity.find("c") is None
    sampler.begin(sampler.ref)
    assert affinity.find("c") is None
