"""How far a run is: in a line for its followers, and how much longer it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from services.orchestrator.samplers.waits import Waits
from shared.http.connecting import since


@dataclass
class Doing:
    """The present `stage`, and the `next` one ("" if obvious). `details` are services' messages
    while they load. `missing` says, as a sentence, what the job needs and lacks."""

    stage: str = "beginning"
    next: str = ""
    details: dict[str, str] = field(default_factory=dict[str, str])
    missing: str | None = None

    def begin(self, stage: str, next: str = "", missing: str | None = None) -> None:
        self.stage, self.next, self.details, self.missing = stage, next, {}, missing

    def line(self, waits: Waits, away: Mapping[str, float]) -> str:
        """Returns the line. `away` maps services that are unreachable, as "the trainer service", to
        Unix times since when."""
        parts = [
            *waits.told(),
            *(f"the {service} is {what}" for service, what in sorted(self.details.items())),
            *_away(away),
        ]
        told = f": {'; '.join(parts)}" if parts else ""
        return f"{self.stage}{told}{f'; then {self.next}' if self.next else ''}"

    def waits(self, away: Mapping[str, float]) -> str | None:
        """Returns what the job needs and lacks; None if it lacks nothing."""
        return self.missing or "; ".join(_away(away)) or None


def _away(away: Mapping[str, float]) -> list[str]:
    return [f"{who} is unreachable {since(at)}" for who, at in sorted(away.items())]


class Progress:
    """Measures the steps since the last replayed step: a replay samples nothing, so its time says
    little."""

    def __init__(
        self, last_step: int, num_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_steps = num_steps
        self._clock = clock
        self._since = last_step, clock()

    def eta_s(self, step: int, *, replayed: bool) -> float | None:
        """Returns the seconds left once `step` is done; None while nothing was measured."""
        now = self._clock()
        if replayed:
            self._since = step, now
            return None
        first, since = self._since
        return (now - since) / (step - first) * (self._num_steps - step)
