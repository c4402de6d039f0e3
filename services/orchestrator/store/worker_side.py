"""The store's methods for workers: take a job, renew its lease, report events, give it back.

A worker that takes a job gets a lease on one trainer, which expires unless `beat` renews it. The
lease has an attempt, a number that grows with every lease of any worker. A worker with an old
attempt or an expired lease is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.orchestrator.store.connection import Connection
from services.orchestrator.store.leases import Asked, Lease, LeaseLost

MAX_TRIES = 20
"""Attempts in a row without a new step after which a job pauses: it probably kills its workers
itself, or another stack uses the same trainer or samplers."""

PAUSED_ON_REQUEST = "paused on request"


class WorkerSide:
    """The worker's side of `Store`. `Store` documents the errors that every method may raise."""

    def __init__(self, connection: Connection) -> None:
        self._call = connection.call

    async def take(
        self,
        owner: str,
        trainer: str,
        lease_s: float,
        samplers: Sequence[str] = (),
        skip: Sequence[str] = (),
        *,
        own_only: bool = False,
        places: int = 1,
    ) -> Lease | None:
        """Returns a lease on `trainer`, `samplers` and a job, if a job waits and all are free, or
        fewer than `places` jobs share them and the first that waits may share them too.
        Interrupted jobs come first, this trainer's own before others'; then the first in the queue,
        by priority and age. An interrupted job whose own trainer is registered and free is left to
        that trainer. With `own_only` it is left there in any case. Jobs in `skip` are passed
        over."""
        answer = await self._next(
            trainer,
            samplers,
            skip,
            places=places,
            own_only=own_only or None,
            owner=owner,
            lease_ms=int(lease_s * 1000),
            max_tries=MAX_TRIES,
        )
        if not answer:
            return None
        attempt, tries, job_id, others = answer.split(" ")
        beside = tuple(sorted(map(int, filter(None, others.split(",")))))
        return Lease(job_id, int(attempt), trainer, lease_s, tries=int(tries), beside=beside)

    async def peek(
        self,
        trainer: str,
        samplers: Sequence[str] = (),
        skip: Sequence[str] = (),
        *,
        places: int = 1,
    ) -> str | None:
        """Returns the id of the job that `take` would return, and changes nothing."""
        answer = await self._next(trainer, samplers, skip, places=places, peek=True)
        return answer.split(" ")[2] if answer else None

    async def _next(
        self, trainer: str, samplers: Sequence[str], skip: Sequence[str], **arguments: Any
    ) -> str:
        return await self._call(
            "take",
            trainer=trainer,
            samplers=" ".join(samplers),
            skip=" ".join(skip),
            paused=PAUSED_ON_REQUEST,
            **arguments,
        )

    async def hold(self, job_id: str, waits: str | None) -> bool:
        """Notes what only this queued job waits for, as a sentence; None: nothing. Returns whether
        it still waits for a worker."""
        return await self._call("hold", id=job_id, waits=waits) == "ok"

    async def beat(
        self, lease: Lease, doing: str | None = None, waits: str | None = None
    ) -> Asked | None:
        """Renews the lease, and notes what the job does and waits for, if given. Returns the
        pending request, if any. Tries once, as long as the caller waits. Raises LeaseLost."""
        answer = await self._call(
            "beat",
            lease_ms=int(lease.lease_s * 1000),
            trainer=lease.trainer,
            doing=doing,
            waits=waits,
            **_by(lease),
        )
        if answer == "lost":
            raise LeaseLost(lease.job_id)
        asked: dict[str, Asked] = {"cancel": "cancel", "pause": "pause"}
        return asked.get(answer)

    async def halt(self, lease: Lease, why: str | None) -> None:
        """Gives the lease back. The job is cancelled if that was requested, else paused for the
        reason `why`. Without a reason it is paused if that was requested, and else queued again at
        its old place. Raises LeaseLost."""
        await self._by_worker("halt", lease, why=why, paused=PAUSED_ON_REQUEST)

    async def leave(self, lease: Lease, because: str) -> None:
        """As `halt` without a reason to pause, so that another attempt takes the job up. It counts
        as a failed attempt; after MAX_TRIES in a row the job pauses. Raises LeaseLost."""
        await self._by_worker("halt", lease, left_because=because, paused=PAUSED_ON_REQUEST)

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
        """Adds an event and sets fields of the record (None: not set), both or neither. With
        `missing_only` does nothing if `data["step"]` has an event of the type already. Raises
        LeaseLost."""
        data = data or {}
        await self._by_worker(
            "report",
            lease,
            type=type,
            level=level,
            message=message,
            data=json.dumps(data),
            step=data.get("step"),
            missing_only=missing_only or None,
            fields=fields,
        )

    async def _by_worker(self, script: str, lease: Lease, **arguments: Any) -> None:
        if await self._call(script, **_by(lease), **arguments) == "lost":
            raise LeaseLost(lease.job_id)


def _by(lease: Lease) -> dict[str, Any]:
    return {"id": lease.job_id, "attempt": lease.attempt}
