"""Jobs in Redis. Truth is a job's hash; every change is one atomic script (scripts.py), which a
retry does not repeat. The keys are in keys.py.

A worker that takes a job gets a lease on one trainer, which expires unless `beat` renews it. With
the lease comes an attempt, a number that grows with every lease given to anybody. A worker that
shows an old one, or one that has expired, is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import RedisError, ResponseError

from services.orchestrator.queue import keys, scripts
from services.orchestrator.queue.ids import new_job_id
from shared.errors import BadRequest, Conflict, Failed, NotFound, Unavailable
from shared.job import JOB_ID, Job
from shared.logs import get_logger
from shared.wire import (
    TERMINAL,
    Checkpoint,
    Event,
    JobDeleted,
    JobList,
    JobRecord,
    JobState,
    RegisteredSampler,
    Registration,
)

SCHEMA = 1
"""Version of what is written into a job's hash. Readers ignore fields that they do not know."""

MAX_TRIES = 20
"""Attempts in a row, without a step done that was not done before, after which a job pauses: it
probably kills its workers itself."""

PAUSED_ON_REQUEST = "paused on request"

SOCKET_TIMEOUT_S = 30.0
"""More than a follower waits for events, and than a slow disk delays an answer."""

RETRIES = 6
"""With SOCKET_TIMEOUT_S below scripts.CALL_TTL_S in all."""

MAX_CONNECTIONS = 64
"""For everything but heartbeats and followers. A caller that finds none free waits for one."""

MAX_BEAT_CONNECTIONS = 2
"""Heartbeats have connections of their own, so that nobody keeps them waiting."""

MAX_FOLLOWERS = 512
"""Clients that follow jobs' events at a time. Each holds a connection while it waits."""

KEY_TTL_S = 24 * 3600

REGISTRATION_S = 15.0
"""Seconds that a registration lasts; a sampler renews it after a third of that. Long enough for a
pause of its process; what it does not answer meanwhile, others sample."""

REQUIRED = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}

EVENT_ID = re.compile(r"([0-9]{1,20})(?:-([0-9]{1,20}))?")
MAX_ID_PART = 2**64 - 1
"""An event's id is two whole numbers of 64 bits: Unix milliseconds, and one that counts."""

Asked = Literal["cancel", "pause"]


class StoreUnavailable(Unavailable):
    """Redis is away. Whoever works on a job stops; the job goes on once Redis is back."""


class LeaseLost(Exception):
    """The lease expired or another worker took the job over; this one must stop at once and change
    nothing more."""


class Unreadable(Failed):
    """What is stored of a job is not what this version of Hone can read."""


@dataclass(frozen=True)
class Lease:
    """The right to work on a job with a trainer, for `lease_s` seconds from each heartbeat.
    `attempt` fences: it is larger than that of any lease given before."""

    job_id: str
    attempt: int
    trainer: str
    lease_s: float


