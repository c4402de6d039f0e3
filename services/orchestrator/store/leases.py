"""Leases: a worker's right to use a trainer and samplers for its job, for a limited time. A
heartbeat renews the lease, and ends the work if it cannot renew it in time.

While Redis is unreachable a worker cannot learn that it lost its lease. So it uses its own clock,
and stops before Redis can give the trainer to another worker.

A lease is on one trainer. It has an attempt, a number that grows with every lease of any worker. A
worker with an old attempt or an expired lease is refused. With it a worker reports a run's events,
and the record's fields that change with them (`Journal`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from services.orchestrator.store.connection import Connection, StoreUnavailable
from shared.host.logs import get_logger
from shared.http.connecting import Presence
from shared.http.urls import REGISTERED, is_loopback
from shared.wire import Checkpoint, MetricsRow, PauseReason, TrainerState

LeaseRequest = Literal["cancel", "pause"]

MAX_INTERVAL_S = 1.0
"""Seconds between two beats: short, so that a request to pause or cancel arrives soon. At most a
fifth of the lease."""

TIMEOUT = 0.2
"""Share of the lease after which a beat without an answer is sent again, on another connection."""

MARGIN = 0.2
"""Share of the lease that is left for stopping the work."""

PORTS = {"http": 80, "https": 443}


class LeaseLost(Exception):
    """The lease expired or another worker took the job over. This worker must stop at once and
    change nothing more."""


class NoHeartbeat(LeaseLost):
    """Redis could not be reached for most of the lease."""


@dataclass(frozen=True)
class Lease:
    """The right to work on a job with a trainer, for `lease_s` seconds from each heartbeat.
    `attempt` fences: it is larger than the attempt of any earlier lease. `tries` counts the
    attempts in a row, this one included, that completed no new step. `beside` are the attempts that
    shared the trainer when the lease was given."""

    job_id: str
    attempt: int
    trainer: str
    lease_s: float
    tries: int = 1
    beside: tuple[int, ...] = ()


def resource(url: str) -> str:
    """Returns `host:port` of the service at `url`. A loopback address becomes this machine's host
    name, because each machine has its own. All registered samplers together are one resource."""
    if url == REGISTERED:
        return REGISTERED
    parts = urlsplit(url)
    host = parts.hostname or ""
    name = socket.gethostname().lower() if is_loopback(host) else host.rstrip(".")
    return f"{name}:{parts.port or PORTS.get(parts.scheme, '')}"


Beat = Callable[[Lease], Awaitable[LeaseRequest | None]]
"""Renews the lease. Raises LeaseLost, and StoreUnavailable."""


async def keep(beat: Beat, lease: Lease, taken_at: float, redis: Presence) -> LeaseRequest:
    """Renews the lease until a request (cancel or pause) comes, and returns it. Raises LeaseLost
    once another worker has the lease, NoHeartbeat once the last successful beat was sent a lease
    ago, less the margin. `taken_at` (time.monotonic) is when the lease was requested. `redis`
    records whether beats are answered."""
    interval_s = min(MAX_INTERVAL_S, lease.lease_s / 5)
    renewed_at = taken_at
    while True:
        stop_at = renewed_at + lease.lease_s * (1 - MARGIN)
        request, renewed_at = await _beat_until(stop_at, beat, lease, interval_s, redis)
        if request:
            return request
        await asyncio.sleep(interval_s)


async def _beat_until(
    stop_at: float, beat: Beat, lease: Lease, interval_s: float, redis: Presence
) -> tuple[LeaseRequest | None, float]:
    """Returns the request, if any, and when the successful beat was sent. Raises NoHeartbeat if no
    beat succeeded until `stop_at`."""
    while (sent_at := time.monotonic()) < stop_at:
        try:
            async with asyncio.timeout(min(lease.lease_s * TIMEOUT, stop_at - sent_at)):
                request = await beat(lease)
            # The answer is reported to Redis, which may be unreachable again: no beat is sent then.
            with contextlib.suppress(TimeoutError, StoreUnavailable):
                async with asyncio.timeout(lease.lease_s * TIMEOUT):
                    await redis.heard()
            return request, sent_at
        except (TimeoutError, StoreUnavailable) as error:
            reason = str(error) or "no answer to a heartbeat"
            get_logger().warning("no heartbeat", job=lease.job_id, reason=reason)
            await redis.missed(sent_at, reason)
        await asyncio.sleep(max(0.0, sent_at + interval_s - time.monotonic()))
    raise NoHeartbeat(f"{lease.job_id}: no heartbeat reached Redis for most of {lease.lease_s:g} s")


MAX_TRIES = 20
"""Attempts in a row without a new step after which a job pauses: it probably kills its workers
itself, or another stack uses the same trainer or samplers."""


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
            **arguments,
        )

    async def hold(self, job_id: str, waits: str | None) -> bool:
        """Records, as a sentence, the dependency for which only this queued job waits; None: it
        waits for none. Returns whether the job still waits for a worker."""
        return await self._call("hold", id=job_id, waits=waits) == "ok"

    async def beat(
        self, lease: Lease, doing: str | None = None, waits: str | None = None
    ) -> LeaseRequest | None:
        """Renews the lease, and records the job's activity and its missing dependency, if given.
        Returns the pending request, if any. Sends one attempt, which lasts until the caller cancels
        it. Raises LeaseLost."""
        answer = await self._call(
            "beat",
            lease_ms=int(lease.lease_s * 1000),
            trainer=lease.trainer,
            doing=doing,
            waits=waits,
            **_by(lease),
        )
        if answer == "lost":
            raise LeaseLost(_lost(lease))
        requests: dict[str, LeaseRequest] = {"cancel": "cancel", "pause": "pause"}
        return requests.get(answer)

    async def halt(
        self, lease: Lease, why: str | None, pause_reason: PauseReason = "error"
    ) -> None:
        """Gives the lease back. The job is cancelled if that was requested, else paused for the
        reason `why`, with the code `pause_reason`. Without `why` it is paused if that was
        requested, and else queued again at its old place. Raises LeaseLost."""
        await self._by_worker("halt", lease, why=why, reason=pause_reason)

    async def leave(self, lease: Lease, because: str) -> None:
        """Gives the lease back as `halt` without `why`, so that another attempt takes the job. This
        one counts as failed; after MAX_TRIES in a row the job pauses. Raises LeaseLost."""
        await self._by_worker("halt", lease, left_because=because)

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
            raise LeaseLost(_lost(lease))


def _lost(lease: Lease) -> str:
    return (
        f"attempt {lease.attempt} at job {lease.job_id!r} has lost its lease on {lease.trainer}: "
        f"it expired after {lease.lease_s:g} s without a heartbeat, another worker has the job, or "
        "the job has ended; this worker stops"
    )


def _by(lease: Lease) -> dict[str, Any]:
    return {"id": lease.job_id, "attempt": lease.attempt}


# --- a run's events -------------------------------------------------------------------------------

SUPERVISED = "supervised"
"""The metric, 1, of a step that learned the data's answers: it has a loss, and no reward."""

