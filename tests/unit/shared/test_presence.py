"""When a service is said to be unreachable, and back, by clients that share what is known of it;
and how several callers wait for one operation."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from shared.http.connecting import Absence, Poller, Presence, no_notify
from shared.wire import WaitResult

HUB = "the Hugging Face Hub"


@pytest.fixture
def told() -> list[str]:
    return []


def presence(
    told: list[str], service: str, shared: dict[Presence, Absence], *, reports: bool = True
) -> Presence:
    async def tell(message: str, _away: bool) -> None:
        told.append(message)

    return Presence(service, tell if reports else no_notify, shared)


async def test_a_clients_answer_does_not_end_what_another_client_waits_for(
    told: list[str],
) -> None:
    shared = dict[Presence, Absence]()
    trainer, sampler = (presence(told, name, shared) for name in ("trainer", "rollout"))
    long_ago = time.monotonic() - 10
    await sampler.missed(time.monotonic(), "starting", HUB)
    for _ in range(3):
        await trainer.missed(long_ago, "no connection", HUB)
        await sampler.heard()
    assert [text.split(":")[0] for text in told] == [told[0].split(":")[0]]
    assert told[0].startswith(f"{HUB} is unreachable since ")
    await trainer.heard()
    assert told[1:] == [f"{HUB} is back after 10 s"] and not shared


async def test_two_clients_without_one_service_tell_it_once(told: list[str]) -> None:
    shared = dict[Presence, Absence]()
    clients = [presence(told, "trainer", shared) for _ in range(2)]
    for client in clients:
        await client.missed(time.monotonic() - 10, "no connection", HUB)
    await clients[0].heard()
    assert len(told) == 1 and len(shared) == 1, "it is away for the other one"
    await clients[1].heard()
    assert told[1:] == [f"{HUB} is back after 10 s"]


async def test_a_client_that_does_not_report_hides_nothing(told: list[str]) -> None:
    shared = dict[Presence, Absence]()
    quiet, loud = (presence(told, "rollout", shared, reports=each) for each in (False, True))
    for client in (quiet, loud):
        await client.missed(time.monotonic() - 10, "no connection")
    assert len(told) == 1 and len(shared) == 2


async def test_a_caller_is_woken_although_another_one_gave_up() -> None:
    class Ends(Poller):
        """Says that the operation has ended, once `over` is set."""

        over = asyncio.Event()

        async def _ask(self, ids: tuple[str, ...]) -> WaitResult:
            await self.over.wait()
            return WaitResult(ids=ids, busy=0)

    poller = Ends(cast(Any, None), 20.0)
    first, second = (asyncio.create_task(poller.ended("/operations/x")) for _ in range(2))
    await asyncio.sleep(0.05)
    first.cancel()
    await asyncio.sleep(0)
    poller.over.set()
    await asyncio.wait_for(second, 5)
    await poller.close()


async def test_a_service_that_waits_for_another_one_is_back(told: list[str]) -> None:
    shared = dict[Presence, Absence]()
    trainer = presence(told, "trainer", shared)
    await trainer.missed(time.monotonic() - 10, "no connection")
    await trainer.missed(time.monotonic() - 10, "no Hub", HUB)
    await trainer.heard()
    assert told[1:2] == ["the trainer service is back after 10 s"]
    assert told[3:] == [f"{HUB} is back after 10 s"] and not shared
