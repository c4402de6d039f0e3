"""A disk that takes as long as a test says."""

from __future__ import annotations

import asyncio
import threading


class SlowDisk:
    """A write, in a thread, ends once it `goes_on`."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.written: list[str] = []

    def write(self, what: str) -> str:
        self.begun.set()
        assert self.goes_on.wait(20)
        self.written.append(what)
        return what

    async def until_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 20)
