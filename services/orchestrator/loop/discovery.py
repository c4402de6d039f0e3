"""Where the samplers are: addresses as they are written, and names that stand for several."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from shared.config import DNS_PREFIX
from shared.logs import get_logger


async def sampler_urls(places: Sequence[str]) -> tuple[str, ...]:
    """Returns the URL of each sampler, in a fixed order. `dns+http://name:8001` stands for one at
    each address of the name now; a name without any stands for none."""
    found = [
        await _addresses(place) if place.startswith(DNS_PREFIX) else (place,) for place in places
    ]
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
