"""Pages of jobs, and the places of waiting jobs in the queue."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from services.orchestrator.store.connection import Connection
from services.orchestrator.store.ids import time_of
from services.orchestrator.store.lua import SHARED
from services.orchestrator.store.records import SUMMARY, Unreadable, summary_of
from shared.errors import NotFound
from shared.wire import JobList, JobSummary, Obstacle

S = TypeVar("S", bound=JobSummary)

CURSOR = re.compile(r"([^:]+):([0-9]{1,10}(?:\.[0-9]{1,20})?)")
"""A job's id and its score among the jobs (Unix seconds). The score gives its place even when the
job was deleted."""

LIST = (
    SHARED
    + """
local names = cjson.decode(call.names)
local wanted = call.metadata and cjson.decode(call.metadata)

local PIECE = 256 -- ids that are read at a time

local function has_metadata(id)
  local metadata = cjson.decode(field(id, 'metadata') or '{}')
  if wanted == cjson.null then return next(metadata) == nil end
  for name, value in pairs(wanted) do
    if metadata[name] ~= value then return false end
  end
  return true
end

local function fits(id)
  if call.name and string.match(id, '^(.*)%-') ~= call.name then return false end
  -- pcall: a key that is no hash has no status
  if call.status and redis.pcall('HGET', job(id), 'status') ~= call.status then return false end
  if not (call.openai or wanted) then return redis.call('EXISTS', job(id)) == 1 end
  return is_job(id) and (not call.openai or field(id, 'openai'))
    and (not wanted or has_metadata(id))
end

local function place_after(id, score)
  local rank = redis.call('ZREVRANK', JOBS, id)
  if rank then return rank + 1 end
  return score and redis.call('ZCOUNT', JOBS, '(' .. score, '+inf')
end

local found, at = {}, 0
if call.after then at = place_after(call.after, call.after_score) end
if not at then return 'unknown' end
while true do
  local ids = redis.call('ZREVRANGE', JOBS, at, at + PIECE - 1)
  for _, id in ipairs(ids) do
    if fits(id) then
      if #found == tonumber(call.limit) then
        local last = found[#found][1]
        local cursor = last .. ':' .. redis.call('ZSCORE', JOBS, last)
        return cjson.encode({jobs = found, next_after = cursor})
      end
      found[#found + 1] = {id, is_job(id) and redis.call('HMGET', job(id), unpack(names))}
    end
  end
  if #ids < PIECE then return cjson.encode({jobs = found}) end
  at = at + PIECE
end
"""
)
"""call: limit, names (JSON: of the fields to return); perhaps after (a job's id) and after_score
(when it was made, for a deleted job), status, name, openai and metadata (JSON: a table, or null for
jobs without any). Returns the newest matching jobs older than `after` as JSON, each with its id and
its fields, false for a missing field; and if there are more, `next_after`: the last job's id and
score. Returns 'unknown' if there is neither a job `after` nor a score."""

WAITING = (
    SHARED
    + """
local obstacles, places, begun, job_of = {}, {}, begun_waiting(), {}
for _, id in ipairs(redis.call('ZRANGE', BEGUN, 0, -1)) do
  if is_job(id) and is_leased(id) then
    obstacles[field(id, 'trainer')] = {job = id}
    job_of[field(id, 'attempt')] = id
  end
end

-- The job or evaluation that has a sampler of a free trainer.
local function holder(samplers)
  for name in string.gmatch(samplers, '%S+') do
    local attempt = redis.call('GET', LEASE .. name)
    if attempt and job_of[attempt] then return {job = job_of[attempt]} end
    local evaluation = attempt and redis.call('GET', LOAN .. attempt)
    if evaluation then return {evaluation = evaluation} end
  end
end

-- Several workers may have a trainer, and one of them not reach it.
local free, found = {}, {}
for _, slot in ipairs(known_slots()) do
  local why = holder(slot.samplers) or slot.away and {away = slot.away}
  if why then found[slot.trainer] = why else free[slot.trainer] = true end
end
for trainer, why in pairs(found) do
  if not free[trainer] and not obstacles[trainer] then obstacles[trainer] = why end
end
for place, id in ipairs(begun) do places[id] = place end
for id in string.gmatch(call.ids, '%S+') do
  local rank = redis.call('ZRANK', QUEUE, id)
  if rank then places[id] = #begun + rank + 1 end
end
return cjson.encode({obstacles = obstacles, places = places})
"""
)
"""call: ids (with blanks between). Returns as JSON: `obstacles`, why each trainer takes no job (a
`job` has it or one of its samplers, an `evaluation` has these, or it is `away`); and `places`, the
place of each waiting job, 1 for the job that is taken next."""

CUT_OFF = (
    SHARED
    + """
local found = {}
for _, id in ipairs(begun_waiting()) do found[id] = field(id, 'trainer') or '' end
return cjson.encode(found)
"""
)
"""Returns the interrupted jobs (begun, without a worker now), with each one's latest trainer, as
JSON."""


@dataclass(frozen=True)
class Wanted:
    """The filter of a list: jobs that match every given field. `metadata` are names and values that
    a job must have, None: it must have none; `openai`: it was submitted in OpenAI's shape."""

    status: str | None = None
    name: str | None = None
    metadata: Mapping[str, str] | None = field(default_factory=dict[str, str])
    openai: bool = False

    def call(self) -> dict[str, Any]:
        """Returns the arguments of `LIST`."""
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
        self._list = connection.client.register_script(LIST)
        self._waiting = connection.client.register_script(WAITING)
        self._cut_off = connection.client.register_script(CUT_OFF)

    async def page(self, after: str | None, limit: int, wanted: Wanted) -> JobList:
        """Returns up to `limit` of the jobs `wanted`, newest first, older than job `after`.
        Unreadable records are listed by id. Raises NotFound if `after` is neither a job's id nor a
        cursor.
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

    async def cut_off(self) -> dict[str, str]:
        """Returns the trainer of each interrupted job (begun, without a worker now), by id."""
        return json.loads(await self._call(self._cut_off))

    async def with_places(self, records: Sequence[S]) -> list[S]:
        """Returns the records. Waiting jobs, queued or running without a worker, get their place in
        the queue, and why no trainer takes them."""
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
    """Returns the id of the job to list jobs after, and when it was made, which a cursor and almost
    any id tell. After a deleted job, a list may show jobs again that were made within the same
    second."""
    if after is None:
        return None, None
    if found := CURSOR.fullmatch(after):
        return found[1], found[2]
    time_s = time_of(after)
    return after, None if time_s is None else str(time_s + 2)
