"""A job's events: past ones, and new ones until it has ended or is paused. After a dropped
connection they resume where it broke."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import TypeAlias

from shared import wire
from shared.errors import Unavailable
from shared.http import codec
from shared.http.client import Client

RECONNECT_S = 60.0
"""Most seconds without any answer."""

PAUSE_S = 1.0

Hears: TypeAlias = "Callable[[wire.JobProgress], None]"


async def pages(
    client: Client, job_id: str, after: str, progress: Hears | None = None
) -> AsyncGenerator[wire.Event]:
    """Yields the past events after event `after`; never calls `progress`."""
    following: str | None = after
    while following is not None:
        path = f"/v1/jobs/{job_id}/events?after={following}"
        page = await client.get(path, wire.EventList)
        for event in page:
            yield event
        following = page.next_after


async def follow(
    client: Client, job_id: str, after: str, progress: Hears | None = None
) -> AsyncGenerator[wire.Event]:
    """Yields past and new events after event `after`. Every two seconds without an event,
    `progress` is called with the job's state, or with the news that the orchestrator does not
    answer."""
    last, lost_at = after, None
    query = "until_paused=true&progress=true" if progress else "until_paused=true"
    while True:
        try:
            stream = client.events(f"/v1/jobs/{job_id}/events?{query}", last_id=last)
            async with contextlib.aclosing(stream):
                async for id, kind, data in stream:
                    lost_at = None
                    if kind == "end":
                        return
                    if kind == "progress":
                        if progress:
                            progress(codec.decode_tolerantly(wire.JobProgress, data.encode()))
                        continue
                    last = id
                    yield codec.decode_tolerantly(wire.Event, data.encode())
        except Unavailable:
            lost_at = lost_at or time.monotonic()
            away_s = time.monotonic() - lost_at
            if away_s > RECONNECT_S:
                raise
            if progress:
                away = f"the orchestrator does not answer, {away_s:.0f} s"
                progress(wire.JobProgress(message=away, time=time.time()))
            await asyncio.sleep(PAUSE_S)
