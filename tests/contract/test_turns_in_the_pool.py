"""The turns of one conversation go to the sampler that has them in its cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any
from unittest.mock import AsyncMock

import pytest

from services.orchestrator.samplers import pool as pool_module
from services.orchestrator.samplers.pool import Pool
from services.orchestrator.samplers.sampler import Push
from services.orchestrator.samplers.status import Caller
from shared.http.service import request_key
from shared.settings import Settings
from shared.wire import FolderWeights, GenerateRequest, ModelRequest, Sampling, WeightsRef
from tests.support.fake_samplers import FakeSampler, pool_of
from tests.support.job_records import JOB

pytestmark = pytest.mark.slow

WHO: dict[str, Any] = {"job_id": "demo-1", "attempt": 1, "epoch": 1}
BODY = GenerateRequest(**WHO, prompt="a", min_version=1, sampling=Sampling(n=2, max_tokens=4))


class Conversing:
    """Two samplers, of two completions at a time each, that serve version 1."""

    def __init__(self, samplers: Pool, fakes: tuple[FakeSampler, ...]) -> None:
        self.samplers, self.fakes = samplers, fakes
        self.version = 0

    async def push(self) -> None:
        self.version += 1
        ref = WeightsRef(
            FolderWeights(
                **WHO, version=self.version, digest="d", size_bytes=1, method="disk", path="/w"
            )
        )
        await self.samplers.push(Push(ref, AsyncMock(return_value=ref), _proven))

    async def turn(self, key: str, conversation: str | None = None) -> str:
        """Returns the name of the sampler that sampled it."""
        group = await self.samplers.generate(BODY, key, conversation)
        return group.replica.split(" ")[0]


async def _proven(*_: Any) -> None:
    """Nothing is proven here."""


@pytest.fixture
async def pool(settings: Settings) -> AsyncGenerator[Conversing]:
    async with pool_of(2, settings, max_num_seqs=2) as fakes:
        urls = ",".join(fake.url for fake in fakes)
        samplers = Pool(Caller(JOB, settings.model_copy(update={"rollout_url": urls})))
        await samplers.open(ModelRequest(**WHO, model="m"))
        pool = Conversing(samplers, fakes)
        await pool.push()
        yield pool
        await samplers.close()


async def blocked(pool: Conversing, name: str, until: asyncio.Event) -> asyncio.Task[str]:
    """Keeps the sampler busy with a group of another conversation; returns once it is."""
    (fake,) = (fake for fake in pool.fakes if fake.name == name)

    async def wait(_: Any) -> None:
        if request_key.get() == f"block {name}":
            await until.wait()

    fake.fault["generate"] = wait
    others = [other for other in pool.fakes if other is not fake]
    for other in others:
        other.fault["generate"] = lambda _: until.wait()
    first = asyncio.create_task(pool.turn(f"block {name}"))
    while not fake.busy:
        await asyncio.sleep(0.005)
        if any(other.busy for other in others):
            raise AssertionError("the least loaded one is asked")
    for other in others:
        del other.fault["generate"]
    return first


async def test_turns_of_one_conversation_stay_where_they_were(pool: Conversing) -> None:
    homes = {name: await pool.turn(f"{name}:1", name) for name in ("a", "b", "c", "d")}
    for number in range(2, 5):
        turns = [pool.turn(f"{name}:{number}", name) for name in homes]
        assert await asyncio.gather(*turns) == [*homes.values()]


async def test_a_turn_waits_a_little_for_its_sampler(
    pool: Conversing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "SOON_S", 60.0)
    home = await pool.turn("a:1", "a")
    until = asyncio.Event()
    blocker = await blocked(pool, home, until)
    turn = asyncio.create_task(pool.turn("a:2", "a"))
    other = await pool.turn("new")  # the one with room gets what comes later
    assert other != home and not turn.done()
    until.set()
    assert await turn == await blocker == home


async def test_a_turn_goes_elsewhere_when_its_sampler_has_no_room_soon(
    pool: Conversing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "SOON_S", 0.05)
    home = await pool.turn("a:1", "a")
    until = asyncio.Event()
    blocker = await blocked(pool, home, until)
    moved = await pool.turn("a:2", "a")
    assert moved != home
    until.set()
    assert await blocker == home
    assert await pool.turn("a:3", "a") == moved


async def test_a_turn_whose_sampler_died_goes_to_the_other(pool: Conversing) -> None:
    home = await pool.turn("a:1", "a")
    for fake in pool.fakes:
        if fake.name == home:
            await fake.kill()
    assert await pool.turn("a:2", "a") != home
    for fake in pool.fakes:
        if fake.name == home:
            await fake.start()


async def test_after_a_sync_nothing_of_a_conversation_is_cached_any_more(
    pool: Conversing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So its next turn waits for no one."""
    monkeypatch.setattr(pool_module, "SOON_S", 600.0)
    home = await pool.turn("a:1", "a")
    await pool.push()
    until = asyncio.Event()
    blocker = await blocked(pool, home, until)
    assert await pool.turn("a:2", "a") != home
    until.set()
    await blocker