class Store:
    """All of the orchestrator's state. Every method raises StoreUnavailable when Redis cannot be
    reached. Of the jobs that ended the newest `keep_jobs` are kept, and of each job the newest
    `keep_events` events or some more."""

    def __init__(self, url: str, *, keep_jobs: int = 1000, keep_events: int = 20_000) -> None:
        self._limits = {"keep_jobs": str(keep_jobs), "keep_events": str(keep_events)}
        patient = Retry(ExponentialBackoff(cap=2.0, base=0.1), retries=RETRIES)
        self._redis = _client(url, MAX_CONNECTIONS, patient)
        self._beats = _client(url, MAX_BEAT_CONNECTIONS, Retry(NoBackoff(), retries=0))
        self._followers = _client(url, MAX_FOLLOWERS, patient)
        self._submit = self._redis.register_script(scripts.SUBMIT)
        self._take = self._redis.register_script(scripts.TAKE)
        self._beat = self._beats.register_script(scripts.BEAT)
        self._report = self._redis.register_script(scripts.REPORT)
        self._halt = self._redis.register_script(scripts.HALT)
        self._pause = self._redis.register_script(scripts.PAUSE)
        self._resume = self._redis.register_script(scripts.RESUME)
        self._cancel = self._redis.register_script(scripts.CANCEL)
        self._delete = self._redis.register_script(scripts.DELETE)
        self._register = self._redis.register_script(scripts.REGISTER)
        self._unregister = self._redis.register_script(scripts.UNREGISTER)
        self._registered = self._redis.register_script(scripts.REGISTERED)

    async def open(self) -> None:
        """Checks that Redis keeps what it accepts, and that every job that waits is in the queue.
        Raises Unavailable if Redis cannot be reached, BadRequest if it is set up to lose data."""
        for key, wanted in REQUIRED.items():
            found = (await self._do(self._redis.config_get(key))).get(key)
            if found != wanted:
                raise BadRequest(
                    f"Redis has {key} {found!r}, so it can lose jobs; set '{key} {wanted}' and "
                    "start again"
                )
        await self._call(self._redis.register_script(scripts.OPEN))

    async def close(self) -> None:
        for client in (self._redis, self._beats, self._followers):
            await client.aclose()

    async def ping(self) -> None:
        await self._do(self._redis.ping())

    # --- by the API

    async def submit(self, job: Job, runs_dir: Path, key: str | None) -> JobRecord:
        """Returns the queued job's record, or that of the job already submitted with `key`. The job
        is in Redis, on disk, when this returns; its folder will be in `runs_dir`. Raises Conflict
        for a key that came with another job before."""
        job_id = new_job_id(job.name)
        spec = job.model_dump_json()
        fingerprint = hashlib.sha256(spec.encode()).hexdigest()
        fields = {
            "schema": SCHEMA,
            "id": job_id,
            "name": job.name,
            "created_at": time.time(),
            "steps": job.steps,
            "step": 0,
            "run_dir": (runs_dir / job_id).resolve(),
            "job": spec,
            "key": key,
        }
        answer = await self._call(
            self._submit,
            id=job_id,
            key=key or "",
            key_ttl_s=KEY_TTL_S,
            fingerprint=fingerprint,
            fields=fields,
        )
        if answer == "taken":
            raise Conflict(f"there is a job {job_id!r} already; submit again for another id")
        known_id, known = answer.split(" ")
        if known != fingerprint:
            raise Conflict(
                f"Idempotency-Key {key!r} was used for job {known_id!r} with other content; use a "
                "new key",
                code="body_differs",
            )
        return await self.get(known_id)

    async def get(self, job_id: str) -> JobRecord:
        """Raises NotFound, or Unreadable for a record that this version cannot read."""
        fields = await self._hash(keys.job(job_id)) if re.fullmatch(JOB_ID, job_id) else {}
        if not fields:
            raise _no_job(job_id)
        return _record(job_id, fields)

    async def status(self, job_id: str) -> str | None:
        """Returns the job's status, or None if there is no such job (any more)."""
        return await self._do(self._redis.hget(keys.job(job_id), "status"))

    async def list(self, after: str | None, limit: int) -> JobList:
        """Returns up to `limit` jobs, newest first, older than job `after`. Those whose records
        cannot be read are named."""
        rank = await self._do(self._redis.zrevrank(keys.JOBS, after)) if after else -1
        if rank is None:
            raise NotFound(f"no job {after!r} to list jobs after")
        ids = await self._do(self._redis.zrevrange(keys.JOBS, rank + 1, rank + limit + 1))
        shown = ids[:limit]
        records: list[JobRecord] = []
        unreadable: list[str] = []
        for job_id in shown:
            try:
                records.append(await self.get(job_id))
            except NotFound:  # deleted since
                continue
            except Unreadable:
                unreadable.append(job_id)
        return JobList(
            jobs=tuple(records),
            next_after=shown[-1] if len(ids) > limit else None,
            unreadable=tuple(unreadable),
        )

    async def cancel(self, job_id: str) -> JobState:
        """Returns the state of the job, which is cancelled now if it was queued or paused and soon
        if it runs. Cancelling twice is cancelling once. Raises Conflict if it has ended
        otherwise."""
        before = await self._call(self._cancel, id=_known(job_id))
        if before in ("succeeded", "failed"):
            raise Conflict(
                f"job {job_id!r} has {before}; only a queued, running or paused job can be "
                "cancelled"
            )
        return await self._state(job_id)

    async def pause(self, job_id: str) -> JobState:
        """Returns the state of the job, which is paused now if it was queued and soon if it runs.
        Pausing twice is pausing once. Raises Conflict if it has ended."""
        before = await self._call(self._pause, id=_known(job_id), paused=PAUSED_ON_REQUEST)
        if before in TERMINAL:
            raise Conflict(
                f"job {job_id!r} {_has(before)}; only a queued or running job can be paused"
            )
        return await self._state(job_id)

    async def resume(self, job_id: str, job: Job | None = None) -> JobState:
        """Returns the state of the job, which is queued again if it was paused, to go on as `job`
        if given; a pause that was asked for and has not happened yet is called off. Raises Conflict
        if it has ended, or runs and was to change."""
        fields = {"job": job.model_dump_json(), "steps": job.steps} if job else None
        before = await self._call(self._resume, id=_known(job_id), fields=fields)
        if job and before in ("queued", "running"):
            raise Conflict(f"job {job_id!r} is {before}; pause it before you change it")
        if before in TERMINAL:
            raise Conflict(f"job {job_id!r} {_has(before)}; only a paused job can be resumed")
        return await self._state(job_id)

    async def ended_run_dir(self, job_id: str) -> Path | None:
        """Returns the run folder of an ended job, None if there is no such job (any more). Raises
        Conflict for a job that has not ended."""
        try:
            fields = await self._hash(keys.job(_known(job_id)))
        except Unreadable:  # no record at all; `delete` removes what is there
            return None
        if "status" in fields and fields["status"] not in TERMINAL:
            raise _not_ended(job_id, fields["status"])
        return Path(fields["run_dir"]) if "run_dir" in fields else None

    async def delete(self, job_id: str) -> JobDeleted:
        """Forgets an ended job: record, events and idempotency key. Deleting twice is deleting
        once. Raises Conflict for a job that has not ended."""
        before = await self._call(self._delete, id=_known(job_id), deleted_ttl_s=KEY_TTL_S)
        if not before:
            raise _no_job(job_id)
        if before != "deleted":
            raise _not_ended(job_id, before)
        return JobDeleted(id=job_id)

    async def events(
        self, job_id: str, after: str, *, block_s: float | None = None, count: int = 1000
    ) -> list[Event]:
        """Returns the events after id `after` ("0" for all); waits up to `block_s` seconds for the
        first. Raises BadRequest for what is not an event's id."""
        check_event_id(after, "after")
        block = None if block_s is None else max(int(block_s * 1000), 1)
        client = self._redis if block is None else self._followers
        streams = await self._do(
            client.xread({keys.events(job_id): after}, count=count, block=block)
        )
        return [_event(job_id, id, fields) for id, fields in (streams[0][1] if streams else [])]

    async def checkpoints(self, job_id: str) -> list[Checkpoint]:
        """Returns all checkpoints that were ever reported, by step."""
        found = [json.loads(text) for text in (await self._hash(keys.checkpoints(job_id))).values()]
        checkpoints = [Checkpoint.model_validate(data, extra="ignore") for data in found]
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)

    # --- by samplers

    async def register(self, replica: str, registration: Registration) -> RegisteredSampler:
        """Registers a sampler for REGISTRATION_S seconds. Raises Conflict while another one, at
        another URL, has the name."""
        text = registration.model_dump_json()
        lease_ms = int(REGISTRATION_S * 1000)
        answer = await self._call(
            self._register, replica=replica, registration=text, lease_ms=lease_ms
        )
        if answer != "ok":
            raise Conflict(
                f"sampler {replica!r} is registered at {answer}, got {registration.url}; give each "
                "sampler a name of its own (HONE_ROLLOUT_REPLICA), or wait until the lease of the "
                f"other one ends ({REGISTRATION_S:g} s)"
            )
        return _registered(replica, text, lease_ms)

    async def unregister(self, replica: str) -> None:
        await self._call(self._unregister, replica=replica)

    async def samplers(self) -> list[RegisteredSampler]:
        """Returns the samplers whose registration has not expired, by name."""
        found = json.loads(await self._call(self._registered))
        return [_registered(*each) for each in sorted(found)]

    async def sampler_urls(self) -> list[str]:
        return [sampler.url for sampler in await self.samplers()]

    # --- by a worker

    async def take(
        self, owner: str, trainer: str, lease_s: float, samplers: Sequence[str] = ()
    ) -> Lease | None:
        """Returns a lease on `trainer`, `samplers` and a job, if all are free and a job waits: the
        first in the queue that no worker has. A job that was cut off keeps its place, so it goes on
        before others begin."""
        answer = await self._call(
            self._take,
            owner=owner,
            trainer=trainer,
            samplers=" ".join(samplers),
            lease_ms=int(lease_s * 1000),
            max_tries=MAX_TRIES,
        )
        if answer == "emptied":
            get_logger().error("Redis was emptied: the jobs it had are not known any more")
        if answer in ("", "emptied"):
            return None
        attempt, job_id = answer.split(" ")
        return Lease(job_id, int(attempt), trainer, lease_s)

    async def beat(self, lease: Lease) -> Asked | None:
        """Renews the lease; returns what was asked for, if anything. Tries once, for as long as the
        caller waits. Raises LeaseLost."""
        answer = await self._call(
            self._beat, lease_ms=int(lease.lease_s * 1000), trainer=lease.trainer, **_by(lease)
        )
        if answer == "lost":
            raise LeaseLost(lease.job_id)
        asked: dict[str, Asked] = {"cancel": "cancel", "pause": "pause"}
        return asked.get(answer)

    async def halt(self, lease: Lease, why: str | None) -> None:
        """Gives the lease back. The job is paused for the reason `why`. Without one it is paused if
        that was asked for, and else queued again where it was. If cancelling was asked for, it is
        cancelled. Raises LeaseLost."""
        await self._by_worker(self._halt, lease, why=why, paused=PAUSED_ON_REQUEST)

    async def report(
        self,
        lease: Lease,
        type: str,
        message: str,
        data: dict[str, Any] | None = None,
        *,
        level: str = "info",
        missing_only: bool = False,
        **fields: Any,
    ) -> None:
        """Adds an event and sets fields of the record (None is left alone), both or neither. With
        `missing_only` does nothing if `data["step"]` has an event of the type already. Raises
        LeaseLost."""
        data = data or {}
        await self._by_worker(
            self._report,
            lease,
            type=type,
            level=level,
            message=message,
            data=json.dumps(data),
            step=data.get("step"),
            missing_only=missing_only or None,
            fields=fields,
        )

    async def _by_worker(self, script: Any, lease: Lease, **arguments: Any) -> None:
        if await self._call(script, **_by(lease), **arguments) == "lost":
            raise LeaseLost(lease.job_id)

    # --- Redis

    async def _call(self, script: Any, **arguments: Any) -> str:
        """Runs the script. Redis's client sends it again, the same call, where its connection
        breaks."""
        call = _texts({"now": time.time(), **self._limits, **arguments})
        key = keys.CALL + secrets.token_hex(12)
        return await self._do(script(keys=[key], args=[json.dumps(call)]))

    async def _state(self, job_id: str) -> JobState:
        """Reads no more of the record than it returns."""
        fields = await self._hash(keys.job(job_id))
        if not fields:
            raise _no_job(job_id)
        try:
            return JobState.model_validate(fields, extra="ignore")
        except ValueError as error:
            raise _unreadable(job_id, fields, error) from error

    async def _hash(self, key: str) -> dict[str, str]:
        """Returns the hash; raises Unreadable for a key that is not a hash."""
        try:
            return await self._redis.hgetall(key)
        except ResponseError as error:
            raise Unreadable(f"{key!r} in Redis is not what Hone keeps there: {error}") from error
        except RedisError as error:
            raise _unavailable(error) from error

    async def _do(self, command: Any) -> Any:
        try:
            return await command
        except RedisError as error:
            raise _unavailable(error) from error


