"""Measures a step's wall-clock seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class Stopwatch:
    """`lap(name)` adds the seconds since the last lap, or the start, to `seconds[name]`."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


class Stages:
    """Times concurrent work through shared stages. A stage lasts from when the last part left the
    stage before until the last part leaves this one."""

    def __init__(self, *names: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.began_at = clock()
        self._last_at: dict[str, float | None] = dict.fromkeys(names)

    def through(self, name: str) -> None:
        """Notes that a part has left the stage."""
        self._last_at[name] = self._clock()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by stage; 0 for a stage that no part went through."""
        since, found = self.began_at, dict[str, float]()
        for name, at in self._last_at.items():
            found[name] = max((at or since) - since, 0.0)
            since += found[name]
        return found

    @property
    def span(self) -> tuple[float, float]:
        """When the work began, and when the last stage ended."""
        return self.began_at, self.began_at + sum(self.seconds.values())


class StepClock:
    """Measures one step after another, without a gap between them. `busy_s` returns the seconds so
    far in which each service had work of the job."""

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
