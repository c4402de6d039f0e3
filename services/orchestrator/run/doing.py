"""A run's state in one line for its followers: the stage, which services it waits for and how long,
which are away, and the next stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.orchestrator.pool.waits import Waits
from shared.http.presence import since


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
        """Returns the line. `away` maps services that are away, as "the trainer service", to Unix
        times since when."""
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
    return [f"{who} is away {since(at)}" for who, at in sorted(away.items())]
