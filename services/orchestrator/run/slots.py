"""The services on which a worker runs its jobs: a trainer and its samplers."""

from __future__ import annotations

import socket
import time

from services.orchestrator.run.needs import Needs
from services.orchestrator.store.resources import resource
from services.orchestrator.store.store import Store
from shared.host.logs import get_logger
from shared.settings import Settings

LOOK_AT_SLOT_S = 2.0
"""Seconds between two checks of the needs of jobs while the trainer is free."""


class Slot:
    """Leases are on `trainer` and `samplers`; `settings` name only these. `name` is the trainer's
    name with this host's. `missing` says why no job can run here now."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self.settings = settings
        self.trainer = resource(settings.trainer_url)
        self.samplers = sorted({resource(url) for url in settings.rollout_urls})
        self.needs = Needs(settings, store)
        self.name = f"{self.trainer}/{socket.gethostname()}"
        self.missing: str | None = None
        self.was_looked_at = False
        self._look_at = 0.0

    async def is_there(self) -> bool:
        """Returns whether everything that a job needs is available, as of at most two seconds
        ago."""
        if time.monotonic() >= self._look_at:
            await self.look()
        return self.missing is None

    async def look(self) -> None:
        """Checks everything that a job needs, and sets `missing`."""
        missing = await self.needs.missing()
        if missing != self.missing:
            get_logger().warning(
                "no job can be run" if missing else "jobs can be run",
                trainer=self.trainer,
                reason=missing,
            )
        self.missing, self.was_looked_at = missing, True
        self._look_at = time.monotonic() + LOOK_AT_SLOT_S