HELD_OUT = re.compile(r"eval/(?:([\w-]+)/)?(reward|loss|pass@1)")


class Journal:
    """Reports a run's events, and the fields of its record that change with them. Every method
    raises LeaseLost, and reports nothing, once another worker has the job."""

    def __init__(self, store: WorkerSide, lease: Lease) -> None:
        self._store = store
        self._lease = lease

    async def log(self, message: str, **data: Any) -> None:
        await self._store.report(self._lease, "log", message, data)

    async def warn(self, message: str, **data: Any) -> None:
        await self._store.report(self._lease, "log", message, data, level="warning")

    async def error(self, message: str) -> None:
        await self._store.report(self._lease, "log", message, level="error")

    async def aside(self, message: str, warning: bool) -> None:
        """Reports a message that nothing depends on, such as that a service is unreachable or
        reachable again. A failure to report it is only logged: the heartbeat has the same failure
        and handles it."""
        try:
            await (self.warn(message) if warning else self.log(message))
        except (LeaseLost, StoreUnavailable) as error:
            get_logger().warning(
                "a message was not reported to the job's followers", reason=str(error)
            )

    async def loaded(self, state: TrainerState, furthest: int) -> None:
        """Reports that the trainer has loaded the job; `furthest` is the last step done before."""
        ranks = "1 rank" if state.num_ranks == 1 else f"{state.num_ranks} ranks"
        message = (
            f"the trainer has {state.num_parameters:,} parameters as {state.dtype}, {ranks} on "
            f"{state.device}"
        )
        if state.step < furthest:
            message += f"; resumed at step {state.step}: {_steps(state.step + 1, furthest)} again"
        elif state.step:
            message += f"; continuing after step {state.step}"
        for sentence in state.damaged:
            await self.warn(sentence)
        if state.without:
            await self.log(state.without)
        await self._store.report(self._lease, "log", message, step=state.step)

    async def recovering(self, message: str, recoveries: int) -> None:
        """Reports a recovery; `recoveries` is their total number."""
        await self._store.report(
            self._lease, "log", message, level="warning", recoveries=recoveries
        )

    async def checkpoint(self, checkpoint: Checkpoint) -> None:
        message = f"checkpoint {checkpoint.path}"
        await self._store.report(self._lease, "checkpoint", message, checkpoint.model_dump())

    async def row(
        self,
        row: MetricsRow,
        num_steps: int,
        eta_s: float | None = None,
        *,
        currency: str | None = None,
        missing_only: bool = False,
    ) -> None:
        """Adds the row's events; its cost is in `currency`. With `missing_only` adds only events
        that a crash after writing the row left out."""
        step, metrics = row.step, row.metrics
        if shown := _held_out(metrics, "reward") or _held_out(metrics, "loss"):
            right = _held_out(metrics, "pass@1")
            message = f"step {step}: held-out {shown}{f'; {right}' if right else ''}"
            data = {"step": step, "metrics": metrics}
            await self._store.report(self._lease, "eval", message, data, missing_only=missing_only)
        if step:
            reward = metrics.get("reward")
            shown = f"reward {'none' if reward is None else format(reward, '.3f')}"
            if SUPERVISED in metrics:
                shown = f"loss {metrics['loss']:.4f}"
            if row.why_unchanged:
                shown += f"; no weight changed: {row.why_unchanged}"
            await self._store.report(
                self._lease,
                "step",
                f"step {step}/{num_steps}: {shown}",
                {"step": step, "steps": num_steps, "eta_s": eta_s, "metrics": metrics},
                missing_only=missing_only,
                step=step,
                eta_s=eta_s,
                reward=reward,
                cost=metrics.get("total/cost"),
                currency=currency,
            )

    async def operation(self, row: MetricsRow) -> None:
        """Reports an optimizer step of a program."""
        loss, norm = row.metrics["loss"], row.metrics["grad_norm"]
        message = f"operation {row.step}: loss {loss:.4f}, gradient norm {norm:.4f}"
        await self._store.report(self._lease, "log", message, step=row.step)

    async def evaluated(self, model: str, held_out: str, metrics: Mapping[str, float]) -> None:
        """Reports a model's scores on the held-out set `held_out`, in a job of 0 steps. They count
        as progress, as a step does: the store counts attempts without progress."""
        reward = f"{metrics['reward']:.3f}" if "reward" in metrics else "none"
        reward += f"; pass@1 {metrics['pass@1']:.3f}" if "pass@1" in metrics else ""
        message = f"{model}: held-out reward {reward}{f' ({held_out})' if held_out else ''}"
        data = {"model": model, "set": held_out, "metrics": metrics}
        await self._store.report(self._lease, "eval", message, data, tries=0)


def _steps(first: int, last: int) -> str:
    return f"step {first} is trained" if first == last else f"steps {first} to {last} are trained"


def _held_out(metrics: Mapping[str, float], metric: str) -> str:
    """Returns the metric of each held-out set, as `reward 0.512, 0.431 (hard)`, the latter of a
    named set; "" without any."""
    matches = [(HELD_OUT.fullmatch(name), value) for name, value in metrics.items()]
    shown = [
        f"{value:.3f} ({match[1]})" if match[1] else f"{value:.3f}"
        for match, value in matches
        if match and match[2] == metric
    ]
    return f"{metric} {', '.join(shown)}" if shown else ""
