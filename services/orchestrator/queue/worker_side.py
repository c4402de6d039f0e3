"""What workers do with jobs in Redis: take one, say that they live and what happened, give it back.

A worker that takes a job gets a lease on one trainer, which expires unless `beat` renews it. With
the lease comes an attempt, a number that grows with every lease given to anybody. A worker that
shows an old one, or one that has expired, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.orchestrator.queue import scripts
from services.orchestrator.queue.connection import Connection
from services.orchestrator.queue.known_slots import KNOWN_S
from services.orchestrator.queue.leases import Asked, Lease, LeaseLost

MAX_TRIES = 20
"""Attempts in a row, without a step done that was not done before, after which a job pauses: it
probably kills its workers itself."""

MAX_LEFT = 2
"""Attempts in a row, without a step done that was not done before, the last of which lost its
trainer, after which a job is left to no other one: it probably ends its trainers itself."""

PAUSED_ON_REQUEST = "paused on request"


class WorkerSide:
    """The worker's side of `Store`, which says what every method raises besides."""

    def __init__(self, connection: Connection) -> None:
        self._call = connection.call
        self._take = connection.client.register_script(scripts.TAKE)
        self._beat = connection.beats.register_script(scripts.BEAT)
        self._report = connection.client.register_script(scripts.REPORT)
        self._halt = connection.client.register_script(scripts.HALT)

    async def take(
        self, owner: str, trainer: str, lease_s: float, samplers: Sequence[str] = ()
    ) -> Lease | None:
        """Returns a lease on `trainer`, `samplers` and a job, if all are free and a job waits: one
        that was cut off, if possible of this trainer, before others begin; else the first in the
        queue, by priority and age. One whose own trainer is free is left to that, also where that
        is not known yet (`KNOWN_S`)."""
        answer = await self._call(
            self._take,
            owner=owner,
            trainer=trainer,
            samplers=" ".join(samplers),
            lease_ms=int(lease_s * 1000),
            max_tries=MAX_TRIES,
            known_ms=int(KNOWN_S * 1000),
            paused=PAUSED_ON_REQUEST,
        )
        if not answer:
            return None
        attempt, job_id = answer.split(" ")
        return Lease(job_id, int(attempt), trainer, lease_s)

    async def beat(self, lease: Lease, doing: str | None = None) -> Asked | None:
        """Renews the lease, and notes what the job is at, if it is said; returns what was asked
        for, if anything. Tries once, for as long as the caller waits. Raises LeaseLost."""
        answer = await self._call(
            self._beat,
            lease_ms=int(lease.lease_s * 1000),
            trainer=lease.trainer,
            doing=doing,
            **_by(lease),
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

    async def leave(
        self, lease: Lease, because: str, too_often: str, *, max_tries: int = MAX_LEFT
    ) -> None:
        """The same without a reason to pause, for another attempt to take the job up. It counts as
        taken up in vain; after `max_tries` such attempts in a row the job pauses, because it was
        left `too_often`. Raises LeaseLost."""
        await self._by_worker(
            self._halt,
            lease,
            left_because=because,
            left_too_often=too_often,
            max_left=max_tries,
            paused=PAUSED_ON_REQUEST,
        )

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


def _by(lease: Lease) -> dict[str, Any]:
    return {"id": lease.job_id, "attempt": lease.attempt}
