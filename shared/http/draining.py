"""The state of a service between SIGTERM and its end. It tells waiting callers at once that it will
not finish their work."""

from __future__ import annotations

import asyncio
from typing import Any

from shared.errors import Unavailable


class Draining:
    """Whether the service `name` drains. Begins once, in the service's event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = asyncio.Event()
        self._streams: set[asyncio.Task[Any]] = set()

    def begin(self) -> None:
        """Releases everyone in `wait` and ends the streams."""
        self._begun.set()
        for task in self._streams:
            task.cancel()

    def has_begun(self) -> bool:
        return self._begun.is_set()

    async def wait(self) -> None:
        await self._begun.wait()

    def error(self) -> Unavailable:
        return Unavailable(
            f"the {self._name} service is shutting down; ask the one that follows it",
            code="draining",
        )

    def ends_stream(self, task: asyncio.Task[Any]) -> None:
        """Cancels the task when draining begins. The task answers a stream that would never end by
        itself."""
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)
