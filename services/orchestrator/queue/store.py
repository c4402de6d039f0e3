"""Jobs in Redis. Truth is a job's hash; the stream is only the to-do list; every change is one
atomic script (scripts.py).

    hone:jobs              zset    every job id by creation time
    hone:job:<id>          hash    the record; `attempt` is the fencing token, `entry` the job's entry in the to-do stream
    hone:job:<id>:events   stream  what happened, in order
    hone:todo              stream  consumer group `workers`; an entry stays until its job has ended or is paused
    hone:key:<key>         string  idempotency key -> job id and body fingerprint, for a day

A worker's lease is its entry's idle time: `beat` renews it, `take` reclaims an entry whose lease
lapsed. A worker that lost its lease holds an old attempt number, with which every script refuses
it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError, ResponseError

from services.orchestrator.queue import scripts
from shared.errors import BadRequest, Conflict, NotFound, Unavailable
from shared.job import Job
from shared.wire import TERMINAL, Event, JobList, JobRecord

JOBS, TODO, GROUP = "hone:jobs", "hone:todo", "workers"
MAX_TRIES = 20
PAUSED_ON_REQUEST = "paused on request"
SOCKET_TIMEOUT_S = 30.0
MAX_CONNECTIONS = 4096
"""Each follower of a job's events holds one while it waits."""
KEY_TTL_S = 24 * 3600
REQUIRED = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}


class StoreUnavailable(Unavailable):
    """Redis is away. Whoever works on a job stops; the job goes on once Redis is back."""


class LeaseLost(Exception):
    """Another worker took the job over; this one must stop at once and change nothing more."""


@dataclass(frozen=True)
class Lease:
    """The right to work on a job: valid while `attempt` is the job's newest."""

    job_id: str
    attempt: int
    owner: str


