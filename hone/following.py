"""The events of a job as they happen, until it has ended. A dropped connection is taken up again
where it broke."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from hone.background import Background
from shared.client import Client
from shared.errors import Unavailable
from shared.wire import Event, JobProgress

RECONNECT_S = 60.0
"""How long on end nothing may answer."""

PAUSE_S = 1.0


def follow(
    client: Client,
    background: Background,
    job_id: str,
    after: str,
    progress: Callable[[JobProgress], None] | None,
) -> Iterator[Event]:
    """Yields what happens after event `after`. `progress` hears every two seconds in which nothing
    happens what the job is at, and that the orchestrator does not answer."""
    last, lost_at = after, None
    path = f"/v1/jobs/{job_id}/events{'?progress=true' if progress else ''}"
    while True:
        try:
            for id, kind, data in background.iterate(client.events(path, last_id=last)):
                lost_at = None
                if kind == "end":
                    return
                if kind == "progress":
                    if progress:
                        progress(JobProgress.model_validate_json(data))
                    continue
                last = id
                yield Event.model_validate_json(data)
        except Unavailable:
            lost_at = lost_at or time.monotonic()
            away_s = time.monotonic() - lost_at
            if away_s > RECONNECT_S:
                raise
            if progress:
                away = f"the orchestrator does not answer, {away_s:.0f} s"
                progress(JobProgress(message=away, time=time.time()))
            time.sleep(PAUSE_S)
