"""Work that has a thread of its own, and is waited for by the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


async def in_own_thread(act: Callable[[], T]) -> T:
    """Returns what `act` returns. It waits for no thread of the pool, and the process can end
    before it has: for what may hang, and must keep nobody waiting."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(act())
        except BaseException as error:  # raised again where the result is waited for
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(result)


class Look(Generic[T]):
    """Looks at what may hang, such as a disk, and keeps the caller waiting for `within_s` at most.
    Only one look runs at a time, and its callers together wait for it once: a disk that hangs holds
    one thread, however often it is asked about, and takes no more time."""

    def __init__(self, within_s: float) -> None:
        self.within_s = within_s
        self._under_way: asyncio.Task[T] | None = None
        self._ends = 0.0

    async def at(self, look: Callable[[], T], late: T) -> T:
        """Returns what `look`, or the look that is under way, returns; `late` if it takes too
        long."""
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.create_task(in_own_thread(look))
            self._ends = time.monotonic() + self.within_s
        asked = self._under_way  # another caller may begin the next look before this one is told
        done, _ = await asyncio.wait({asked}, timeout=max(self._ends - time.monotonic(), 0.0))
        return asked.result() if done else late
