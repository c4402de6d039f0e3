"""The needs of a job: a trainer, a sampler, the reward service, a writable runs folder, its data,
and its model's folder. No job is taken while one of them is unreachable; a running job that lost
one continues once it is back."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Literal

from services.orchestrator.data.sources import files_of
from services.orchestrator.samplers.discovery import no_sampler, sampler_urls
from services.orchestrator.store.leases import resource
from services.orchestrator.store.store import Store
from services.orchestrator.writable import ANSWERS_WITHIN_S, why_not_writable
from shared.errors import HoneError
from shared.host.logs import get_logger
from shared.host.processes import BoundedProbe
from shared.http import ownership
from shared.http.client import Client
from shared.job import Job
from shared.settings import Settings
from shared.wire import ServingWeights, TrainerState, VersionInfo

ANSWER_S = 5.0
"""Seconds for a service to answer."""

LOOK_AT_NEEDS_S = 2.0
"""Seconds between two checks of the needs of jobs while the trainer is free."""

ServiceName = Literal["trainer", "rollout", "reward"]
Answer = TrainerState | ServingWeights | VersionInfo

ASKED: dict[ServiceName, tuple[str, type[Answer]]] = {
    "trainer": ("/state", TrainerState),
    "rollout": ("/weights", ServingWeights),
    "reward": ("/version", VersionInfo),
}
"""The request that shows whether a service is there. Trainer and sampler also say whether another
orchestrator has them."""


async def services_of(settings: Settings, store: Store) -> list[tuple[ServiceName, str]]:
    """Returns the name and URL of each service: trainers, samplers, and the reward service."""
    samplers = await sampler_urls(settings.rollout_urls, store.samplers.urls)
    return [
        *(("trainer", url) for url in settings.trainer_urls),
        *(("rollout", url) for url in samplers),
        ("reward", settings.reward_url),
    ]


class Dependencies:
    """The needs of all jobs of one trainer. `settings` name the trainer and its samplers; leases
    are on `trainer` and `samplers`. `name` is the trainer's name with this host's. `missing` says
    which of the needs was missing at the last look, None if none was."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self.trainer = resource(settings.trainer_url)
        self.samplers = sorted({resource(url) for url in settings.rollout_urls})
        self.name = f"{self.trainer}/{socket.gethostname()}"
        self.missing: str | None = None
        self.checked_at: float | None = None
        self._folder = BoundedProbe[str | None](ANSWERS_WITHIN_S)

    async def ready(self) -> bool:
        """Returns whether nothing was missing, as of at most two seconds ago."""
        if self.checked_at is None or time.monotonic() >= self.checked_at + LOOK_AT_NEEDS_S:
            await self.look()
        return self.missing is None

    async def another_trainer(self) -> str | None:
        """Returns another trainer that takes a job now; None if there is none."""
        every = await self._store.trainers.all()
        return next((t.trainer for t in every if t.trainer != self.trainer and t.free), None)

    async def look(self) -> str | None:
        """Returns what is unreachable now, as sentences; None if nothing is."""
        missing = await self._find_missing()
        if missing != self.missing:
            get_logger().warning(
                "no job can be run" if missing else "jobs can be run",
                trainer=self.trainer,
                reason=missing,
            )
        self.missing, self.checked_at = missing, time.monotonic()
        return missing

    async def _find_missing(self) -> str | None:
        services = await services_of(self._settings, self._store)
        asked = (self._away(name, url) for name, url in services)
        folder, trainer, *samplers, reward = await asyncio.gather(self._folder_away(), *asked)
        rollout = None if None in samplers else "; ".join(filter(None, samplers))
        if not samplers:
            rollout = no_sampler(self._settings)
        return "; ".join(filter(None, (trainer, rollout, reward, folder))) or None

    async def _folder_away(self) -> str | None:
        runs_dir = self._settings.runs_dir
        late = (
            f"folder {str(runs_dir)!r} gave no answer within {ANSWERS_WITHIN_S:g} s; check "
            "HONE_RUNS_DIR and its disk"
        )
        return await self._folder.at(
            lambda: why_not_writable(runs_dir) or self._store.unmounted(runs_dir), late
        )

    async def _away(self, name: ServiceName, url: str) -> str | None:
        """Returns why no job can use the service: it does not answer, or is taken. None if a job
        can."""
        token = self._settings.bearer()
        headers = ownership.headers(self._store.identity, self._settings)
        path, kind = ASKED[name]
        async with Client(name, url, token=token, patience_s=0.0, headers=headers) as client:
            try:
                found = await client.get(path, kind, deadline_s=ANSWER_S)
            except HoneError as error:
                return error.detail
        return None if isinstance(found, VersionInfo) else found.taken


class DataFiles:
    """The files that a job needs: its data, and its model's configuration. A hanging disk keeps no
    caller waiting."""

    def __init__(self, job: Job, settings: Settings) -> None:
        self.job = job
        self._settings = settings
        self._look = BoundedProbe[str | None](ANSWERS_WITHIN_S)

    async def missing(self) -> str | None:
        """Returns which file cannot be read, as a sentence; None if all can."""
        late = f"the job's data cannot be read: its disk gave no answer in {ANSWERS_WITHIN_S:g} s"
        return await self._look.at(self._first_unreadable, late)

    def _first_unreadable(self) -> str | None:
        for key, path in files_of(self.job, self._settings):
            if why := _unreadable(path):
                return f"{key} cannot be read at {str(path)!r}: {why}"
        return None


def _unreadable(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        return error.strerror or str(error)
    return None
