"""Pages of jobs, and the places of waiting jobs in the queue. And `Readable`: the part of the store
that read-only routes use, which can also be served from run folders alone."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from services.orchestrator.store.records import (
    SUMMARY,
    UnreadableRecord,
    summary_of,
    time_of,
)
from shared.errors import NotFound
from shared.http.gate import caller_name, own_jobs_of
from shared.wire import Checkpoint, Event, JobList, JobRecord, JobSummary, Obstacle

S = TypeVar("S", bound=JobSummary)

CURSOR = re.compile(r"([^:]+):([0-9]{1,10}(?:\.[0-9]{1,20})?)")
"""A job's id and its score among the jobs (Unix seconds). The score finds the place in the list
even if the job was deleted."""


@dataclass(frozen=True)
class JobFilter:
    """The filter of a list: jobs that match every given field. `metadata` are names and values that
    a job must have, None: it must have none; `openai`: it was submitted in OpenAI's shape;
    `by_caller`: the caller's API key submitted it, which excludes jobs of the same name by other
    keys. A key of access "own" sees only its own jobs anyway."""

    status: str | None = None
    name: str | None = None
    metadata: Mapping[str, str] | None = field(default_factory=dict[str, str])
    openai: bool = False
    by_caller: bool = False

    def call(self) -> dict[str, Any]:
        """Returns the arguments of `LIST`."""
        any_metadata = self.metadata is not None and not self.metadata
        return {
            "status": self.status,
            "name": self.name,
            "metadata": None if any_metadata else json.dumps(self.metadata),
            "openai": self.openai or None,
            "submitted_by": caller_name() if self.by_caller else own_jobs_of(),
        }


class Lists:
    """The lists of `Store`, which documents the errors that every method may raise."""

    _call: Callable[..., Awaitable[str]]

    async def list(self, after: str | None, limit: int, wanted: JobFilter | None = None) -> JobList:
        """Returns up to `limit` of the jobs `wanted`, newest first, older than `after`: a job's id,
        or a list's `next_after`, which stays valid when that job is removed. Unreadable records are
        listed by id. Raises NotFound if `after` is neither."""
        job_id, made_at = _cursor(after)
        answer = await self._call(
            "list",
            limit=limit,
            after=job_id,
            after_score=made_at,
            names=SUMMARY,
            **(wanted or JobFilter()).call(),
        )
        if answer == "unknown":
            raise NotFound(f"no job {after!r} to list jobs after")
        page = json.loads(answer)
        summaries: list[JobSummary] = []
        unreadable: list[str] = []
        for job_id, values in page["jobs"] or ():
            fields = dict(zip(SUMMARY, values or (), strict=False))
            present = {name: value for name, value in fields.items() if value is not False}
            try:
                summaries.append(summary_of(job_id, present))
            except UnreadableRecord:
                unreadable.append(job_id)
        return JobList(
            jobs=await self._with_places(summaries),
            next_after=page.get("next_after"),
            unreadable=tuple(unreadable),
        )

    async def _with_places(self, records: Sequence[S]) -> tuple[S, ...]:
        """Returns the records. Waiting jobs, queued or running without a worker, get their place in
        the queue, and why no trainer takes them; running ones get the jobs that share their
        trainer."""
        may_wait = [record.id for record in records if record.status in ("queued", "running")]
        if not may_wait:
            return tuple(records)
        waiting = json.loads(await self._call("waiting", ids=" ".join(may_wait)))
        waits_for = {
            trainer: Obstacle.model_validate(obstacle)
            for trainer, obstacle in sorted(waiting["obstacles"].items())
        }
        beside = {
            job_id: tuple(other for other in jobs if other != job_id)
            for jobs in waiting["sharing"].values()
            for job_id in jobs
        }
        if own_jobs_of():  # the names of other keys' jobs are not shown
            beside, nameless = {}, Obstacle(away="it has other jobs")
            waits_for = {
                trainer: nameless if obstacle.job else obstacle
                for trainer, obstacle in waits_for.items()
            }

        def shown(record: S) -> S:
            if record.id in may_wait and (place := waiting["places"].get(record.id)):
                return record.model_copy(update={"place": place, "waits_for": waits_for})
            if others := beside.get(record.id):
                return record.model_copy(update={"shares_with": others})
            return record

        return tuple(map(shown, records))


def _cursor(after: str | None) -> tuple[str | None, str | None]:
    """Returns the id of the job to list jobs after, and when it was made: a cursor and almost any
    id contain the time. After a deleted job, a list may show jobs again that were made within the
    same second."""
    if after is None:
        return None, None
    if match := CURSOR.fullmatch(after):
        return match[1], match[2]
    time_s = time_of(after)
    return after, None if time_s is None else str(time_s + 2)


class Readable(Protocol):
    """The methods raise NotFound for an unknown job."""

    async def get(self, job_id: str) -> JobRecord: ...

    async def list(
        self, after: str | None, limit: int, wanted: JobFilter | None = None
    ) -> JobList: ...

    async def status(self, job_id: str) -> str | None:
        """Returns the job's status; None if there is no such job any more."""
        ...

    async def doing(self, job_id: str) -> str | None:
        """Returns the activity of a running job, as a sentence."""
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
