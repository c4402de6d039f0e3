"""A sampler registers itself at the orchestrator and renews its lease, until it is asked to end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from urllib.parse import quote

from shared.client import Client
from shared.config import Settings
from shared.draining import Draining
from shared.errors import HoneError
from shared.logs import get_logger
from shared.wire import RegisteredSampler, Registration, ServingWeights, Unregistered

RETRY_S = 1.0
"""Seconds between two attempts while the orchestrator refuses or cannot be reached."""

ANSWER_S = 5.0
"""Seconds that it has to answer."""

GOODBYE_S = 2.0
"""Seconds that unregistering may take when the service ends; after that the lease expires."""


@contextlib.asynccontextmanager
async def registered(
    settings: Settings, serving: Callable[[], ServingWeights], draining: Draining
) -> AsyncGenerator[None]:
    """Keeps the sampler registered, if its settings say where it is, until the service drains.
    `serving` returns what serves now, and the sampler's name."""
    if settings.rollout_advertise_url is None:
        yield
        return
    staying = asyncio.create_task(_stay(settings, serving, draining))
    try:
        yield
    finally:
        draining.begin()
        await staying


async def _stay(
    settings: Settings, serving: Callable[[], ServingWeights], draining: Draining
) -> None:
    url, token = settings.rollout_advertise_url, settings.bearer()
    assert url is not None
    async with Client(
        "orchestrator", settings.orchestrator_url, token=token, patience_s=0.0
    ) as orchestrator:
        renewing = asyncio.create_task(_renew(orchestrator, url, serving))
        await draining.wait()
        renewing.cancel()
        await asyncio.wait({renewing}, timeout=GOODBYE_S)
        await _leave(orchestrator, serving().replica)


async def _renew(orchestrator: Client, url: str, serving: Callable[[], ServingWeights]) -> None:
    logged: str | None = None
    while True:
        now = serving()
        body = Registration(url=url, job_id=now.job_id, version=now.version)
        try:
            answer = await orchestrator.call(
                "PUT", _path(now.replica), body, RegisteredSampler, deadline_s=ANSWER_S
            )
        except HoneError as error:
            if error.detail != logged:
                get_logger().warning("not registered", url=url, reason=error.detail)
            logged = error.detail
            await asyncio.sleep(RETRY_S)
        else:
            if logged != "":
                get_logger().info("registered", url=url, at=orchestrator.url)
            logged = ""
            await asyncio.sleep(answer.lease_s / 3)


async def _leave(orchestrator: Client, replica: str) -> None:
    try:
        await orchestrator.call("DELETE", _path(replica), None, Unregistered, deadline_s=GOODBYE_S)
    except HoneError as error:
        get_logger().warning("not unregistered", reason=error.detail)


def _path(replica: str) -> str:
    return f"/v1/samplers/{quote(replica, safe='')}"
