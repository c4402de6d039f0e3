"""Registers the sampler with the orchestrator and renews its lease, until the service ends."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable
from urllib.parse import quote

from shared.errors import HoneError
from shared.host.logs import get_logger
from shared.http.client import Client
from shared.http.operations import Draining
from shared.settings import Settings
from shared.wire import RegisteredSampler, Registration, ServingWeights, Unregistered

RETRY_S = 1.0
"""Seconds between two attempts while the orchestrator refuses or cannot be reached."""

ANSWER_S = 5.0
"""Seconds that the orchestrator has to answer."""

GOODBYE_S = 2.0
"""Seconds that unregistering may take when the service ends; after that the lease expires."""


@contextlib.asynccontextmanager
async def registered(
    settings: Settings, serving: Callable[[], ServingWeights], draining: Draining
) -> AsyncGenerator[None]:
    """Keeps the sampler registered until the service drains, if its settings have its URL.
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
    url, token, boot_id = settings.rollout_advertise_url, settings.bearer(), secrets.token_hex(8)
    assert url is not None
    async with Client(
        "orchestrator", settings.orchestrator_url, token=token, patience_s=0.0
    ) as orchestrator:
        renewing = asyncio.create_task(_renew(orchestrator, url, boot_id, serving))
        await draining.wait()
        renewing.cancel()
        await asyncio.wait({renewing}, timeout=GOODBYE_S)
        await _leave(orchestrator, serving().replica, boot_id)


async def _renew(
    orchestrator: Client, url: str, boot_id: str, serving: Callable[[], ServingWeights]
) -> None:
    logged: str | None = None
    while True:
        try:
            now = serving()
            body = Registration(url=url, job_id=now.job_id, version=now.version, boot_id=boot_id)
            answer = await orchestrator.call(
                "PUT", _path(now.replica), body, RegisteredSampler, deadline_s=ANSWER_S
            )
        except Exception as error:  # nothing awaits this task, so it would be lost
            is_known = isinstance(error, HoneError)
            reason = error.detail if is_known else f"{type(error).__name__}: {error}"
            if reason != logged:
                get_logger().warning(
                    "not registered", url=url, reason=reason, exc_info=not is_known
                )
            logged = reason
            await asyncio.sleep(RETRY_S)
        else:
            if logged != "":
                get_logger().info("registered", url=url, at=orchestrator.url)
            logged = ""
            await asyncio.sleep(answer.lease_s / 3)


async def _leave(orchestrator: Client, replica: str, boot_id: str) -> None:
    path = f"{_path(replica)}?boot_id={boot_id}"
    try:
        await orchestrator.call("DELETE", path, None, Unregistered, deadline_s=GOODBYE_S)
    except HoneError as error:
        get_logger().warning("not unregistered", reason=error.detail)


def _path(replica: str) -> str:
    return f"/v1/samplers/{quote(replica, safe='')}"
