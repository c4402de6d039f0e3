"""Takes jobs from the queue and runs them, one at a time, on one trainer and its samplers. A
trainer that jobs share has a worker for each place; one idle worker at a time looks for a job.

While a job runs, its lease is renewed (leases.py). A lost lease stops the work at once, without
a report to the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import socket
import time

from services.orchestrator.jobs.attempt import Attempt
from services.orchestrator.jobs.decisions import Outcome
from services.orchestrator.jobs.needs import DataFiles, Dependencies
from services.orchestrator.samplers.status import AttemptStatus
from services.orchestrator.seams import Extensions
from services.orchestrator.store import leases
from services.orchestrator.store.connection import StoreEmptied
from services.orchestrator.store.leases import Lease, LeaseLost, LeaseRequest
from services.orchestrator.store.records import UnreadableRecord
from services.orchestrator.store.registrations import REGISTER_TRAINER_S, TRAINER_REGISTRATION_S
from services.orchestrator.store.run_folders import note_end
from services.orchestrator.store.store import Store
from services.orchestrator.tasks import stop
from shared.errors import HoneError, NotFound, Unavailable
from shared.host.logs import get_logger
from shared.http.connecting import Presence
from shared.settings import Settings

POLL_S = 0.2
"""Seconds between two looks into the queue."""

PAUSE_S = 2.0
"""Seconds between two attempts to reach Redis while it is unreachable."""

HELD_S = 5.0
"""Seconds between two checks of jobs whose data is unreachable."""

STOPS_WITHIN = 0.5
"""Share of the lease within which cancelled work should end. A write on a hanging disk does not
end. The job is stopped all the same, and this worker takes no other job until the write ends."""

GOODBYE_S = 2.0
"""Seconds in which a stopped worker gives its lease back; else it expires."""


WORK_CANCELLED = (
    "a bug in Hone: something other than its worker cancelled the job's work; report it with the "
    "orchestrator's log"
)


class SharedTrainer:
    """What the workers of one trainer have in common: what is missing, which of them looks for a
    job, and until when (time.monotonic) they leave interrupted jobs to other trainers. `closing`
    are the jobs of the process whose last run is not closed yet."""

    def __init__(self, settings: Settings, store: Store, closing: set[str]) -> None:
        self.needs = Dependencies(settings, store)
        self.looking = asyncio.Lock()
        self.others_at = 0.0
        self.closing = closing


class Worker:
    """A worker for the trainer and its samplers that `settings` name. It takes no job while
    anything that a job needs is unreachable. `trainer` is common to the workers of this trainer.
    `num_queued` is how many jobs wait to begin, as of two seconds ago."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        extensions: Extensions,
        trainer: SharedTrainer,
    ) -> None:
        self._store = store
        self._settings = settings
        self._extensions = extensions
        self._trainer = trainer
        self._needs = self._trainer.needs
        self._held: dict[str, DataFiles] = {}  # of queued jobs that wait for their data
        self._owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.num_queued = 0
        self._lease: Lease | None = None
        self._redis = Presence("Redis", self._tell)
        self._news: str | None = None
        self._is_stopping = False  # the work on a job, which may hang

    @property
    def has_job(self) -> bool:
        return self._lease is not None

    async def run_forever(self) -> None:
        """Works until cancelled. While Redis is unreachable it waits; an interrupted job is taken
        up again later."""
        await self._until_known()
        self._leave_others()
        registering = asyncio.create_task(self._keep_registered())
        watching = asyncio.create_task(self._watch_held())
        try:
            await self._work_forever()
        finally:
            await stop(registering, watching)

    async def _work_forever(self) -> None:
        while True:
            asked_at = time.monotonic()
            try:
                await self._give_back()
                async with self._trainer.looking:
                    if await self._needs.ready() and not await self._is_next_held():
                        asked_at = time.monotonic()
                        self._lease = await self._store.take(
                            self._owner,
                            self._needs.trainer,
                            self._settings.lease_s,
                            self._needs.samplers,
                            [*self._held, *self._trainer.closing],
                            own_only=time.monotonic() < self._trainer.others_at,
                            places=self._settings.places,
                        )
                    await self._redis.heard()
                    if self._lease is None:
                        await asyncio.sleep(POLL_S)
                if self._lease:
                    await self._work(self._lease, asked_at)
            except Unavailable as error:
                await self._redis.missed(asked_at, error.detail)
                self._leave_others()
                await asyncio.sleep(PAUSE_S)
            except LeaseLost as error:
                get_logger().warning("lease lost", reason=str(error))
                if not isinstance(error, leases.NoHeartbeat):
                    self._lease = None
            except StoreEmptied:
                self._lease = None
                await self._until_known()

    def _leave_others(self) -> None:
        """Leaves other trainers' interrupted jobs to them until they had time to register again:
        they have the jobs' latest state."""
        self._trainer.others_at = time.monotonic() + TRAINER_REGISTRATION_S

    async def leave(self) -> None:
        """Gives back the lease of cancelled work, so that another worker need not wait until it
        expires."""
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._give_back()
        except (StoreEmptied, Unavailable, TimeoutError) as error:
            get_logger().warning("lease not given back", reason=repr(error))

    async def _is_next_held(self) -> bool:
        """Returns whether the data of the next job is unreachable. Then the other queued jobs go
        first, until the data is there."""
        needs = self._needs
        skip = [*self._held, *self._trainer.closing]
        job_id = await self._store.peek(
            needs.trainer, needs.samplers, skip, places=self._settings.places
        )
        return job_id is not None and await self._is_held(job_id)

    async def _watch_held(self) -> None:
        """Checks the jobs whose data is unreachable, also while this worker has another job."""
        while True:
            await asyncio.sleep(HELD_S)
            for job_id in [*self._held]:
                try:
                    await self._is_held(job_id)
                except (Unavailable, StoreEmptied):
                    pass  # the worker reports it
                except Exception:  # the last resort of a background task
                    get_logger().exception("data not checked", job=job_id)

    async def _is_held(self, job_id: str) -> bool:
        """Returns whether the job's data is unreachable, and notes it. A job that cannot be read is
        not held: the worker that takes it reports why."""
        try:
            job = (await self._store.get(job_id)).job
        except (NotFound, UnreadableRecord):
            self._held.pop(job_id, None)
            return False
        files = self._held.get(job_id)
        if files is None or files.job != job:  # a new one each time would hang a thread more
            files = DataFiles(job, self._settings)
        why = await files.missing()
        if await self._store.hold(job_id, why) and why:
            self._held[job_id] = files
        else:
            self._held.pop(job_id, None)
        return why is not None

    async def _keep_registered(self) -> None:
        """Renews the trainer's registration, and reports in it what is missing. While a job runs it
        reports nothing as missing: the job does that. While work is being stopped it is not
        renewed: if stopping hangs, the job soon goes to another trainer."""
        needs = self._needs
        while True:
            if self._is_stopping or needs.checked_at is None:
                await asyncio.sleep(POLL_S)
                continue
            missing = None if self._lease else needs.missing
            try:
                self.num_queued = await self._store.trainers.register(
                    needs.name, needs.trainer, needs.samplers, missing
                )
            except (Unavailable, StoreEmptied):
                pass  # the worker reports it
            except Exception:  # the last resort of a background task: registered again soon
                get_logger().exception("trainer not registered", trainer=needs.trainer)
            await asyncio.sleep(REGISTER_TRAINER_S)

    async def _give_back(self) -> None:
        """Gives back the lease of work that was stopped while Redis was unreachable, so that the
        job need not wait until it expires."""
        if self._lease:
            with contextlib.suppress(LeaseLost):
                await self._store.halt(self._lease, None)
            await note_end(self._store, self._lease.job_id)  # the job may just have ended
        self._lease = None

    async def _tell(self, message: str, away: bool) -> None:
        """Tells followers of the running or next job that Redis is back."""
        self._news = None if away else message
        await self._say_news()

    async def _say_news(self) -> None:
        if self._news and self._lease:
            await self._store.report(self._lease, "log", self._news, level="warning")
            self._news = None

    async def _until_known(self) -> None:
        """Waits until Redis has the jobs of the runs folder, or an operator has decided to use
        it."""
        said = None
        while True:
            try:
                why = await self._store.check(self._settings.runs_dir)
                if why is None:
                    return
                if why != said:
                    get_logger().error("no job is accepted or run", reason=why)
                said = why
            except HoneError as error:  # Redis, or the folder of runs, cannot be used
                get_logger().warning("queue unavailable", reason=error.detail)
            await asyncio.sleep(PAUSE_S)

    async def _work(self, lease: Lease, taken_at: float) -> None:
        get_logger().info("job started", job=lease.job_id, attempt=lease.attempt)
        try:
            record = await self._store.get(lease.job_id)
        except (UnreadableRecord, NotFound) as error:
            get_logger().error("job cannot be read", job=lease.job_id, reason=error.detail)
            await self._store.halt(lease, error.detail)
            return
        await self._say_news()
        self._trainer.closing.add(lease.job_id)
        attempt = Attempt(
            record,
            lease,
            self._store,
            self._settings,
            self._needs,
            self._extensions,
            lambda: self.num_queued,
        )
        work = asyncio.create_task(attempt.run())
        renew = functools.partial(_beat, self._store, attempt.status)
        beat = asyncio.create_task(leases.keep(renew, lease, taken_at, self._redis))
        try:
            await asyncio.wait({work, beat}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._is_stopping = True
                beat.result()  # raises the heartbeat's error, unless a request ended it
                stopping = asyncio.create_task(stop(work))
                await asyncio.wait({stopping}, timeout=STOPS_WITHIN * lease.lease_s)
                if stopping.done():
                    await self._checkpoint(attempt, lease, renew)
                await self._store.halt(lease, None)
            else:
                await self._finish(lease, _outcome(work))
            self._lease = None
            await note_end(self._store, lease.job_id)
        finally:
            self._is_stopping = True
            try:
                await stop(work, beat)
            finally:
                try:
                    await asyncio.gather(beat, return_exceptions=True)  # an ended job has no lease
                    await attempt.close()
                finally:
                    self._is_stopping = False
                    self._trainer.closing.discard(lease.job_id)

    async def _checkpoint(self, attempt: Attempt, lease: Lease, renew: leases.Beat) -> None:
        """Lets a job that an operator stops write its checkpoint, and renews the lease meanwhile.
        Raises LeaseLost, and StoreUnavailable."""

        async def renew_alone(lease: Lease) -> None:
            await renew(lease)  # the request is known

        writing = asyncio.create_task(attempt.checkpoint())
        beat = asyncio.create_task(leases.keep(renew_alone, lease, time.monotonic(), self._redis))
        try:
            await asyncio.wait({writing, beat}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                beat.result()  # raises: the lease is lost
            writing.result()
        finally:
            await stop(writing, beat)
            await asyncio.gather(beat, return_exceptions=True)

    async def _finish(self, lease: Lease, outcome: Outcome) -> None:
        if outcome.status == "queued":
            get_logger().warning("job given back", job=lease.job_id, reason=outcome.why)
            await self._store.leave(lease, str(outcome.why))
        elif outcome.status == "paused":
            get_logger().warning("job paused", job=lease.job_id, reason=outcome.why)
            resume = f", then `hone resume {lease.job_id}` continues from there"
            is_resumed = outcome.pause_reason == "error" and outcome.resumes
            why = f"{outcome.why}{resume if is_resumed else ''}"
            await self._store.halt(lease, why, outcome.pause_reason)
        else:
            await self._end(lease, outcome)

    async def _end(self, lease: Lease, outcome: Outcome) -> None:
        status, why = outcome.status, outcome.why
        failed = status == "failed"
        get_logger().info("job ended", job=lease.job_id, status=status, reason=why)
        await self._store.report(
            lease,
            "status",
            (why if failed else None) or status,
            {"status": status},
            level="error" if failed else "info",
            status=status,
            error=why if failed else None,
            stopped=None if failed else why,
            summary=outcome.summary,
        )


async def _beat(store: Store, status: AttemptStatus, lease: Lease) -> LeaseRequest | None:
    """Renews the lease, and reports what the job does."""
    try:
        line, waits = status.line(), status.waits()
    except Exception:  # a bug in this text must not cost the job its lease
        get_logger().exception("status line of the job not made", job=lease.job_id)
        line = waits = None
    return await store.beat(lease, line, waits)


def _outcome(work: asyncio.Task[Outcome]) -> Outcome:
    """Returns the outcome of the job, also if something within its work cancelled it."""
    if work.cancelled():
        return Outcome("paused", WORK_CANCELLED)
    return work.result()
