"""Work in a thread of its own, awaited in the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


async def in_own_thread(act: Callable[[], T]) -> T:
    """Returns the result of `act`. For work that may hang: it takes no thread of the pool, and the
    process can end before it."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(act())
        except BaseException as error:  # raised again where the result is awaited
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(result)


class Look(Generic[T]):
    """Runs a check that may hang, such as of a disk; the caller waits for at most `within_s`. Only
    one check runs at a time, and all callers share its deadline. So a disk that hangs holds one
    thread, and delays later callers no further."""

    def __init__(self, within_s: float) -> None:
        self.within_s = within_s
        self._under_way: asyncio.Task[T] | None = None
        self._ends = 0.0

    async def at(self, look: Callable[[], T], late: T) -> T:
        """Returns the result of `look`, or of the check that is running already; `late` if it takes
        too long."""
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.create_task(in_own_thread(look))
            self._ends = time.monotonic() + self.within_s
        asked = self._under_way  # another caller may start the next check first
        done, _ = await asyncio.wait({asked}, timeout=max(self._ends - time.monotonic(), 0.0))
        return asked.result() if done else late
