"""Rebuilds the records of jobs from their run folders, after Redis was lost."""

from __future__ import annotations

import asyncio

from services.orchestrator.api.access import TOKEN_ONLY
from services.orchestrator.runs.found import find_runs
from services.orchestrator.store.store import Store
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import NoBody, Recovered


def add_route(service: Service, settings: Settings, store: Store) -> None:
    async def recover(_: NoBody) -> Recovered:
        """Makes a record for every run folder without one: a job that had ended has ended the same
        way, any other is paused. Accepts the present Redis as the Redis of the jobs. Doing it again
        changes nothing."""
        runs = await asyncio.to_thread(find_runs, settings.runs_dir)
        jobs = await store.recover(runs, settings.runs_dir)
        return Recovered(jobs=tuple(jobs))

    service.operation("POST", "/v1/recover", recover, dependencies=[TOKEN_ONLY])
