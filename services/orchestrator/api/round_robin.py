"""Chooses the caller that is served next, if only a few can be served at a time."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Hashable

from shared.errors import Busy

MAX_WAITING_BYTES = 64 << 20
"""Most bytes of jobs that wait for a turn: some ten thousand jobs, or 250 of the largest."""

LEAST_BYTES = 4096
"""Bytes that each job counts for at least."""

MAX_RETRY_AFTER_S = 60


class RoundRobin:
    """Serves `num` requests at a time. Callers take turns: a caller with a thousand requests delays
    each other caller by one of them. A caller never gets the last free place if it has all others,
    so another caller need not wait for slow work. Raises Busy beyond `MAX_WAITING_BYTES`.

    The caller that began a turn ends it. The sandbox (`services/reward/sandbox/base.py`) is
    similar, but gives turns by time used, and at three levels.
    """

    def __init__(self, num: int) -> None:
        self._num = num
        self._running: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        self._num_bytes = 0
        self._mean_s = 1.0

    async def begin(self, who: Hashable, size_bytes: int = 0) -> float:
        """Waits for a turn of `who`. Returns when it began, which `end` needs."""
        size_bytes = max(size_bytes, LEAST_BYTES)
        if self._num_bytes and self._num_bytes + size_bytes > MAX_WAITING_BYTES:
            raise self._busy()
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(turn)
        self._num_bytes += size_bytes
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end(who)
            raise
        finally:
            self._num_bytes -= size_bytes
            self._forget(who, turn)
        return time.monotonic()

    def end(self, who: Hashable, began: float) -> None:
        self._mean_s += 0.1 * (time.monotonic() - began - self._mean_s)
        self._end(who)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _end(self, who: Hashable) -> None:
        self._running -= Counter([who])
        self._give()

    def _give(self) -> None:
        while self._running.total() < self._num and (who := self._next()) is not None:
            (name, waiting) = who
            del self._waiting[name]
            turn = waiting.popleft()
            if waiting:
                self._waiting[name] = waiting  # behind all others
            if not turn.done():
                self._running[name] += 1
                turn.set_result(None)

    def _next(self) -> tuple[Hashable, deque[asyncio.Future[None]]] | None:
        most = max(self._num - 1, 1)
        allowed = (item for item in self._waiting.items() if self._running[item[0]] < most)
        return next(allowed, None)

    def _forget(self, who: Hashable, turn: asyncio.Future[None]) -> None:
        if turn in (waiting := self._waiting.get(who, deque())):
            waiting.remove(turn)
            if not waiting:
                del self._waiting[who]

    def _busy(self) -> Busy:
        wait_s = math.ceil(self.num_waiting * self._mean_s / self._num)
        return Busy(
            f"{self.num_waiting} jobs wait to be checked, which take {self._num_bytes} bytes; at "
            f"most {MAX_WAITING_BYTES} are held: ask again",
            retry_after_s=min(max(wait_s, 1), MAX_RETRY_AFTER_S),
        )
