"""Which trainers there are, of all orchestrators that share this Redis, and which of them are away.
Each worker notes its own: so a worker whose trainer is away knows whether another one can take the
jobs, and whoever asks for a job's place is told why no trainer takes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from services.orchestrator.queue.connection import Connection
from services.orchestrator.queue.lua import SHARED

NOTE_S = 2.0
"""Seconds between two notes of a worker."""

KNOWN_S = 10.0
"""Seconds for which a note lasts: as long as an orchestrator takes to start again. So long others
count with it, and a job that was cut off is left to its own trainer, if that is free: no other has
what the job did last. A note that lasts longer would count as another orchestrator's where it
starts again by another host name, as a container does.

Where no worker could note anything for so long, as while Redis was away, all notes are gone. So for
as long again a job that was cut off is left to a trainer without a note: its worker may be about to
note it, and another trainer would do again what was done since the newest checkpoint. (Nothing else
is lost there: the batches since are replayed from the run folder.)"""

NOTE = (
    SHARED
    + """
local now, last = now_ms(), tonumber(redis.call('HGET', NOTING, 'last'))
if last and now > last + call.known_ms then redis.call('HSET', NOTING, 'since', now) end
redis.call('HSET', NOTING, 'last', now)
redis.call('SADD', SLOTS, call.name)
redis.call('SET', SLOT .. call.name, call.note, 'PX', call.known_ms)
return tostring(redis.call('ZCARD', QUEUE))
"""
)
"""call: name, note (JSON: trainer, samplers, perhaps away), known_ms. Returns how many jobs wait to
begin."""

OTHERS = (
    SHARED
    + """
local others = {}
for _, slot in ipairs(known_slots()) do
  if slot.name ~= call.name then others[#others + 1] = slot end
end
return cjson.encode(others)
"""
)
"""call: name. Returns the notes of all other workers, as JSON; {} for none."""


@dataclass(frozen=True)
class KnownSlot:
    """The trainer of a worker; `missing` is a sentence that says why it takes no job, if so."""

    trainer: str
    missing: str | None = None


class KnownSlots:
    """Every method raises StoreUnavailable when Redis cannot be reached."""

    def __init__(self, connection: Connection) -> None:
        self._call = connection.call
        self._note = connection.client.register_script(NOTE)
        self._others = connection.client.register_script(OTHERS)

    async def note(
        self, name: str, trainer: str, samplers: Sequence[str], missing: str | None
    ) -> int:
        """Notes for KNOWN_S seconds that the worker of this name has the trainer and the samplers,
        and why they take no job, if so. Returns how many jobs wait to begin."""
        note = {"trainer": trainer, "samplers": " ".join(samplers)}
        away = {"away": missing} if missing else {}
        # Not in ASCII: a lone surrogate, which Redis cannot decode from its escape, becomes `?`.
        answer = await self._call(
            self._note,
            name=name,
            note=json.dumps(note | away, ensure_ascii=False),
            known_ms=int(KNOWN_S * 1000),
        )
        return int(answer)

    async def others(self, name: str) -> list[KnownSlot]:
        """Returns what all workers with other names noted of late."""
        found = json.loads(await self._call(self._others, name=name))
        return [KnownSlot(each["trainer"], each.get("away")) for each in found]
