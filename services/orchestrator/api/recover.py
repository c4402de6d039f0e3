"""Rebuilding the records of jobs whose Redis was lost, from their run folders."""

from __future__ import annotations

import asyncio

from services.orchestrator.api.access import TOKEN_ONLY
from services.orchestrator.queue.store import Store
from services.orchestrator.record.found import find_runs
from shared.config import Settings
from shared.service import Service
from shared.wire import NoBody, Recovered


def add_route(service: Service, settings: Settings, store: Store) -> None:
    async def recover(_: NoBody) -> Recovered:
        """Gives every run folder whose job is not known a record: a job that ended well as it
        ended, any other as paused. Accepts the present Redis as the one that has the jobs. Doing it
        again changes nothing."""
        runs = await asyncio.to_thread(find_runs, settings.runs_dir)
        jobs = await store.recover(runs, settings.runs_dir)
        return Recovered(jobs=tuple(jobs))

    service.operation("POST", "/v1/recover", recover, dependencies=[TOKEN_ONLY])
