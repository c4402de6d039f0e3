"""Jobs in Redis. Truth is a job's hash; the stream is only the to-do list; every change is one atomic script.

    hone:jobs              zset    every job id by creation time
    hone:job:<id>          hash    the record; `attempt` is the fencing token, `entry` the job's entry in the to-do stream
    hone:job:<id>:events   stream  what happened, in order
    hone:todo              stream  consumer group `workers`; an entry stays until its job has ended
    hone:key:<key>         string  idempotency key -> job id and body fingerprint, for a day

A worker's lease is its entry's idle time: `beat` renews it, `take` reclaims an entry whose lease lapsed. A worker that lost its
lease holds an old attempt number, with which every script refuses it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError, ResponseError

from shared.errors import BadRequest, Conflict, NotFound, Unavailable
from shared.job import Job
from shared.wire import Event, JobList, JobRecord

JOBS, TODO, GROUP = "hone:jobs", "hone:todo", "workers"
MAX_TRIES = 20
SOCKET_TIMEOUT_S = 30.0
MAX_CONNECTIONS = 4096
"""Each follower of a job's events holds one while it waits."""
KEY_TTL_S = 24 * 3600
REQUIRED = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}

_EVENT = """
local function event(job, type, level, message, data)
  redis.call('XADD', job .. ':events', '*', 'type', type, 'level', level, 'message', message, 'data', data, 'time', ARGV[1])
end
local function ended(job)
  local status = redis.call('HGET', job, 'status')
  return status == 'succeeded' or status == 'failed' or status == 'cancelled'
end
local function drop(job)
  local entry = redis.call('HGET', job, 'entry')
  if entry then redis.call('XACK', 'hone:todo', 'workers', entry) redis.call('XDEL', 'hone:todo', entry) end
end
"""

# KEYS: job, key ('' for none). ARGV: now, id, fingerprint, ttl, field, value, ...
_SUBMIT = (
    _EVENT
    + """
if redis.call('EXISTS', KEYS[1]) == 1 then return ARGV[2] .. ' ' .. ARGV[3] end
if KEYS[2] ~= '' then
  local known = redis.call('GET', KEYS[2])
  if known then return known end
  redis.call('SET', KEYS[2], ARGV[2] .. ' ' .. ARGV[3], 'EX', ARGV[4])
end
for i = 5, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('HSET', KEYS[1], 'entry', redis.call('XADD', 'hone:todo', '*', 'job', ARGV[2]))
redis.call('ZADD', 'hone:jobs', ARGV[1], ARGV[2])
event(KEYS[1], 'status', 'info', 'queued', '{"status": "queued"}')
return ARGV[2] .. ' ' .. ARGV[3]
"""
)

# KEYS: job. ARGV: now, owner, most tries without a step done, to-do entry. Returns the attempt, or 0 if there is nothing to do.
_START = (
    _EVENT
    + """
if redis.call('HGET', KEYS[1], 'entry') ~= ARGV[4] or ended(KEYS[1]) then
  redis.call('XACK', 'hone:todo', 'workers', ARGV[4]) redis.call('XDEL', 'hone:todo', ARGV[4])
  return 0
end
local attempt = redis.call('HINCRBY', KEYS[1], 'attempt', 1)
if redis.call('HINCRBY', KEYS[1], 'tries', 1) > tonumber(ARGV[3]) then
  local why = 'gave up after ' .. ARGV[3] .. ' attempts in a row that were cut off before a step was done'
  redis.call('HSET', KEYS[1], 'status', 'failed', 'error', why, 'finished_at', ARGV[1])
  event(KEYS[1], 'status', 'error', why, '{"status": "failed"}')
  drop(KEYS[1])
  return 0
end
redis.call('HSET', KEYS[1], 'status', 'running', 'owner', ARGV[2])
redis.call('HSETNX', KEYS[1], 'started_at', ARGV[1])
event(KEYS[1], 'status', 'info', 'running', '{"status": "running", "attempt": ' .. attempt .. '}')
return attempt
"""
)

# KEYS: job. ARGV: now, attempt, owner. Returns -1 if the lease is lost, 1 if cancelling was asked for, else 0.
_BEAT = """
if redis.call('HGET', KEYS[1], 'attempt') ~= ARGV[2] or redis.call('HGET', KEYS[1], 'status') ~= 'running' then return -1 end
redis.call('XCLAIM', 'hone:todo', 'workers', ARGV[3], 0, redis.call('HGET', KEYS[1], 'entry'), 'JUSTID')
return redis.call('HGET', KEYS[1], 'cancel_requested') == '1' and 1 or 0
"""

# KEYS: job. ARGV: now, attempt, type, level, message, data, field, value, ... Returns 0 if the lease is lost.
_REPORT = (
    _EVENT
    + """
if redis.call('HGET', KEYS[1], 'attempt') ~= ARGV[2] or ended(KEYS[1]) then return 0 end
for i = 7, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
if ARGV[3] == 'step' then redis.call('HSET', KEYS[1], 'tries', 0) end
event(KEYS[1], ARGV[3], ARGV[4], ARGV[5], ARGV[6])
if ended(KEYS[1]) then drop(KEYS[1]) end
return 1
"""
)

