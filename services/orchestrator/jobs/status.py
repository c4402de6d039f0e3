"""What an attempt at a job does, what it waits for and since when, and how long it still takes. The
heartbeat brings the line and what is missing into the job's record; the finding `waits` and
everything else that says why a job waits reads them there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from services.orchestrator.samplers.waits import PendingCalls
from shared.http.connecting import since


class AttemptStatus:
    """The status of an attempt: its present `stage`, and the `next` one ("" if obvious). `details`
    are services' messages while they load. `missing` says, as a sentence, what the job needs and
    lacks. `calls` are its unanswered calls; `unreachable` maps services that are unreachable, as
    "the trainer service", to Unix times since when."""

    def __init__(
        self,
        calls: PendingCalls,
        unreachable: Callable[[], Mapping[str, float]] = dict[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls, self._unreachable, self._clock = calls, unreachable, clock
        self._num_steps, self._measured_since = 0, (0, 0.0)
        self._missing_since: float | None = None
        self.begin("beginning")

    def begin(self, stage: str, next: str = "", missing: str | None = None) -> None:
        self.stage, self.next, self.details = stage, next, dict[str, str]()
        self.missing = missing
        self._missing_since = (self._missing_since or time.time()) if missing else None

    def line(self) -> str:
        """Returns the line for the job's followers."""
        parts = [
            *self._calls.lines(),
            *(f"the {service} is {what}" for service, what in sorted(self.details.items())),
            *self._away(),
        ]
        told = f": {'; '.join(parts)}" if parts else ""
        waiting = f" {since(self._missing_since)}" if self._missing_since else ""
        return f"{self.stage}{waiting}{told}{f'; then {self.next}' if self.next else ''}"

    def waits(self) -> str | None:
        """Returns what the job needs and lacks; None if it lacks nothing."""
        return self.missing or "; ".join(self._away()) or None

    def _away(self) -> list[str]:
        found = sorted(self._unreachable().items())
        return [f"{who} is unreachable {since(at)}" for who, at in found]

    def begin_steps(self, last_step: int, num_steps: int) -> None:
        self._num_steps, self._measured_since = num_steps, (last_step, self._clock())

    def eta_s(self, step: int, *, replayed: bool) -> float | None:
        """Returns the seconds left once `step` is done; None while nothing was measured. The steps
        since the last replayed one are measured: a replay samples nothing, so its time says
        little."""
        now = self._clock()
        if replayed:
            self._measured_since = step, now
            return None
        first, began = self._measured_since
        return (now - began) / (step - first) * (self._num_steps - step)
