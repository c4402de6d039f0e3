"""An event loop in a thread of its own, for synchronous code that calls asynchronous code.

So the client works where a loop already runs (a notebook), and Ctrl-C is never lost: it is raised
where the caller waits. If it went through the loop as a cancellation, whatever it interrupts
there could swallow it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

CLOSE_S = 1.0
"""How long what still runs has to end."""


class Background:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="hone-client", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns what `work` returns. Interrupted, it leaves the rest of it to be cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def iterate(self, stream: AsyncGenerator[T]) -> Iterator[T]:
        """Yields what `stream` does."""
        items: SimpleQueue[T | None] = SimpleQueue()

        async def pump() -> None:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    items.put(item)

        future = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        future.add_done_callback(lambda _: items.put(None))
        try:
            while (item := items.get()) is not None:
                yield item
            future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancels what still runs, and ends the thread."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=CLOSE_S)

        if self._loop.is_closed():
            return
        self.run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
