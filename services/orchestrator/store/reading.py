"""Where the routes that only read get jobs from: the store, or run folders alone."""

from __future__ import annotations

from typing import Protocol

from services.orchestrator.store.lists import Wanted
from shared.wire import Checkpoint, Event, JobList, JobRecord


class Readable(Protocol):
    """The methods raise NotFound for an unknown job."""

    async def get(self, job_id: str) -> JobRecord: ...

    async def list(
        self, after: str | None, limit: int, wanted: Wanted | None = None
    ) -> JobList: ...

    async def status(self, job_id: str) -> str | None:
        """Returns the job's status; None if it is gone."""
        ...

    async def doing(self, job_id: str) -> str | None:
        """Returns what a running job does."""
        ...

    async def events(
        self, job_id: str, after: str, *, block_s: float | None = None, count: int = 1000
    ) -> list[Event]:
        """Returns the events after id `after`; waits up to `block_s` seconds for the first."""
        ...

    async def newest_events(self, job_id: str, before: str | None, limit: int) -> list[Event]:
        """Returns up to `limit` events, newest first, older than event `before`."""
        ...

    async def checkpoints(self, job_id: str) -> list[Checkpoint]: ...
