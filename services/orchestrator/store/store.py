"""Jobs in Redis. READ FIRST. A job's hash is the only authoritative copy. Every change is one
atomic script (keys.py), whose effect a retry does not repeat. The methods for workers are in
leases.py.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path

from services.orchestrator.store import identity, keys
from services.orchestrator.store.connection import Connection, StoreUnavailable
from services.orchestrator.store.folder import Note
from services.orchestrator.store.leases import WorkerSide
from services.orchestrator.store.lists import Lists
from services.orchestrator.store.records import (
    FoundRun,
    Submission,
    UnreadableRecord,
    check_event_id,
    event_of,
    fields_of,
    fingerprint_of,
    is_first_id,
    note_of,
    record_of,
    state_of,
)
from services.orchestrator.store.registrations import (
    Removals,
    SamplerRegistrations,
    TrainerRegistrations,
    Use,
    uses_below,
)
from services.orchestrator.tasks import stop
from shared.errors import BadRequest, Busy, Conflict, Failed, NotFound, no_job
from shared.http.gate import caller_name, own_jobs_of
from shared.job import JOB_ID, Job
from shared.settings import MAX_KEY_JOBS
from shared.wire import (
    TERMINAL,
    Checkpoint,
    Event,
    JobDeleted,
    JobRecord,
    JobState,
    RecoveredJob,
)

KEY_TTL_S = 24 * 3600
"""Seconds that an idempotency key or a job's deletion is remembered."""

MAX_WITHDRAWN = 1000
"""Submissions that an API key may withdraw within KEY_TTL_S: a key of a submission has up to 1,000
characters."""

KEEP_JOBS = 1000
"""How many ended jobs are kept, with their events: a few GB of Redis. Others are forgotten, the
oldest of the API key with most of them first; their run folders stay."""

KEEP_EVENTS = 20_000
"""How many of the newest events of each job are kept, at least: enough for some 15,000 steps."""

QUOTA_RETRY_S = 3600
"""Retry-After of a submission beyond the quota: jobs take hours, so a client that waits for less
shows the error at once."""

WITHDRAWN = "withdrawn"
"""The answer for an idempotency key whose submission was withdrawn."""

REQUIRED = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}