class Store:
    """All of the orchestrator's state. Every method raises StoreUnavailable when Redis cannot be
    reached."""

    def __init__(self, url: str) -> None:
        retry = Retry(ExponentialBackoff(cap=2.0, base=0.1), retries=6)
        self._redis: Any = redis.from_url(
            url,
            decode_responses=True,
            max_connections=MAX_CONNECTIONS,
            retry=retry,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=5,
        )
        self._submit = self._redis.register_script(scripts.SUBMIT)
        self._start = self._redis.register_script(scripts.START)
        self._beat = self._redis.register_script(scripts.BEAT)
        self._report = self._redis.register_script(scripts.REPORT)
        self._halt = self._redis.register_script(scripts.HALT)
        self._pause = self._redis.register_script(scripts.PAUSE)
        self._resume = self._redis.register_script(scripts.RESUME)
        self._cancel = self._redis.register_script(scripts.CANCEL)

    async def open(self) -> None:
        """Checks that Redis keeps what it accepts. Raises Unavailable if it cannot be reached,
        BadRequest if it is set up to lose data."""
        try:
            for key, wanted in REQUIRED.items():
                found = (await self._redis.config_get(key)).get(key)
                if found != wanted:
                    raise BadRequest(
                        f"Redis has {key} {found!r}, so it can lose jobs; set '{key} {wanted}' and "
                        "start again"
                    )
            try:
                await self._redis.xgroup_create(TODO, GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise
        except RedisError as error:
            raise _unavailable(error) from error

    async def close(self) -> None:
        await self._redis.aclose()

    async def ping(self) -> None:
        try:
            await self._redis.ping()
        except RedisError as error:
            raise _unavailable(error) from error

    async def submit(self, job_id: str, job: Job, run_dir: Path, key: str | None) -> JobRecord:
        """Returns the queued job's record, or that of the job already submitted with `key`. The job
        is on disk when this returns. Raises Conflict for a key that came with another job
        before."""
        spec = job.model_dump_json()
        fingerprint = hashlib.sha256(spec.encode()).hexdigest()
        now = time.time()
        fields = {
            "id": job_id,
            "name": job.name,
            "status": "queued",
            "created_at": now,
            "steps": job.steps,
            "step": 0,
            "attempt": 0,
            "run_dir": str(run_dir),
            "job": spec,
        }
        flat = [part for pair in fields.items() for part in pair]
        keys = [_job(job_id), f"hone:key:{key}" if key else ""]
        known_id, known = (
            await self._call(self._submit, keys, [now, job_id, fingerprint, KEY_TTL_S, *flat])
        ).split(" ")
        if known != fingerprint:
            raise Conflict(
                f"Idempotency-Key {key!r} was used for job {known_id!r} with other content; use a "
                "new key"
            )
        return await self.get(known_id)

    async def get(self, job_id: str) -> JobRecord:
        fields = await self._do(self._redis.hgetall(_job(job_id)))
        if not fields:
            raise NotFound(f"no job {job_id!r}; GET /v1/jobs lists them")
        return _record(fields)

    async def list(self, after: str | None, limit: int) -> JobList:
        """Returns up to `limit` jobs, newest first, older than job `after`."""
        rank = await self._do(self._redis.zrevrank(JOBS, after)) if after else -1
        if rank is None:
            raise NotFound(f"no job {after!r} to list jobs after")
        ids = await self._do(self._redis.zrevrange(JOBS, rank + 1, rank + limit + 1))
        records = tuple([await self.get(job_id) for job_id in ids[:limit]])
        return JobList(jobs=records, next_after=records[-1].id if len(ids) > limit else None)

    async def cancel(self, job_id: str) -> JobRecord:
        """Returns the record of the job, which is cancelled now if it was queued or paused and soon
        if it runs. Cancelling twice is cancelling once. Raises Conflict if it has ended
        otherwise."""
        await self.get(job_id)
        before = await self._call(self._cancel, [_job(job_id)], [time.time()])
        if before in ("succeeded", "failed"):
            raise Conflict(
                f"job {job_id!r} has {before}; only a queued, running or paused job can be "
                "cancelled"
            )
        return await self.get(job_id)

    async def pause(self, job_id: str) -> JobRecord:
        """Returns the record of the job, which is paused now if it was queued and soon if it runs.
        Pausing twice is pausing once. Raises Conflict if it has ended."""
        await self.get(job_id)
        before = await self._call(self._pause, [_job(job_id)], [time.time(), PAUSED_ON_REQUEST])
        if before in TERMINAL:
            raise Conflict(
                f"job {job_id!r} {_has(before)}; only a queued or running job can be paused"
            )
        return await self.get(job_id)

    async def resume(self, job_id: str) -> JobRecord:
        """Returns the record of the job, which is queued again if it was paused; a pause that was
        asked for and did not come about yet is called off. Raises Conflict if it has ended."""
        await self.get(job_id)
        before = await self._call(self._resume, [_job(job_id)], [time.time()])
        if before in TERMINAL:
            raise Conflict(f"job {job_id!r} {_has(before)}; only a paused job can be resumed")
        return await self.get(job_id)

    async def take(self, owner: str, lease_s: float, block_s: float) -> Lease | None:
        """Returns a job to work on, or None after `block_s` seconds: one whose worker's lease
        lapsed, or a new one if nobody holds any. So a job that was cut off goes on before the next
        one takes the trainer from it."""
        _, claimed, *_ = await self._do(
            self._redis.xautoclaim(TODO, GROUP, owner, min_idle_time=int(lease_s * 1000), count=1)
        )
        if not claimed and (await self._do(self._redis.xpending(TODO, GROUP)))["pending"]:
            await asyncio.sleep(block_s)
            return None
        if not claimed:
            fresh = await self._do(
                self._redis.xreadgroup(
                    GROUP, owner, {TODO: ">"}, count=1, block=int(block_s * 1000)
                )
            )
            claimed = fresh[0][1] if fresh else []
        if not claimed:
            return None
        entry, fields = claimed[0]
        job_id = fields["job"]
        attempt = await self._call(
            self._start, [_job(job_id)], [time.time(), owner, MAX_TRIES, entry]
        )
        return Lease(job_id, attempt, owner) if attempt else None

    async def beat(self, lease: Lease) -> Literal["cancel", "pause"] | None:
        """Renews the lease; returns what was asked for, if anything. Raises LeaseLost."""
        answer = await self._call(
            self._beat, [_job(lease.job_id)], [time.time(), lease.attempt, lease.owner]
        )
        if answer < 0:
            raise LeaseLost(lease.job_id)
        asked: dict[int, Literal["cancel", "pause"]] = {1: "cancel", 2: "pause"}
        return asked.get(answer)

    async def halt(self, lease: Lease, why: str | None) -> None:
        """Pauses the job that the worker has let go of: as it was asked to, or for the reason
        `why`. A job that was cancelled meanwhile is cancelled, and one resumed meanwhile is queued.
        Raises LeaseLost."""
        arguments = [time.time(), lease.attempt, why or PAUSED_ON_REQUEST, "0" if why else "1"]
        if not await self._call(self._halt, [_job(lease.job_id)], arguments):
            raise LeaseLost(lease.job_id)

    async def report(
        self,
        lease: Lease,
        type: str,
        message: str,
        data: dict[str, Any] | None = None,
        *,
        level: str = "info",
        **fields: Any,
    ) -> None:
        """Adds an event and sets fields of the record (None is left alone), both or neither. Raises
        LeaseLost."""
        flat = [
            part
            for name, value in fields.items()
            if value is not None
            for part in (name, _field(value))
        ]
        arguments = [
            time.time(),
            lease.attempt,
            type,
            level,
            message,
            json.dumps(data or {}),
            *flat,
        ]
        if not await self._call(self._report, [_job(lease.job_id)], arguments):
            raise LeaseLost(lease.job_id)

    async def events(
        self, job_id: str, after: str, *, block_s: float | None = None, count: int = 1000
    ) -> list[Event]:
        """Returns the events after id `after` ("0" for all); waits up to `block_s` seconds for the
        first."""
        block = None if block_s is None else max(int(block_s * 1000), 1)
        streams = await self._do(
            self._redis.xread({f"{_job(job_id)}:events": after}, count=count, block=block)
        )
        return [
            _event(job_id, entry, fields) for entry, fields in (streams[0][1] if streams else [])
        ]

    async def _call(self, script: Any, keys: list[str], arguments: list[Any]) -> Any:
        return await self._do(script(keys=keys, args=arguments))

    async def _do(self, command: Any) -> Any:
        try:
            return await command
        except RedisError as error:
            raise _unavailable(error) from error


def _job(job_id: str) -> str:
    return f"hone:job:{job_id}"


def _has(status: str) -> str:
    return f"was {status}" if status == "cancelled" else f"has {status}"


def _unavailable(error: RedisError) -> StoreUnavailable:
    return StoreUnavailable(f"Redis cannot be used: {error}; check that it runs at HONE_REDIS_URL")


def _field(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict) else value


def _record(fields: dict[str, str]) -> JobRecord:
    shown: dict[str, Any] = {
        name: value for name, value in fields.items() if name in JobRecord.model_fields
    }
    shown["job"] = json.loads(fields["job"])
    if "summary" in fields:
        shown["summary"] = json.loads(fields["summary"])
    return JobRecord.model_validate(shown)


def _event(job_id: str, entry: str, fields: dict[str, str]) -> Event:
    return Event(
        id=entry,
        job_id=job_id,
        time=float(fields["time"]),
        type=cast(Any, fields["type"]),
        level=cast(Any, fields["level"]),
        message=fields["message"],
        data=json.loads(fields["data"]),
    )
