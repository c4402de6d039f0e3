"""What a worker's heartbeat waits for."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.orchestrator.store import leases
from services.orchestrator.store.connection import StoreUnavailable
from services.orchestrator.store.leases import Lease, LeaseRequest
from shared.http import connecting
from shared.http.connecting import Presence


class Beats:
    """The first beat fails; the fourth one says that cancelling was asked for."""

    def __init__(self) -> None:
        self.num = 0

    async def beat(self, lease: Lease) -> LeaseRequest | None:
        self.num += 1
        if self.num == 1:
            raise StoreUnavailable("away")
        return "cancel" if self.num == 4 else None


async def test_saying_that_redis_is_back_does_not_keep_the_next_heartbeat_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connecting, "AWAY_S", 0.0)
    said: list[bool] = []

    async def tell(_message: str, away: bool) -> None:
        said.append(away)
        if not away:
            await asyncio.sleep(3600)  # it is unreachable again, and the client patient

    lease = Lease("a", 1, "trainer", lease_s=1.0)
    async with asyncio.timeout(90):
        redis = Presence("Redis", tell)
        assert await leases.keep(Beats().beat, lease, time.monotonic(), redis) == "cancel"
    assert said == [True, False]
