"""Where the data of jobs that are submitted is read and tried: in threads of its own, so that it
delays nothing else that the orchestrator does in threads."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shared.errors import Busy

NUM_THREADS = 2
"""Checks at a time: templates are rendered one after the other anyway."""

MAX_CHECKS = 32
"""Checks under way or waiting. At ten seconds each, more would wait for minutes."""

T = TypeVar("T")


class Checking:
    """Raises Busy beyond `MAX_CHECKS`."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "checking")
        self._num = 0

    async def run(self, check: Callable[[], T]) -> T:
        """Returns what the check returns, as whoever calls (`gate.caller`)."""
        if self._num >= MAX_CHECKS:
            raise Busy(
                f"the data of {self._num} jobs is being checked or waits for it; at most "
                f"{MAX_CHECKS} are taken, ask again"
            )
        self._num += 1
        try:
            context = contextvars.copy_context()
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, lambda: context.run(check))
        finally:
            self._num -= 1


CHECKING = Checking()
