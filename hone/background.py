"""An event loop in a thread of its own, for synchronous code that calls asynchronous code.

So the client works where a loop already runs (a notebook), and Ctrl-C is never lost: it is raised
where the caller waits. If it were a cancellation in the loop, the interrupted code could swallow
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from shared.errors import BadRequest

T = TypeVar("T")
U = TypeVar("U")

CLOSE_S = 1.0
"""Seconds for running work to end."""

INTERRUPTED_S = 12.0
"""Seconds that interrupted work has to clean up."""


class Background:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="hone-client", daemon=True
        )
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`. When interrupted, it cancels the work and waits for its
        end, at most `INTERRUPTED_S`."""
        if self.is_closed:
            work.close()
            raise BadRequest("the client is closed; expected a new one")
        ended: SimpleQueue[asyncio.Task[T]] = SimpleQueue()
        begun: list[asyncio.Task[T]] = []

        def begin() -> None:
            begun.append(self._loop.create_task(work))
            begun[0].add_done_callback(ended.put)

        def cancel() -> None:
            begun[0].cancel()

        self._loop.call_soon_threadsafe(begin)
        try:
            task = ended.get()
        except BaseException:  # Ctrl-C; raised again
            self._loop.call_soon_threadsafe(cancel)
            with contextlib.suppress(Empty):
                ended.get(timeout=INTERRUPTED_S)
            raise
        return task.result()

    def iterate(
        self, stream: AsyncGenerator[T], told: SimpleQueue[T | U | None] | None = None
    ) -> Iterator[T | U]:
        """Yields the items of `stream`, and in between the items that it puts into `told`. When
        interrupted, the rest of the stream is cancelled."""
        items = SimpleQueue[T | U | None]() if told is None else told

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
        """Cancels running work, and ends the thread."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=CLOSE_S)

        if self.is_closed:
            return
        self.run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
