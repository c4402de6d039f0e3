"""Leases: the right of a worker with its job to use services for a while. A heartbeat renews
the lease, and ends the work if that does not succeed in time.

While Redis cannot be reached no one tells the worker that it lost its lease. So it uses its own
clock, and stops before Redis can give the trainer to another worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from services.orchestrator.store.connection import StoreUnavailable
from shared.host.logs import get_logger
from shared.http.connecting import Presence
from shared.http.urls import REGISTERED, is_loopback

Asked = Literal["cancel", "pause"]

MAX_INTERVAL_S = 1.0
"""Seconds between two beats, short so that requests are heard soon. At most a fifth of the
lease."""

TIMEOUT = 0.2
"""Share of the lease after which a beat without an answer is sent again, on another connection."""

MARGIN = 0.2
"""Share of the lease that is left for stopping the work."""

PORTS = {"http": 80, "https": 443}


class LeaseLost(Exception):
    """The lease expired or another worker took the job over. This worker must stop at once and
    change nothing more."""


class NoHeartbeat(LeaseLost):
    """Redis could not be reached for most of the lease."""


@dataclass(frozen=True)
class Lease:
    """The right to work on a job with a trainer, for `lease_s` seconds from each heartbeat.
    `attempt` fences: it is larger than the attempt of any earlier lease. `tries` counts the
    attempts in a row, this one included, that completed no new step. `beside` are the attempts that
    shared the trainer when the lease was given."""

    job_id: str
    attempt: int
    trainer: str
    lease_s: float
    tries: int = 1
    beside: tuple[int, ...] = ()


def resource(url: str) -> str:
    """Returns `host:port` of the service at `url`. A loopback address becomes this machine's host
    name, because each machine has its own. All registered samplers together are one resource."""
    if url == REGISTERED:
        return REGISTERED
    parts = urlsplit(url)
    host = parts.hostname or ""
    name = socket.gethostname().lower() if is_loopback(host) else host.rstrip(".")
    return f"{name}:{parts.port or PORTS.get(parts.scheme, '')}"


Beat = Callable[[Lease], Awaitable[Asked | None]]
"""Renews the lease. Raises LeaseLost, and StoreUnavailable."""


async def keep(beat: Beat, lease: Lease, taken_at: float, redis: Presence) -> Asked:
    """Renews the lease until a request (cancel or pause) comes, and returns it. Raises LeaseLost
    once another worker has the lease, NoHeartbeat once the last successful beat was sent a lease
    ago, less the margin. `taken_at` (time.monotonic) is when the lease was asked for. `redis` is
    told whether there was an answer."""
    interval_s = min(MAX_INTERVAL_S, lease.lease_s / 5)
    renewed_at = taken_at
    while True:
        stop_at = renewed_at + lease.lease_s * (1 - MARGIN)
        asked, renewed_at = await _beat_until(stop_at, beat, lease, interval_s, redis)
        if asked:
            return asked
        await asyncio.sleep(interval_s)


async def _beat_until(
    stop_at: float, beat: Beat, lease: Lease, interval_s: float, redis: Presence
) -> tuple[Asked | None, float]:
    """Returns the request, if any, and when the successful beat was sent. Raises NoHeartbeat if no
    beat succeeded until `stop_at`."""
    while (sent_at := time.monotonic()) < stop_at:
        try:
            async with asyncio.timeout(min(lease.lease_s * TIMEOUT, stop_at - sent_at)):
                asked = await beat(lease)
            # The report of an answer goes to Redis, which may be away again: no beat is sent then.
            with contextlib.suppress(TimeoutError, StoreUnavailable):
                async with asyncio.timeout(lease.lease_s * TIMEOUT):
                    await redis.heard()
            return asked, sent_at
        except (TimeoutError, StoreUnavailable) as error:
            reason = str(error) or "no answer to a heartbeat"
            get_logger().warning("no heartbeat", job=lease.job_id, reason=reason)
            await redis.missed(sent_at, reason)
        await asyncio.sleep(max(0.0, sent_at + interval_s - time.monotonic()))
    raise NoHeartbeat(f"{lease.job_id}: no heartbeat reached Redis for most of {lease.lease_s:g} s")
