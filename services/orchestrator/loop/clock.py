"""Where a step's wall-clock seconds go."""

from __future__ import annotations

import time


class Stopwatch:
    """`lap(name)` adds the seconds since the last lap, or the start, to `seconds[name]`."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now
