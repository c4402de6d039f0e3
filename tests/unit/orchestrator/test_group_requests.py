"""A group that two samplers were asked for is counted once, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.orchestrator.pool.admission import Admission
from services.orchestrator.pool.group_requests import GroupRequests
from services.orchestrator.pool.replica import Replica
from shared.errors import Failed, HoneError, StateLost, Unavailable
from shared.settings import Settings
from shared.wire import Aborted, AbortRequest, GenerateRequest, RolloutGroup, Sampling
from shared.wire.packed import TokenIds

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

    async def call(self, _: str, path: str, body: Any, *__: Any, **___: Any) -> Any:
        if path == "/abort":
            assert isinstance(body, AbortRequest)
            self.aborted += body.keys
            return Aborted(num_requests=1)
        self.num_asked += 1
        await self._answer()
        return RolloutGroup(prompt_token_ids=TokenIds((1,)), rollouts=(), replica=self.url)


class Pair:
    """Two samplers with room, of which the first is slow enough for the second to be asked too."""

    def __init__(self, *answers: Callable[[], Awaitable[None]]) -> None:
        clients: Any = [Asked(f"r{number}", answer) for number, answer in enumerate(answers)]
        self.clients: list[Asked] = clients
        self.first, self.second = (Replica(client, up=True) for client in clients)
        admission = Admission(lambda: [self.first, self.second], lambda: Unavailable("nobody"))
        self.requests = GroupRequests(Settings(hedge_s=0.01), admission, lambda _: 1.0)
        self.unretrieved: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: self.unretrieved.append(context)
        )

    async def sample(self) -> tuple[Replica, RolloutGroup]:
        self.first.take(4)
        try:
            return await self.requests.sample(self.first, BODY, "step-1")
        finally:
            self.first.give_back(4)

    async def check_nothing_is_left(self) -> None:
        await self.requests.close()
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


async def asked_twice(pair: Pair) -> asyncio.Task[tuple[Replica, RolloutGroup]]:
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
    replica, group = await sampling
    assert group.replica == replica.url
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
    replica, group = await sampling
    assert replica is (pair.second, pair.first)[failing] and group.replica == replica.url
    await pair.check_nothing_is_left()


async def test_a_copy_that_fails_as_it_is_ended_leaves_no_trace() -> None:
    gate = asyncio.Event()

    async def fail_when_cancelled() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise Unavailable("the connection was closed") from None

    pair = Pair(fail_when_cancelled, when(gate))
    sampling = await asked_twice(pair)
    gate.set()
    replica, _ = await sampling
    assert replica is pair.second
    await pair.check_nothing_is_left()
    assert [client.aborted for client in pair.clients] == [["step-1"], []]


async def test_if_both_copies_fail_at_once_it_is_the_first_ones_error() -> None:
    gate = asyncio.Event()
    pair = Pair(when(gate, StateLost("first")), when(gate, Failed("second")))
    sampling = await asked_twice(pair)
    gate.set()
    with pytest.raises(StateLost, match="first"):
        await sampling
    await pair.check_nothing_is_left()
