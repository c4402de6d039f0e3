"""Many jobs at a time: pages of them, and the places of those that wait."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from services.orchestrator.queue import scripts
from services.orchestrator.queue.connection import Connection
from services.orchestrator.queue.ids import time_of
from services.orchestrator.queue.records import SUMMARY, Unreadable, summary_of
from shared.errors import NotFound
from shared.wire import JobList, JobSummary, Obstacle

S = TypeVar("S", bound=JobSummary)

CURSOR = re.compile(r"([^:]+):([0-9]{1,10}(?:\.[0-9]{1,20})?)")
"""A job's id and its score among the jobs (Unix seconds), by which its place is known when it is
gone."""


@dataclass(frozen=True)
class Wanted:
    """Which jobs a list has: those that fit all that is given. `metadata` are names and values that
    a job has to have, None that it has none; `openai`, that it was submitted in OpenAI's shape."""

    status: str | None = None
    name: str | None = None
    metadata: Mapping[str, str] | None = field(default_factory=dict[str, str])
    openai: bool = False

    def call(self) -> dict[str, Any]:
        """Returns the arguments of `scripts.LIST`."""
        any_metadata = self.metadata is not None and not self.metadata
        return {
            "status": self.status,
            "name": self.name,
            "metadata": None if any_metadata else json.dumps(self.metadata),
            "openai": self.openai or None,
        }


class Lists:
    """Every method raises StoreUnavailable when Redis cannot be reached."""

    def __init__(self, connection: Connection) -> None:
        self._call = connection.call
        self._list = connection.client.register_script(scripts.LIST)
        self._waiting = connection.client.register_script(scripts.WAITING)

    async def page(self, after: str | None, limit: int, wanted: Wanted) -> JobList:
        """Returns up to `limit` of the jobs `wanted`, newest first, older than job `after`. Those
        whose records cannot be read are named. Raises NotFound for what is no job's id or cursor.
        """
        job_id, made_at = _cursor(after)
        answer = await self._call(
            self._list,
            limit=limit,
            after=job_id,
            after_score=made_at,
            names=SUMMARY,
            **wanted.call(),
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
            except Unreadable:
                unreadable.append(job_id)
        return JobList(
            jobs=tuple(await self.with_places(summaries)),
            next_after=page.get("next_after"),
            unreadable=tuple(unreadable),
        )

    async def with_places(self, records: Sequence[S]) -> list[S]:
        """Returns the records; those of jobs that wait, as queued ones do and running ones whose
        worker is gone, say which place they have, and why no trainer takes them."""
        may_wait = [record.id for record in records if record.status in ("queued", "running")]
        if not may_wait:
            return list(records)
        found = json.loads(await self._call(self._waiting, ids=" ".join(may_wait)))
        waits_for = {
            trainer: Obstacle.model_validate(obstacle)
            for trainer, obstacle in sorted(found["obstacles"].items())
        }
        return [
            record.model_copy(update={"place": place, "waits_for": waits_for})
            if record.id in may_wait and (place := found["places"].get(record.id))
            else record
            for record in records
        ]


def _cursor(after: str | None) -> tuple[str | None, str | None]:
    """Returns the id of the job to list jobs after, and when it was made: a cursor says it, and
    almost any id. A list that begins where a job was that is gone may then show again what was made
    within the second after it."""
    if after is None:
        return None, None
    if found := CURSOR.fullmatch(after):
        return found[1], found[2]
    time_s = time_of(after)
    return after, None if time_s is None else str(time_s + 2)
