"""Takes jobs from the queue and runs them, one at a time: there is one trainer.

While a job runs, its lease is renewed. A lease lost to another worker stops the work here at once,
without a word to the store.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time

from services.orchestrator.loop.groups import MustPause
from services.orchestrator.loop.run import Run
from services.orchestrator.loop.tasks import stop
from services.orchestrator.queue.store import Lease, LeaseLost, Store, StoreUnavailable
from shared.config import Settings
from shared.errors import HoneError, Unavailable
from shared.logs import get_logger

BLOCK_S = 1.0
MAX_BEAT_S = 1.0
PAUSE_S = 2.0


class Worker:
    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"

    async def run_forever(self) -> None:
        """Works until cancelled. While Redis is away it waits; a job whose work that cut off is
        taken up again later."""
        while True:
            try:
                lease = await self._store.take(self._owner, self._settings.lease_s, BLOCK_S)
                if lease:
                    await self._work(lease)
            except Unavailable as error:
                get_logger().warning("queue unavailable", reason=error.detail)
                await asyncio.sleep(PAUSE_S)
            except LeaseLost as error:
                get_logger().warning("lease lost", job=str(error))

    async def _work(self, lease: Lease) -> None:
        get_logger().info("job started", job=lease.job_id, attempt=lease.attempt)
        record = await self._store.get(lease.job_id)
        work = asyncio.create_task(Run(record, lease, self._store, self._settings).run())
        beat = asyncio.create_task(self._keep(lease))
        try:
            await asyncio.wait({work, beat}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await stop(work)
                if beat.result() == "pause":
                    await self._store.halt(lease, None)
                else:
                    await self._end(lease, "cancelled", None)
            else:
                await self._finish(lease, work)
        finally:
            await stop(work, beat)

    async def _keep(self, lease: Lease) -> str:
        """Renews the lease; returns what is asked for, "cancel" or "pause", when it is."""
        while not (asked := await self._store.beat(lease)):
            await asyncio.sleep(min(self._settings.lease_s / 4, MAX_BEAT_S))
        return asked

    async def _finish(self, lease: Lease, work: asyncio.Task[dict[str, object]]) -> None:
        error = work.exception()
        if isinstance(error, LeaseLost | StoreUnavailable):
            raise error
        if error is None:
            summary = work.result()
            await self._store.report(
                lease,
                "status",
                "succeeded",
                {"status": "succeeded"},
                status="succeeded",
                finished_at=time.time(),
                summary=summary,
            )
        elif isinstance(error, MustPause):
            get_logger().warning("job paused", job=lease.job_id, reason=error.detail)
            await self._store.halt(
                lease,
                f"{error.detail}; see to it, then `hone resume {lease.job_id}` goes on from there",
            )
        elif isinstance(error, HoneError):
            await self._end(lease, "failed", error.detail)
        else:
            get_logger().error("job failed unexpectedly", job=lease.job_id, exc_info=error)
            await self._end(
                lease,
                "failed",
                f"a bug in Hone: {type(error).__name__}: {error}; the orchestrator's log has the "
                "trace",
            )

    async def _end(self, lease: Lease, status: str, error: str | None) -> None:
        get_logger().info("job ended", job=lease.job_id, status=status, error=error)
        level = "error" if error else "info"
        message = error or status
        await self._store.report(
            lease,
            "status",
            message,
            {"status": status},
            level=level,
            status=status,
            error=error,
            finished_at=time.time(),
        )
