"""Work that has a thread of its own, and is waited for by the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

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
