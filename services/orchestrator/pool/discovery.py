"""Finds the samplers: by URL, by a DNS name with several addresses, or by registration."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from shared.host.logs import get_logger
from shared.http.urls import DNS_PREFIX, REGISTERED, is_loopback

Registered = Callable[[], Awaitable[Sequence[str]]]
"""Returns the URLs of the samplers that are registered now."""


async def none_registered() -> Sequence[str]:
    return ()


def is_one(places: Sequence[str]) -> bool:
    """Returns whether there can be only one sampler."""
    return len(places) == 1 and places[0] != REGISTERED and not places[0].startswith(DNS_PREFIX)


def is_one_host(places: Sequence[str]) -> bool:
    """Returns whether all possible samplers are on one host: there is one sampler, or all are on
    this host."""
    return is_one(places) or all(
        place.startswith("http") and is_loopback(urlsplit(place).hostname or "") for place in places
    )


async def sampler_urls(
    places: Sequence[str], registered: Registered = none_registered
) -> tuple[str, ...]:
    """Returns the URL of each sampler, in a fixed order. `dns+http://name:8001` stands for a
    sampler at each present address of the name, "registered" for each registered sampler; both may
    stand for none."""
    found: list[Sequence[str]] = []
    for place in places:
        if place == REGISTERED:
            found.append(await registered())
        elif place.startswith(DNS_PREFIX):
            found.append(await _addresses(place))
        else:
            found.append((place,))
    return tuple(dict.fromkeys(url.rstrip("/") for urls in found for url in urls))


async def _addresses(place: str) -> tuple[str, ...]:
    url = urlsplit(place.removeprefix(DNS_PREFIX))
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(
            url.hostname, url.port, type=socket.SOCK_STREAM
        )
    except OSError as error:
        get_logger().warning("name not found", name=url.hostname, reason=str(error))
        return ()
    hosts = sorted({str(info[4][0]) for info in infos})
    return tuple(
        f"{url.scheme}://{f'[{host}]' if ':' in host else host}:{url.port}" for host in hosts
    )
