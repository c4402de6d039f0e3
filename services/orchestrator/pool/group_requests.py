"""The requests for a job's groups at its samplers: one per group, after a while a second one at
another sampler. Requests that are not needed any more are ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from services.orchestrator.pool.admission import Admission
from services.orchestrator.pool.replica import Replica
from services.orchestrator.tasks import stop
from shared.errors import HoneError
from shared.host.logs import get_logger
from shared.settings import Settings
from shared.wire import Aborted, AbortRequest, GenerateRequest, RolloutGroup

ABORT_S = 2.0
"""Seconds for a sampler to end a job's requests. A stopped worker does not wait longer."""

HUNG = 1.2
"""A sampler that has not ended a group after this many deadlines counts as hanging."""


class GroupRequests:
    """`patience_s` returns how long a sampler with a group may be away, in seconds."""

    def __init__(
        self, settings: Settings, admission: Admission, patience_s: Callable[[Replica], float]
    ) -> None:
        self._settings = settings
        self._admission = admission
        self._patience_s = patience_s
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Stops the background requests."""
        tasks = [*self._tasks]
        await stop(*tasks)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def sample(
        self, replica: Replica, body: GenerateRequest, key: str
    ) -> tuple[Replica, RolloutGroup]:
        """Asks the sampler, and after a while also another one with room. Returns the sampler that
        answered first, and its group."""
        first = asyncio.create_task(self._ask(replica, body, key))
        asked = {first: replica}
        try:
            await asyncio.wait(asked, timeout=self._settings.hedge_s)
            if not first.done() and (other := self._admission.spare(replica)):
                asked[asyncio.create_task(self._hedge(other, body, key))] = other
            waiting = set(asked)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if not task.exception():
                        return asked[task], task.result()
            return replica, first.result()
        finally:
            losers = [asked[task] for task in asked if not task.done()]
            await stop(*asked)
            await asyncio.gather(*asked, return_exceptions=True)  # the loser's error is ignored
            if len(asked) > 1:
                for loser in losers:
                    self._end_there(loser, body, key)

    async def _hedge(self, other: Replica, body: GenerateRequest, key: str) -> RolloutGroup:
        get_logger().info("group sampled twice", key=key, url=other.url)
        other.take(body.sampling.n)
        try:
            return await self._ask(other, body, key)
        finally:
            other.give_back(body.sampling.n)
            self._admission.admit()

    async def _ask(self, replica: Replica, body: GenerateRequest, key: str) -> RolloutGroup:
        return await replica.client.call(
            "POST",
            "/generate",
            body,
            RolloutGroup,
            deadline_s=self._settings.generate_deadline_s * HUNG,
            key=key,
            wait_s=0,
            patience_s=self._patience_s(replica),
        )

    def _end_there(self, replica: Replica, body: GenerateRequest, key: str) -> None:
        """Ends the sampler's request for a group that another sampler has finished."""
        assert body.job_id is not None
        request = AbortRequest(
            job_id=body.job_id, attempt=body.attempt, epoch=body.epoch, keys=(key,)
        )
        self._start(self.abort(replica, request))

    async def abort(self, replica: Replica, body: AbortRequest) -> None:
        try:
            await replica.client.call("POST", "/abort", body, Aborted, deadline_s=ABORT_S)
        except HoneError as error:
            get_logger().warning(
                "not aborted", job=body.job_id, url=replica.url, reason=error.detail
            )

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
