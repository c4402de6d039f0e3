"""Samplers that join in the middle of a job: the pool over the real rollout app, with an engine
that is slow on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from services.orchestrator.samplers import discovery, pool
from services.orchestrator.samplers.pool import Pool
from services.orchestrator.samplers.sampler import Push
from services.orchestrator.samplers.status import Caller
from services.orchestrator.samplers.syncing import prove
from shared.settings import Settings
from shared.wire import (
    EngineSpec,
    GenerateRequest,
    ModelRequest,
    RolloutGroup,
    Sampling,
    WeightsRef,
)
from tests.support.job_records import JOB
from tests.support.rollout_bench import FakeEngine, RolloutBench
from tests.support.running import served

pytestmark = pytest.mark.slow

WHO: dict[str, Any] = {"job_id": "demo-1", "attempt": 1, "epoch": 1}


class Joining:
    """A pool that one sampler is in, and a second one whose engine loads only while `may_load` is
    set. `said` is what followers of the job are told."""

    def __init__(self, folder: Path) -> None:
        self.first = RolloutBench(folder / "first", replica="first")
        self.second = RolloutBench(folder / "second", replica="second", runs_dir=self.first.runs)
        self.may_load = asyncio.Event()
        self.said: list[str] = []
        self.urls: list[str] = []
        self._start, self.second.start = self.second.start, self._start_slow
        settings = Settings(rollout_url="registered")
        self.pool = Pool(Caller(JOB, settings, tell=self._tell), self._registered)

    async def _start_slow(self, spec: EngineSpec, folder: Path) -> FakeEngine:
        engine = await self._start(spec, folder)
        engine.loading = self.may_load
        return engine

    async def _tell(self, sentence: str, _: bool) -> None:
        self.said.append(sentence)

    async def _registered(self) -> Sequence[str]:
        return self.urls

    async def push(self, version: int) -> list[str]:
        """Returns which samplers serve the version now."""
        ref = WeightsRef(self.first.publish(version, "demo-1", (1, 1)))
        push = Push(ref, AsyncMock(return_value=ref), prove)
        return [serving.replica for serving in await self.pool.push(push)]

    async def sample(self, count: int, version: int) -> list[RolloutGroup]:
        body = GenerateRequest(
            **WHO,
            prompt_token_ids=(1, 2),
            min_version=version,
            sampling=Sampling(n=2, max_tokens=4),
        )
        keys = [f"{version}:{number}" for number in range(count)]
        return await asyncio.gather(*(self.pool.generate(body, key) for key in keys))


@pytest.fixture
async def joining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Joining]:
    monkeypatch.setattr(pool, "LOOK_AT_AWAY_S", 0.01)
    monkeypatch.setattr(discovery, "DISCOVER_S", 0.01)
    joining = Joining(tmp_path)
    servers = joining.first.service.server(0), joining.second.service.server(0)
    async with served(servers[0]) as first, served(servers[1]) as second:
        joining.urls.append(first)
        await joining.pool.open(ModelRequest(**WHO, model="tiny"))
        assert await joining.push(1) == ["first"]
        joining.urls.append(second)
        async with asyncio.timeout(90):
            while not (joining.second.engines and "v1" in joining.second.engine.calls):
                await asyncio.sleep(0.005)
        yield joining
        joining.may_load.set()
        await joining.pool.close()


async def test_until_it_has_the_version_no_group_goes_there(joining: Joining) -> None:
    groups = await joining.sample(6, 1)
    assert {group.replica for group in groups} == {"first"}
    joining.may_load.set()
    await joined(joining)
    groups = await joining.sample(6, 1)
    assert {group.replica for group in groups} == {"first", "second"}
    assert {version for group in groups for r in group.rollouts for version in r.versions} == {1}


async def test_a_version_that_is_pushed_while_it_joins_is_loaded_before_it_serves(
    joining: Joining,
) -> None:
    assert await joining.push(2) == ["first"], "no one waits for it"
    assert {group.replica for group in await joining.sample(6, 2)} == {"first"}
    joining.may_load.set()
    await joined(joining)
    engine = joining.second.engine
    assert [call for call in engine.calls if isinstance(call, int)] == [1, 2]
    assert engine.samples == 0
    groups = await joining.sample(6, 2)
    assert {group.replica for group in groups} == {"first", "second"}
    assert {version for group in groups for r in group.rollouts for version in r.versions} == {2}
    assert joining.said == [f"sampler {joining.urls[1]} serves version 2"]
    assert sorted(await joining.push(3)) == ["first", "second"]


async def joined(joining: Joining) -> None:
    async with asyncio.timeout(90):
        while not joining.said:
            await asyncio.sleep(0.005)
