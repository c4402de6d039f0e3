"""A Redis in whose place a replica became the primary: connections go there by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis

from services.orchestrator.store.connection import StoreUnavailable
from services.orchestrator.store.records import Submission
from services.orchestrator.store.store import Store
from tests.support.job_records import JOB
from tests.support.link import Link
from tests.support.running import running_redis


def path_of(client: Any) -> Path:
    return Path(client.connection_pool.connection_kwargs["path"])


@pytest.fixture
async def first(redis_url: str) -> AsyncGenerator[Any]:
    client = redis.from_url(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
async def second(tmp_path: Path) -> AsyncGenerator[Any]:
    with running_redis(tmp_path / "second") as url:
        client = redis.from_url(url)
        yield client
        await client.aclose()


async def copy(source: Any, target: Any) -> None:
    """What replication does."""
    for key in await source.keys("*"):
        left_ms = max(await source.pttl(key), 0)
        await target.restore(key, left_ms, await source.dump(key))


class Failover:
    """A store whose Redis, at the end of a link, is replaced by another one."""

    def __init__(self, first: Any, second: Any, folder: Path) -> None:
        self._first, self._second, self._folder = first, second, folder

    async def __aenter__(self) -> Failover:
        address = self._folder / "redis.sock"
        self._link = await Link(path_of(self._first), address).__aenter__()
        self.store = Store(f"unix://{address}")
        await self.store.open()
        self.job_id = (await self.store.submit(Submission(JOB, self._folder))).id
        lease = await self.store.take("worker", "trainer:1", 30)
        assert lease is not None
        self.lease = lease
        await self.store.beat(lease)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.store.close()
        await self._link.__aexit__()

    async def happens(self) -> None:
        """Connections that there are stay with the old one, which is a replica from now on."""
        await copy(self._first, self._second)
        self._link.lead_to(path_of(self._second))
        await self._first.execute_command("REPLICAOF", "127.0.0.1", "1")


@pytest.fixture
async def failover(first: Any, second: Any, tmp_path: Path) -> AsyncGenerator[Failover]:
    async with Failover(first, second, tmp_path) as failover:
        yield failover


async def test_what_the_old_primary_refuses_goes_to_the_new_one_next(failover: Failover) -> None:
    store, lease = failover.store, failover.lease
    await failover.happens()
    with pytest.raises(StoreUnavailable, match="READONLY"):
        await store.report(lease, "log", "to the old one")
    await store.report(lease, "log", "to the new one")
    assert await store.beat(lease) is None
    found = await store.events(failover.job_id, "0", block_s=20.0)
    assert [event.message for event in found][-1] == "to the new one"


async def test_a_follower_of_the_old_primary_ends_and_follows_the_new_one(
    failover: Failover, first: Any
) -> None:
    store, lease = failover.store, failover.lease
    last = (await store.events(failover.job_id, "0"))[-1].id
    follower = asyncio.create_task(store.events(failover.job_id, last, block_s=20.0))
    while not (await first.info("clients"))["blocked_clients"]:
        await asyncio.sleep(0.01)
    await failover.happens()
    with pytest.raises(StoreUnavailable, match="UNBLOCKED"):
        await follower
    await store.report(lease, "log", "to the new one")
    found = await store.events(failover.job_id, last, block_s=20.0)
    assert [event.message for event in found] == ["to the new one"]
