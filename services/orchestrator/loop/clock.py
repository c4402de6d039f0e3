"""Where a step's wall-clock seconds go."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class Stopwatch:
    """`lap(name)` adds the seconds since the last lap, or the start, to `seconds[name]`.
    `span` is when it was started and when the last lap ended."""

    def __init__(self) -> None:
        self._began = self._since = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @property
    def span(self) -> tuple[float, float]:
        return self._began, self._since

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


class StepClock:
    """Measures one step after another, without a gap between them. `busy_s` gives for how many
    seconds each service had something of the job under way, so far."""

    def __init__(
        self,
        busy_s: Callable[[], Mapping[str, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._busy_s = busy_s
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Begins a step now."""
        self._began, self._before = self._clock(), dict(self._busy_s())

    def end(self) -> dict[str, float]:
        """Returns `time/step`, and as `utilization/<service>` the share of it in which the service
        was busy, 0 to 1; the next step begins."""
        began, before = self._began, self._before
        self.begin()
        seconds = self._began - began
        shares = {
            f"utilization/{service}": (busy_s - before.get(service, 0.0)) / seconds
            for service, busy_s in self._before.items()
        }
        return {"time/step": seconds, **(shares if seconds else {})}


def gap_s(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float:
    """Returns the seconds between the end of one span and the beginning of another, 0 if they
    overlap or one is missing."""
    return max(after[0] - before[1], 0.0) if before and after else 0.0
