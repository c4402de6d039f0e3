"""What a run is at, in one line for whoever follows it: the stage, which services it waits for and
for how long, which are away, and what comes next."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.orchestrator.loop.waits import Waits


@dataclass
class Doing:
    """The `stage` now, and what is `next` ("" if that is plain). `details` are what services say of
    themselves while they load."""

    stage: str = "beginning"
    next: str = ""
    details: dict[str, str] = field(default_factory=dict[str, str])

    def begin(self, stage: str, next: str = "") -> None:
        self.stage, self.next, self.details = stage, next, {}

    def line(self, waits: Waits, away: Mapping[str, float]) -> str:
        """Returns the line. `away` are services, and since when (Unix time)."""
        parts = [
            *waits.told(),
            *(f"the {service} is {what}" for service, what in sorted(self.details.items())),
            *(
                f"the {service} service is away {_since(at)}"
                for service, at in sorted(away.items())
            ),
        ]
        told = f": {'; '.join(parts)}" if parts else ""
        return f"{self.stage}{told}{f'; then {self.next}' if self.next else ''}"


def _since(at: float) -> str:
    clock = time.strftime("%H:%M:%S", time.gmtime(at))
    return f"since {clock} UTC ({time.time() - at:.0f} s)"
