"""Finds the samplers: by URL, or by registration."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from shared.http.urls import REGISTERED, is_loopback

Registered = Callable[[], Awaitable[Sequence[str]]]
"""Returns the URLs of the samplers that are registered now."""


async def none_registered() -> Sequence[str]:
    return ()


def is_one(places: Sequence[str]) -> bool:
    """Returns whether there can be only one sampler."""
    return len(places) == 1 and places[0] != REGISTERED


def is_one_host(places: Sequence[str]) -> bool:
    """Returns whether all possible samplers are on one host: there is one sampler, or all are on
    this host."""
    return is_one(places) or all(
        place.startswith("http") and is_loopback(urlsplit(place).hostname or "") for place in places
    )


async def sampler_urls(
    places: Sequence[str], registered: Registered = none_registered
) -> tuple[str, ...]:
    """Returns the URL of each sampler, in a fixed order. "registered" stands for each registered
    sampler, or for none."""
    found: list[Sequence[str]] = []
    for place in places:
        if place == REGISTERED:
            found.append(await registered())
        else:
            found.append((place,))
    return tuple(dict.fromkeys(url.rstrip("/") for urls in found for url in urls))
