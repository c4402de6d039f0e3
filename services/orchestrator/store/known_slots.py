"""The trainers of all orchestrators that share this Redis, and which of them are away. Each worker
sends a heartbeat note about its own trainer. So a worker whose trainer is away knows whether
another trainer can take the jobs, and a job's place in the queue says why no trainer takes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from services.orchestrator.store.connection import Connection

NOTE_S = 2.0
"""Seconds between two notes of a worker."""

KNOWN_S = 10.0
"""Seconds that a note lasts: as long as an orchestrator takes to restart. Meanwhile others count on
it, and an interrupted job is left to its own trainer, if that is free, because only that trainer
has the job's latest state. It is not longer, because an orchestrator that restarts with another
host name, as a container does, would count twice.

If no worker could send a note for that long, for example while Redis was away, all notes have
expired. Then for as long again an interrupted job is left to a trainer without a note, because its
worker may be about to send one. Another trainer would repeat the steps since the newest checkpoint.
(Nothing else is lost: their batches are replayed from the run folder.)"""


@dataclass(frozen=True)
class KnownSlot:
    """The trainer of a worker; `missing` says why it takes no job, None if it does."""

    trainer: str
    missing: str | None = None


class KnownSlots:
    """Every method raises StoreUnavailable when Redis cannot be reached."""

    def __init__(self, connection: Connection) -> None:
        self._call = connection.call

    async def note(
        self, name: str, trainer: str, samplers: Sequence[str], missing: str | None
    ) -> int:
        """Notes for KNOWN_S seconds that the worker `name` has the trainer and the samplers, and
        why they take no job (`missing`). Returns how many jobs wait to begin."""
        note = {"trainer": trainer, "samplers": " ".join(samplers)}
        away = {"away": missing} if missing else {}
        # Not in ASCII: a lone surrogate, which Redis cannot decode from its escape, becomes `?`.
        answer = await self._call(
            "note",
            name=name,
            note=json.dumps(note | away, ensure_ascii=False),
            known_ms=int(KNOWN_S * 1000),
        )
        return int(answer)

    async def others(self, name: str) -> list[KnownSlot]:
        """Returns recent heartbeats of the other workers."""
        found = json.loads(await self._call("others", name=name))
        return [KnownSlot(each["trainer"], each.get("away")) for each in found]
