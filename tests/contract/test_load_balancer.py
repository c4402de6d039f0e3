"""A load balancer before two processes of one service, each of which knows only its own
operations."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from shared.http.client import Client
from shared.http.service import Service, request_key
from shared.settings import Settings
from shared.wire import Aborted, NoBody
from tests.support.proxy import round_robin
from tests.support.running import served

pytestmark = pytest.mark.slow


class Worker:
    """Works on one thing at a time until it may end. `done` counts what it finished, by key."""

    def __init__(self, settings: Settings) -> None:
        self.done: Counter[str | None] = Counter()
        self.may_end = asyncio.Event()
        self._service = Service("reward", settings)
        self._service.operation("POST", "/work", self._work)
        self.server = self._service.server(0)

    def num_requests(self) -> float:
        samples = [s for m in self._service.registry.collect() for s in m.samples]
        return sum(s.value for s in samples if s.name.endswith("requests_total"))

    async def _work(self, _: NoBody) -> Aborted:
        await self.may_end.wait()
        self.done[request_key.get()] += 1
        return Aborted(num_requests=1)


@pytest.mark.parametrize("count", [1, 8])
async def test_polls_that_land_elsewhere_lose_no_work_and_do_not_flood(
    settings: Settings, count: int
) -> None:
    workers = (Worker(settings), Worker(settings))
    async with (
        served(workers[0].server) as first,
        served(workers[1].server) as second,
        round_robin(first, second) as url,
        Client("reward", url, patience_s=20.0) as client,
        asyncio.timeout(90),
    ):
        keys = [f"key-{number}" for number in range(count)]
        calls = [
            asyncio.create_task(
                client.call("POST", "/work", NoBody(), Aborted, deadline_s=60, key=key, wait_s=0)
            )
            for key in keys
        ]
        start = time.monotonic()
        await asyncio.sleep(1.0)
        while not (asked := sum(worker.num_requests() for worker in workers)):
            await asyncio.sleep(0.1)  # a busy machine has answered nothing yet
        seconds = time.monotonic() - start
        for worker in workers:
            worker.may_end.set()
        answers = await asyncio.gather(*calls)
    assert [answer.num_requests for answer in answers] == [1] * count
    assert all(worker.done[key] <= 1 for worker in workers for key in keys)
    assert asked <= 25 * count * seconds
