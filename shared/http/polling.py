"""Waiting for many operations of one service in one request.

A caller is woken once its operation has ended, or once the service no longer answers the wait. In
both cases the caller's own GET gets the result or the error, so this file handles no errors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx2 as httpx

from shared.errors import HoneError
from shared.http import codec
from shared.wire import WAIT_PATH, WaitRequest, WaitResult

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0
"""Seconds between two attempts to reach a service: doubled each time, up to the maximum."""

GATHER_S = 0.02
"""While a poll is running, new operations are gathered for this long and then polled together.
Without a running poll an operation is polled at once."""

MAX_POLLS = 4
"""Most polls at once. Instead of one more, a single poll takes over all operations."""


class Poller:
    """Polls for one client while it waits for operations. `heard_at` is the time of the service's
    last answer. Each poll also returns once the service is less busy than `busy_below()`. `heard`
    is called with how busy the service is."""

    def __init__(self, http: httpx.AsyncClient, wait_s: float) -> None:
        self._http = http
        self._wait_s = wait_s
        self._pause_s = FIRST_PAUSE_S
        self._waiting: dict[str, asyncio.Event] = {}
        self._not_asked: set[str] = set()
        self._asked: set[str] = set()
        self._polls: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._busy: int | None = None
        self.heard_at = 0.0
        self.busy_below: Callable[[], int | None] = lambda: None
        self.heard: Callable[[int], None] = lambda _: None

    async def ended(self, location: str, timeout_s: float) -> bool:
        """Returns True once the caller should ask for the operation at `location`, False after
        `timeout_s` seconds."""
        id = location.rpartition("/")[2]
        woken = self._waiting.setdefault(id, asyncio.Event())
        if id not in self._asked:
            self._ask_soon(id)
        try:
            async with asyncio.timeout(timeout_s):
                return await woken.wait()
        except TimeoutError:
            return False
        finally:
            if self._waiting.get(id) is woken:
                del self._waiting[id]

    async def close(self) -> None:
        self._waiting.clear()
        if self._timer:
            self._timer.cancel()
        for poll in self._polls:
            poll.cancel()
        await asyncio.gather(*self._polls, return_exceptions=True)

    def _ask_soon(self, *ids: str) -> None:
        self._not_asked.update(ids)
        if self._timer is None:
            gather_s = GATHER_S if self._polls else 0.0
            self._timer = asyncio.get_running_loop().call_later(gather_s, self._start)

    def _start(self) -> None:
        self._timer = None
        if len(self._polls) >= MAX_POLLS:
            for poll in self._polls:
                poll.cancel()  # their operations are polled again
        ids = tuple(id for id in self._not_asked if id in self._waiting)
        self._not_asked.clear()
        if ids:
            self._asked.update(ids)
            poll = asyncio.create_task(self._poll(ids))
            self._polls.add(poll)
            poll.add_done_callback(self._polls.discard)

    async def _poll(self, ids: tuple[str, ...]) -> None:
        try:
            for id in await self._ended_of(ids):
                if woken := self._waiting.pop(id, None):
                    woken.set()
        finally:
            self._asked.difference_update(ids)
            if left := [id for id in ids if id in self._waiting]:
                self._ask_soon(*left)

    async def _ended_of(self, ids: tuple[str, ...]) -> tuple[str, ...]:
        """Returns which operations have ended; all of them if the service does not say."""
        try:
            done = await self._ask(ids)
        except (httpx.RequestError, HoneError):
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(self._pause_s * 2, MAX_PAUSE_S)
            return ids
        self._pause_s = FIRST_PAUSE_S
        self.heard_at = time.monotonic()
        self._busy = done.busy
        self.heard(done.busy)
        return done.ids

    async def _ask(self, ids: tuple[str, ...]) -> WaitResult:
        wanted = WaitRequest(
            ids=ids, wait_s=self._wait_s, busy_below=self.busy_below(), busy=self._busy
        )
        headers = {"content-type": codec.JSON, "accept": codec.JSON}
        response = await self._http.post(WAIT_PATH, content=codec.encode(wanted), headers=headers)
        if response.status_code != 200:
            raise HoneError(f"{WAIT_PATH} answered {response.status_code}")
        return codec.decode(WaitResult, response.content)