# KEYS: job. ARGV: now. Returns the status before.
_CANCEL = (
    _EVENT
    + """
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'queued' then
  redis.call('HSET', KEYS[1], 'status', 'cancelled', 'cancel_requested', '1', 'finished_at', ARGV[1])
  event(KEYS[1], 'status', 'info', 'cancelled', '{"status": "cancelled"}')
  drop(KEYS[1])
elseif status == 'running' and redis.call('HGET', KEYS[1], 'cancel_requested') ~= '1' then
  redis.call('HSET', KEYS[1], 'cancel_requested', '1')
  event(KEYS[1], 'log', 'info', 'cancelling after the call under way', '{}')
end
return status
"""
)


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
    """All of the orchestrator's state. Every method raises StoreUnavailable when Redis cannot be reached."""

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
        self._submit = self._redis.register_script(_SUBMIT)
        self._start = self._redis.register_script(_START)
        self._beat = self._redis.register_script(_BEAT)
        self._report = self._redis.register_script(_REPORT)
        self._cancel = self._redis.register_script(_CANCEL)

    async def open(self) -> None:
        """Checks that Redis keeps what it accepts. Raises Unavailable if it cannot be reached, BadRequest if it is set up to
        lose data."""
        try:
            for key, wanted in REQUIRED.items():
                found = (await self._redis.config_get(key)).get(key)
                if found != wanted:
                    raise BadRequest(f"Redis has {key} {found!r}, so it can lose jobs; set '{key} {wanted}' and start again")
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
        """Returns the queued job's record, or that of the job already submitted with `key`. The job is on disk when this
        returns. Raises Conflict for a key that came with another job before."""
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
        known_id, known = (await self._call(self._submit, keys, [now, job_id, fingerprint, KEY_TTL_S, *flat])).split(" ")
        if known != fingerprint:
            raise Conflict(f"Idempotency-Key {key!r} was used for job {known_id!r} with other content; use a new key")
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
        """Returns the record of the job, which is cancelled now if it was queued and soon if it runs. Cancelling twice is
        cancelling once. Raises Conflict if it has ended otherwise."""
        await self.get(job_id)
        before = await self._call(self._cancel, [_job(job_id)], [time.time()])
        if before in ("succeeded", "failed"):
            raise Conflict(f"job {job_id!r} has {before}; only a queued or running job can be cancelled")
        return await self.get(job_id)

    async def take(self, owner: str, lease_s: float, block_s: float) -> Lease | None:
        """Returns a job to work on, or None after `block_s` seconds: one whose worker's lease lapsed, or a new one if nobody
        holds any. So a job that was cut off goes on before the next one takes the trainer from it."""
        _, claimed, *_ = await self._do(self._redis.xautoclaim(TODO, GROUP, owner, min_idle_time=int(lease_s * 1000), count=1))
        if not claimed and (await self._do(self._redis.xpending(TODO, GROUP)))["pending"]:
            await asyncio.sleep(block_s)
            return None
        if not claimed:
            fresh = await self._do(self._redis.xreadgroup(GROUP, owner, {TODO: ">"}, count=1, block=int(block_s * 1000)))
            claimed = fresh[0][1] if fresh else []
        if not claimed:
            return None
        entry, fields = claimed[0]
        job_id = fields["job"]
        attempt = await self._call(self._start, [_job(job_id)], [time.time(), owner, MAX_TRIES, entry])
        return Lease(job_id, attempt, owner) if attempt else None

    async def beat(self, lease: Lease) -> bool:
        """Renews the lease; returns whether cancelling was asked for. Raises LeaseLost."""
        answer = await self._call(self._beat, [_job(lease.job_id)], [time.time(), lease.attempt, lease.owner])
        if answer < 0:
            raise LeaseLost(lease.job_id)
        return answer == 1

    async def report(
        self, lease: Lease, type: str, message: str, data: dict[str, Any] | None = None, *, level: str = "info", **fields: Any
    ) -> None:
        """Adds an event and sets fields of the record (None is left alone), both or neither. Raises LeaseLost."""
        flat = [part for name, value in fields.items() if value is not None for part in (name, _field(value))]
        arguments = [time.time(), lease.attempt, type, level, message, json.dumps(data or {}), *flat]
        if not await self._call(self._report, [_job(lease.job_id)], arguments):
            raise LeaseLost(lease.job_id)

    async def events(self, job_id: str, after: str, *, block_s: float | None = None, count: int = 1000) -> list[Event]:
        """Returns the events after id `after` ("0" for all); waits up to `block_s` seconds for the first."""
        block = None if block_s is None else max(int(block_s * 1000), 1)
        streams = await self._do(self._redis.xread({f"{_job(job_id)}:events": after}, count=count, block=block))
        return [_event(job_id, entry, fields) for entry, fields in (streams[0][1] if streams else [])]

    async def _call(self, script: Any, keys: list[str], arguments: list[Any]) -> Any:
        return await self._do(script(keys=keys, args=arguments))

    async def _do(self, command: Any) -> Any:
        try:
            return await command
        except RedisError as error:
            raise _unavailable(error) from error


def _job(job_id: str) -> str:
    return f"hone:job:{job_id}"


def _unavailable(error: RedisError) -> StoreUnavailable:
    return StoreUnavailable(f"Redis cannot be used: {error}; check that it runs at HONE_REDIS_URL")


def _field(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict) else value


def _record(fields: dict[str, str]) -> JobRecord:
    shown: dict[str, Any] = {name: value for name, value in fields.items() if name in JobRecord.model_fields}
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