class Store(WorkerSide, Lists):
    """All of the orchestrator's state, with the API's operations on it. `samplers` are the
    registered samplers, `trainers` the registered trainers of all workers, and `removals` the
    removed uploaded files. Every method raises StoreUnavailable when Redis cannot be reached, and
    StoreEmptied when it is not the jobs' Redis. An API key may have `max_key_jobs` jobs that have
    not ended."""

    def __init__(self, url: str, *, max_key_jobs: int = MAX_KEY_JOBS) -> None:
        self._max_key_jobs = max_key_jobs
        limits = {"keep_jobs": str(KEEP_JOBS), "keep_events": str(KEEP_EVENTS)}
        self._connection = connection = Connection(url, limits)
        super().__init__(connection)
        self.samplers = SamplerRegistrations(connection)
        self.trainers = TrainerRegistrations(connection)
        self.removals = Removals(connection, KEY_TTL_S)
        self._deciding = asyncio.Lock()  # held while the Redis to use is decided
        self._watch: asyncio.Task[None] | None = None  # checks that it still has the jobs
        self._redis, self._followers = connection.client, connection.followers
        self._do, self._hash = connection.do, connection.hash

    async def open(self) -> None:
        """Checks that Redis is durable, and that every waiting job is in the queue. From then on a
        Redis that lost its data is not used. Raises Unavailable if Redis cannot be reached,
        BadRequest if its configuration may lose data."""
        for key, wanted in REQUIRED.items():
            value = (await self._do(self._redis.config_get(key))).get(key)
            if value != wanted:
                raise BadRequest(
                    f"Redis has {key} {value!r}, so it can lose jobs; set '{key} {wanted}' and "
                    "start again"
                )
        self._connection.accept(await identity.identify(self._connection))
        await self._call("open")

    async def check(self, runs_dir: Path) -> str | None:
        """Returns why this Redis must not be used: it does not have the jobs of `runs_dir`; None if
        it has. Then, or once the jobs are taken to another Redis, it is not used."""
        async with self._deciding:
            refused = self._connection.refused
            usable = await identity.check(self._connection, runs_dir)
            if refused and not usable:
                await self._call("open")
            self._watch = self._watch or asyncio.create_task(
                identity.watch(self._connection, runs_dir, self._deciding)
            )
            return usable

    def unmounted(self, runs_dir: Path) -> str | None:
        """Returns why `runs_dir` is not the folder of the jobs' run folders; None if it is. Waits
        for its disk without limit."""
        try:
            return identity.unmounted(self._connection, runs_dir)
        except Failed as error:
            return error.detail

    @property
    def identity(self) -> str | None:
        """The identity of the jobs' Redis."""
        return self._connection.identity

    async def close(self) -> None:
        if self._watch:
            await stop(self._watch)
        await self._connection.close()

    async def why_unusable(self) -> str | None:
        """Returns why Redis lets no job be accepted, shown or run: it is unreachable, or is not the
        jobs' Redis. None if it can be used."""
        try:
            return await self._connection.differs()
        except StoreUnavailable as error:
            return error.detail

    async def submit(self, submission: Submission) -> JobRecord:
        """Returns the record of the queued job, or of the job already submitted with the key. The
        job is in Redis, on disk, when this returns. Raises Conflict for a key that was used for
        another job or withdrawn, BadRequest for an uploaded file that was removed meanwhile, and
        Busy for an API key that has as many jobs as it may."""
        fingerprint, key = submission.fingerprint, submission.key
        answer = await self._call(
            "submit",
            id=submission.id,
            key=key or "",
            key_ttl_s=KEY_TTL_S,
            fingerprint=fingerprint,
            fields=submission.fields,
            max_jobs=self._max_key_jobs,
        )
        if answer == "full" and submission.by:
            raise self._too_many_jobs(submission.by.name)
        if answer == "taken":
            raise Conflict(f"there is a job {submission.id!r} already; submit again for another id")
        what, _, file = answer.partition(" ")
        if what == "removed":
            raise BadRequest(f"the uploaded file {file!r} was removed while the job was submitted")
        return await self.get(_same(key, answer, fingerprint))

    async def submitted(self, job: Job, key: str | None) -> JobRecord | None:
        """Returns the record of the job if it was submitted with the key, None if not. Raises
        Conflict for a key that was used for another job or withdrawn."""
        answer = await self._do(self._redis.get(keys.KEY + key)) if key else None
        return await self.get(_same(key, answer, fingerprint_of(job))) if answer else None

    async def check_quota(self) -> None:
        """Raises Busy if `submit` would, so that a job is not checked in vain."""
        if name := caller_name():
            range_ = f"[{name}/", f"({name}0"  # "0" is the character after "/"
            num = await self._do(self._redis.zlexcount(keys.UNENDED, *range_))
            if num >= self._max_key_jobs:
                raise self._too_many_jobs(name)

    def _too_many_jobs(self, name: str) -> Busy:
        return Busy(
            f"API key {name!r} has {self._max_key_jobs} jobs that have not ended, paused "
            "ones included, and may have no more (setting HONE_MAX_KEY_JOBS): cancel some, or "
            "submit again when some have ended",
            retry_after_s=QUOTA_RETRY_S,
        )

    async def withdraw(self, key: str) -> str | None:
        """Withdraws the key: from now on no job can be submitted with it. Returns the id of the job
        that was submitted with the key, None if none was. Raises Busy for an API key that has
        withdrawn MAX_WITHDRAWN within a day: each is remembered so long."""
        by, most = caller_name() or None, MAX_WITHDRAWN
        answer = await self._call("withdraw", key=key, key_ttl_s=KEY_TTL_S, by=by, most=most)
        if answer == "full":
            raise Busy(
                f"API key {by!r} has withdrawn {most} submissions within {KEY_TTL_S // 3600} hours "
                "and may withdraw no more: cancel the job once it is submitted",
                retry_after_s=QUOTA_RETRY_S,
            )
        return None if answer == WITHDRAWN else answer.partition(" ")[0]

    async def get(self, job_id: str) -> JobRecord:
        """Raises NotFound, also where the caller's key may not see the job, or UnreadableRecord for
        a record that this version cannot read."""
        (record,) = await self._with_places([record_of(job_id, await self._fields(job_id))])
        if (owner := own_jobs_of()) and record.submitted_by != owner:
            raise no_job(job_id)
        return record

    async def submitted_by(self, job_id: str) -> str | None:
        """Returns the name of the key that submitted the job; "" for HONE_TOKEN, None for no
        job."""
        fields = await self._hash(keys.job(job_id))
        return fields.get("submitted_by", "") if fields else None

    async def note(self, job_id: str) -> Note:
        """Returns the part of the record that the run folder keeps. Raises as `get`."""
        return note_of(job_id, await self._fields(job_id))

    async def state(self, job_id: str) -> JobState:
        """Returns the job's state. Parses only these fields, so that an unreadable record is no
        obstacle."""
        return state_of(job_id, await self._fields(job_id))

    async def _fields(self, job_id: str) -> dict[str, str]:
        """Returns the job's hash. Raises NotFound."""
        if fields := await self._hash(keys.job(_known(job_id))):
            return fields
        raise no_job(job_id)

    async def status(self, job_id: str) -> str | None:
        """Returns the job's status, or None if there is no such job (any more)."""
        return await self._do(self._redis.hget(keys.job(job_id), "status"))

    async def doing(self, job_id: str) -> str | None:
        """Returns the activity of a running or waiting job; None if it is not known, or there is no
        such job."""
        try:
            record = await self.get(job_id)
        except (NotFound, UnreadableRecord):
            return None
        if record.place is not None:
            why = [f"the trainer {at} {each.why}" for at, each in record.waits_for.items()]
            return "; ".join([f"{record.status}, place {record.place} in the queue", *why])
        return record.doing if record.status == "running" else None

    async def cut_off(self) -> dict[str, str]:
        """Returns the trainer of each interrupted job (begun, without a worker now), by id. A
        resumed job counts only once it has begun again."""
        return json.loads(await self._call("cut_off"))

    async def cancel(self, job_id: str) -> JobState:
        """Returns the state of the job, which is cancelled now if it was queued or paused and soon
        if it runs. Cancelling again changes nothing. Raises Conflict if the job has ended
        otherwise."""
        before = await self._call("cancel", id=_known(job_id))
        if before in ("succeeded", "failed"):
            raise Conflict(
                f"job {job_id!r} has {before}; only a queued, running or paused job can be "
                "cancelled"
            )
        return await self.state(job_id)

    async def pause(self, job_id: str, why: str = "") -> JobState:
        """Returns the state of the job, which is paused now if it was queued and soon if it runs.
        `why` is the error that is shown if it is paused now; without one it was requested. Pausing
        again changes nothing. A program's model that was preempted by another job counts as paused
        on request from now on. Raises Conflict if the job has ended."""
        before = await self._call("pause", id=_known(job_id), why=why)
        if before in TERMINAL:
            raise Conflict(
                f"job {job_id!r} {_has(before)}; only a queued or running job can be paused"
            )
        return await self.state(job_id)

    async def resume(self, job_id: str, job: Job | None = None) -> JobState:
        """Returns the state of the job, which is queued again if it was paused, as the changed
        `job` if given. A pause that was requested and has not happened yet is called off. Raises
        Conflict if the job has ended, or if it runs and `job` is given."""
        fields = fields_of(job) if job else None
        before = await self._call("resume", id=_known(job_id), fields=fields)
        if job and before in ("queued", "running"):
            raise Conflict(f"job {job_id!r} is {before}; pause it before you change it")
        if before in TERMINAL:
            raise Conflict(f"job {job_id!r} {_has(before)}; only a paused job can be resumed")
        return await self.state(job_id)

    async def resume_preempted(self, job_id: str) -> None:
        """Queues the job again if it was preempted, and has not been paused since."""
        await self._call("resume", id=_known(job_id), preempted=True)

    async def ended_run_dir(self, job_id: str) -> Path | None:
        """Returns the run folder of an ended job, None if there is no such job (any more). Raises
        Conflict for a job that has not ended."""
        try:
            fields = await self._hash(keys.job(_known(job_id)))
        except UnreadableRecord:  # there is no record; `delete` removes what remains
            return None
        if "status" in fields and fields["status"] not in TERMINAL:
            raise _not_ended(job_id, fields["status"])
        return Path(fields["run_dir"]) if "run_dir" in fields else None

    async def delete(self, job_id: str) -> JobDeleted:
        """Forgets an ended job: record, events and idempotency key. Deleting again changes nothing.
        Raises Conflict for a job that has not ended."""
        before = await self._call("delete", id=_known(job_id), deleted_ttl_s=KEY_TTL_S)
        if not before:
            raise no_job(job_id)
        if before != "deleted":
            raise _not_ended(job_id, before)
        return JobDeleted(id=job_id)

    async def recover(self, runs: Sequence[FoundRun], runs_dir: Path) -> list[RecoveredJob]:
        """Makes a record for each run folder whose job has none, and notes this Redis as the Redis
        of the jobs in `runs_dir`."""
        async with self._deciding:
            return await identity.rebuild(self._connection, runs, runs_dir, KEY_TTL_S)

    async def events(
        self, job_id: str, after: str, *, block_s: float | None = None, count: int = 1000
    ) -> list[Event]:
        """Returns the events after id `after` ("0" for all); waits up to `block_s` seconds for the
        first. Raises BadRequest for an invalid event id."""
        check_event_id(after, "after")
        block = None if block_s is None else max(int(block_s * 1000), 1)
        client = self._redis if block is None else self._followers
        streams = await self._do(
            client.xread({keys.events(job_id): after}, count=count, block=block)
        )
        return [event_of(job_id, id, fields) for id, fields in (streams[0][1] if streams else [])]

    async def newest_events(self, job_id: str, before: str | None, limit: int) -> list[Event]:
        """Returns up to `limit` events, newest first, older than event `before`."""
        if before and is_first_id(before):
            return []  # no id comes before it
        latest = f"({before}" if before else "+"
        entries = await self._do(
            self._redis.xrevrange(keys.events(job_id), max=latest, min="-", count=limit)
        )
        return [event_of(job_id, id, fields) for id, fields in entries]

    async def ended_ids(self) -> list[str]:
        """Returns the ids of the ended jobs, the latest first."""
        return await self._do(self._redis.zrevrange(keys.ENDED, 0, -1))

    async def checkpoints(self, job_id: str) -> list[Checkpoint]:
        """Returns all checkpoints that were ever reported, by step."""
        entries = [
            json.loads(text) for text in (await self._hash(keys.checkpoints(job_id))).values()
        ]
        checkpoints = [Checkpoint.model_validate(data, extra="ignore") for data in entries]
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)

    async def models_below(self, folder: Path) -> Sequence[Use]:
        """Returns the models in `folder`, or below, of jobs that have not ended. Links are
        followed."""
        models: Sequence[tuple[str, str, str]] = json.loads(await self._call("used_models"))
        return await asyncio.to_thread(uses_below, folder, models)


def _known(job_id: str) -> str:
    """Returns the id; raises NotFound for an invalid id."""
    if not re.fullmatch(JOB_ID, job_id):
        raise no_job(job_id)
    return job_id


def _same(key: str | None, answer: str, fingerprint: str) -> str:
    """Returns the id of the key's job. Raises Conflict if the key was used for another job."""
    if answer == WITHDRAWN:
        raise Conflict(f"the submission with Idempotency-Key {key!r} was withdrawn; use a new key")
    job_id, known = answer.split(" ")
    if known != fingerprint:
        raise Conflict(
            f"Idempotency-Key {key!r} was used for job {job_id!r} with other content; use a new "
            "key",
            code="body_differs",
        )
    return job_id


def _not_ended(job_id: str, status: str) -> Conflict:
    return Conflict(f"job {job_id!r} is {status}; cancel it before you delete it")


def _has(status: str) -> str:
    return f"was {status}" if status == "cancelled" else f"has {status}"
