"""`/v1/jobs/{job_id}/groups`: groups that were sampled and scored elsewhere. A group is on disk
before it is acknowledged."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from services.orchestrator.data.fitting import tokenizer_stamp
from services.orchestrator.extensions.pushed.checking import (
    Model,
    check_ratio,
    check_versions,
    model_of,
    scored_group,
)
from services.orchestrator.extensions.pushed.queue import Ledger, PushedQueue, Sent
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.store import Store
from shared.errors import Busy, Conflict
from shared.http import codec, rendering
from shared.http.service import Service
from shared.job import Job
from shared.wire import (
    TERMINAL,
    GroupAccepted,
    GroupCounts,
    JobRecord,
    PushedGroup,
    ScoredGroup,
)

FULL_S = 2
"""Seconds after which a refused pusher is to ask again."""

MAX_QUEUES = 64

MAX_MODELS = 8


def add_routes(service: Service, pushing: Pushing) -> None:
    path = "/v1/jobs/{job_id}/groups"

    async def push(job_id: str, request: Request) -> Response:
        """Stores a group of a job with `[environment] kind = "pushed"`, to be trained on in the
        order in which groups came. 429: the job has as many as `max_staleness` allows."""
        data = await request.body()
        kind = rendering.media_type(request, data)
        group = await rendering.reading(len(data), codec.decode, PushedGroup, data, kind)
        return await rendering.render(await pushing.push(job_id, group), request)

    service.body(PushedGroup, "POST", path)
    service.app.add_api_route(
        path, push, methods=["POST"], responses=rendering.answers(GroupAccepted)
    )

    @service.app.get(path)
    async def count_groups(job_id: str) -> GroupCounts:
        """How many pushed groups a job has, and for how many more it has room."""
        return await pushing.counts(job_id)


@dataclass(frozen=True)
class Checked:
    """A pushed group without a fault: as it was sent, and as it is stored."""

    group: PushedGroup
    scored: ScoredGroup
    digest: str


class Pushing:
    """Accepts groups for the jobs of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queues: dict[str, PushedQueue] = {}
        self._models: dict[object, Model] = {}

    async def push(self, job_id: str, group: PushedGroup) -> GroupAccepted:
        """Returns the group's number once it is on disk. Raises BadRequest for a group that cannot
        be trained on, Busy while there is no room, and Conflict for a job that takes no groups."""
        return await self.store(job_id, await self.checked(job_id, group))

    async def checked(self, job_id: str, group: PushedGroup) -> Checked:
        """Returns the group as it is trained on. Raises BadRequest for one that cannot be, and
        Conflict for a job that takes no groups."""
        record = await self.record(job_id)
        return await asyncio.to_thread(self._checked, record, group)

    async def store(self, job_id: str, checked: Checked) -> GroupAccepted:
        """Returns the group's number once it is on disk. Raises Busy while there is no room."""
        record = await self.record(job_id)
        number = await asyncio.to_thread(self._accept, record, self.queue(record), checked)
        return GroupAccepted(job_id=record.id, number=number)

    async def counts(self, job_id: str) -> GroupCounts:
        """Returns how many groups the job has."""
        record = await self.record(job_id)
        return await asyncio.to_thread(self.queue(record).look, partial(counts_of, record))

    async def register(self, record: JobRecord, program: dict[str, Any]) -> tuple[int, str]:
        """Returns the number of a program that pushes to the job, from 0, and its name."""
        return await asyncio.to_thread(self.queue(record).register, program)

    async def registered(self, record: JobRecord) -> list[dict[str, Any]]:
        """Returns the programs that push to the job, by number."""
        return await asyncio.to_thread(self.queue(record).look, lambda found: [*found.programs])

    async def window(self, record: JobRecord) -> int | None:
        """Returns the most tokens of prompt and completion; None if that is not known."""
        return (await asyncio.to_thread(self.model, record.job)).window

    async def record(self, job_id: str) -> JobRecord:
        """Returns the job's record. Raises Conflict for a job of another kind."""
        record = await self._store.get(job_id)
        if not record.job.is_pushed:
            raise Conflict(
                f"job {record.id!r} samples its groups itself; expected a job with [environment] "
                'kind = "pushed"'
            )
        return record

    def _checked(self, record: JobRecord, group: PushedGroup) -> Checked:
        scored = scored_group(group, self.model(record.job))
        check_ratio(group, record.job.training)
        digest = hashlib.sha256(codec.pack(group.model_copy(update={"key": None}))).hexdigest()
        return Checked(group, scored, digest)

    def _accept(self, record: JobRecord, queue: PushedQueue, checked: Checked) -> int:
        RunFolder(Path(record.run_dir)).check_there()
        group = checked.group

        def admit(ledger: Ledger) -> None:
            check_room(record, ledger)
            next_step = counts_of(record, ledger).next_step
            check_versions(group, oldest_version(record, ledger), record.step + 1, next_step)

        sent = Sent(checked.digest, group.key, record.step)
        return queue.accept(checked.scored, sent, admit)

    def queue(self, record: JobRecord) -> PushedQueue:
        """Returns the job's queue, which remembers what it has read."""
        queue = self._queues.pop(record.id, None) or PushedQueue(Path(record.run_dir))
        self._queues[record.id] = queue
        while len(self._queues) > MAX_QUEUES:
            del self._queues[next(iter(self._queues))]
        return queue

    def model(self, job: Job) -> Model:
        """Returns what is known of the job's model."""
        key = (tokenizer_stamp(job), job.max_model_len, repr(job.sampling.template_args))
        if key not in self._models:
            found = model_of(job)
            while len(self._models) >= MAX_MODELS:
                self._models.pop(next(iter(self._models)), None)
            self._models[key] = found
        return self._models[key]


def counts_of(record: JobRecord, ledger: Ledger) -> GroupCounts:
    """Returns the counts of a job's groups. A group of unknown weights has room as if the newest
    weights had sampled it."""
    per_step, ahead = record.job.sampling.prompts_per_step, ledger.num_ahead(record.step)
    trained = ledger.num_trained(record.step)
    room = per_step * (record.job.max_staleness + 1) - ahead
    return GroupCounts(
        job_id=record.id,
        accepted=ledger.num_accepted,
        trained=trained,
        waiting=ledger.num_accepted - ledger.num_dropped - trained,
        dropped=ledger.num_dropped,
        version=record.step,
        next_step=record.step + 1 + ahead // per_step,
        room=0 if record.status in TERMINAL else max(room, 0),
    )


def oldest_version(record: JobRecord, ledger: Ledger) -> int:
    """Returns the oldest version that may have sampled a group which is accepted now."""
    return max(counts_of(record, ledger).next_step - 1 - record.job.max_staleness, 0)


def check_room(record: JobRecord, ledger: Ledger) -> None:
    """Raises Conflict for a job that has ended, and Busy for one that has as many groups as
    `max_staleness` allows."""
    if record.status in TERMINAL:
        raise Conflict(f"job {record.id!r} is {record.status}; expected one that has not ended")
    found = counts_of(record, ledger)
    if not found.room:
        job = record.job
        raise Busy(
            f"job {record.id!r} has {found.waiting} groups that are not trained on, expected fewer "
            f"than {job.sampling.prompts_per_step * (job.max_staleness + 1)}: "
            f"sampling.prompts_per_step {job.sampling.prompts_per_step} times max_staleness "
            f"{job.max_staleness} plus 1; push it again when a step is done",
            retry_after_s=FULL_S,
        )
