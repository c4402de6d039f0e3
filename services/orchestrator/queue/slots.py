"""What a worker runs its jobs on: a trainer and the samplers that belong to it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence

from services.orchestrator.loop.discovery import Registered, sampler_urls
from services.orchestrator.queue.resources import resource
from shared.client import Client
from shared.config import Settings
from shared.errors import HoneError
from shared.logs import get_logger
from shared.wire import VersionInfo

LOOK_AT_SLOT_S = 2.0
"""Seconds between two looks at whether a free trainer and its samplers are there."""

ANSWER_S = 5.0
"""Seconds for one of them to answer."""


class Slot:
    """`trainer` and `samplers` are what leases are on; `settings` name them and no others. `name`
    is that of the trainer as this host sees it."""

    def __init__(self, settings: Settings, registered: Registered) -> None:
        self.settings = settings
        self.trainer = resource(settings.trainer_url)
        self.samplers = sorted({resource(url) for url in settings.rollout_urls})
        self._registered = registered
        self.name = f"{self.trainer}/{socket.gethostname()}"
        self.away: str | None = None
        self.was_looked_at = False
        self._look_at = 0.0

    async def is_there(self) -> bool:
        """Returns whether the trainer answers, and a sampler. It was asked for not long ago."""
        if time.monotonic() >= self._look_at:
            await self.look()
        return self.away is None

    async def look(self) -> None:
        """Asks trainer and samplers, and keeps in `away` why no job can be run, if so."""
        away = await self._away()
        if away != self.away:
            get_logger().warning(
                "a trainer is away" if away else "a trainer is there",
                trainer=self.trainer,
                reason=away,
            )
        self.away, self.was_looked_at = away, True
        self._look_at = time.monotonic() + LOOK_AT_SLOT_S

    async def _away(self) -> str | None:
        urls = await sampler_urls(self.settings.rollout_urls, self._registered)
        trainer, *samplers = await asyncio.gather(
            self._answers("trainer", self.settings.trainer_url),
            *(self._answers("rollout", url) for url in urls),
        )
        if trainer:
            return trainer
        return None if None in samplers else _none_of(samplers)

    async def _answers(self, name: str, url: str) -> str | None:
        """Returns why not."""
        token = self.settings.bearer()
        async with Client(name, url, token=token, patience_s=0.0) as client:
            try:
                await client.get("/version", VersionInfo, deadline_s=ANSWER_S)
            except HoneError as error:
                return error.detail
        return None


def _none_of(whys: Sequence[str | None]) -> str:
    return "; ".join(why or "" for why in whys) or "it has no samplers now"