def check_event_id(id: str, name: str) -> None:
    """Raises BadRequest, naming the parameter, for what Redis would not take for an event's id."""
    found = EVENT_ID.fullmatch(id)
    if not found or any(int(part or 0) > MAX_ID_PART for part in found.groups()):
        raise BadRequest(f"{name} is {id!r}; expected an event's id such as '1763700000000-0'")


def _client(url: str, max_connections: int, retry: Retry) -> Any:
    pool = redis.BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=SOCKET_TIMEOUT_S,
        decode_responses=True,
        retry=retry,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=5,
    )
    return redis.Redis.from_pool(pool)


def _by(lease: Lease) -> dict[str, Any]:
    return {"id": lease.job_id, "attempt": lease.attempt}


def _texts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a script takes: texts, in tables of one level; no None."""
    return {name: _text(value) for name, value in values.items() if value is not None}


def _text(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _field(value) for name, value in value.items() if value is not None}
    return _field(value)


def _field(value: Any) -> str:
    """Returns the value as a hash keeps it. A lone surrogate, which is no text, becomes `?`."""
    if isinstance(value, dict | Sequence) and not isinstance(value, str):
        return json.dumps(value)
    return str(value).encode(errors="replace").decode()


def _known(job_id: str) -> str:
    """Returns the id; raises NotFound for what cannot be one."""
    if not re.fullmatch(JOB_ID, job_id):
        raise _no_job(job_id)
    return job_id


def _no_job(job_id: str) -> NotFound:
    return NotFound(f"no job {job_id!r}; GET /v1/jobs lists them")


def _not_ended(job_id: str, status: str) -> Conflict:
    return Conflict(f"job {job_id!r} is {status}; cancel it before you delete it")


def _has(status: str) -> str:
    return f"was {status}" if status == "cancelled" else f"has {status}"


def _unavailable(error: RedisError) -> StoreUnavailable:
    return StoreUnavailable(f"Redis cannot be used: {error}; check that it runs at HONE_REDIS_URL")


def _record(job_id: str, fields: dict[str, str]) -> JobRecord:
    try:
        shown: dict[str, Any] = {**fields, "job": json.loads(fields["job"])}
        if "summary" in fields:
            shown["summary"] = json.loads(fields["summary"])
        return JobRecord.model_validate(shown, extra="ignore")
    except (KeyError, ValueError) as error:  # ValueError is also pydantic's and json's
        raise _unreadable(job_id, fields, error) from error


def _unreadable(job_id: str, fields: dict[str, str], error: Exception) -> Unreadable:
    return Unreadable(
        f"the record of job {job_id!r} (schema {fields.get('schema', '0')}) cannot be read by "
        f"this version of Hone (schema {SCHEMA}): {_first_line(error)}; use the version that "
        f"wrote it, or `hone cancel {job_id}` and `hone rm {job_id}`"
    )


def _event(job_id: str, id: str, fields: dict[str, str]) -> Event:
    """Returns the event; one that cannot be read is shown as such, at its place."""
    try:
        shown = {**fields, "id": id, "job_id": job_id, "data": json.loads(fields["data"])}
        return Event.model_validate(shown, extra="ignore")
    except (KeyError, ValueError) as error:
        message = f"this event cannot be read by this version of Hone: {_first_line(error)}"
        time_s = int(id.split("-")[0]) / 1000
        return Event(
            id=id, job_id=job_id, time=time_s, type="log", level="warning", message=message
        )


def _registered(replica: str, text: str, left_ms: int) -> RegisteredSampler:
    return RegisteredSampler.model_validate(
        {
            **json.loads(text),
            "replica": replica,
            "lease_s": REGISTRATION_S,
            "expires_at": time.time() + left_ms / 1000,
        },
        extra="ignore",
    )


def _first_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
