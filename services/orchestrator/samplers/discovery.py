"""Finds the samplers: by URL, or by registration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from shared.errors import Unavailable
from shared.host.logs import get_logger
from shared.http.connecting import Tell
from shared.http.urls import REGISTERED, is_loopback
from shared.settings import Settings

DISCOVER_S = 5.0
"""How often a pool looks for samplers that came or left."""

FIRST_S = 0.25
"""How often a pool without any sampler looks for a first one."""

Registered = Callable[[], Awaitable[Sequence[str]]]
"""Returns the URLs of the samplers that are registered now."""


async def none_registered() -> Sequence[str]:
    return ()


async def sampler_urls(
    places: Sequence[str], registered: Registered = none_registered
) -> tuple[str, ...]:
    """Returns the URL of each sampler, in a fixed order. "registered" stands for each registered
    sampler, or for none."""
    found = [await registered() if place == REGISTERED else (place,) for place in places]
    return tuple(dict.fromkeys(url.rstrip("/") for urls in found for url in urls))


def is_one_host(places: Sequence[str]) -> bool:
    """Returns whether all possible samplers are on one host: there is one sampler, or all are on
    this host."""
    return REGISTERED not in places and (
        len(places) == 1 or all(is_loopback(urlsplit(place).hostname or "") for place in places)
    )


class Discovery:
    """The URLs of a pool's samplers, looked up every DISCOVER_S seconds."""

    def __init__(self, settings: Settings, registered: Registered) -> None:
        self._settings = settings
        self._registered = registered
        self._look_at = self._found_at = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._look_at

    async def some(self, tell: Tell) -> tuple[str, ...]:
        """Returns the URLs of all samplers, once there is one. Raises Unavailable if none comes,
        and StoreUnavailable while Redis is unreachable."""
        end = time.monotonic() + self._settings.patience_s
        places = f"HONE_ROLLOUT_URL is {self._settings.rollout_url!r}, which stands for none now"
        is_said = False
        while not (urls := await self._look()):
            if time.monotonic() > end:
                raise Unavailable(f"there is no sampler at all: {places}")
            if not is_said:
                await tell(f"waiting for a first sampler: {places}", True)
            is_said = True
            await asyncio.sleep(FIRST_S)
        return urls

    async def now(self) -> tuple[str, ...] | None:
        """Returns the URLs of all samplers. None: the pool keeps the samplers that it has, because
        Redis is unreachable, or because there has been no sampler for less than `patience_s`: all
        their leases may have ended at once, while the samplers still run."""
        try:
            urls = await self._look()
        except Unavailable as error:
            get_logger().warning("samplers not looked up", reason=error.detail)
            return None
        is_short = time.monotonic() < self._found_at + self._settings.patience_s
        return None if not urls and is_short else urls

    async def _look(self) -> tuple[str, ...]:
        now = time.monotonic()
        self._look_at = now + DISCOVER_S
        urls = await sampler_urls(self._settings.rollout_urls, self._registered)
        if urls:
            self._found_at = now
        return urls
