"""Routes of workers: leases of episodes that agents elsewhere play."""

from __future__ import annotations

import contextlib
from typing import Annotated

from fastapi import Path

from services.orchestrator.extensions.agents.worker_episodes import Episodes
from services.orchestrator.store.store import Store
from shared.errors import NotFound, Unavailable
from shared.http.service import Service
from shared.wire import (
    EpisodeResult,
    JobRecord,
    LeasedEpisodes,
    LeaseEpisodes,
    LeaseId,
    LeasesRenewed,
    RenewLeases,
    ResultTaken,
)

Id = Annotated[LeaseId, Path()]


def check_here(record: JobRecord) -> None:
    """Raises Unavailable for a job that runs, and not here: it may come here later."""
    if record.status == "running" and record.place is None:
        raise Unavailable(
            f"job {record.id!r} is run by another orchestrator, which has the trainer at "
            f"{record.trainer}, and episodes are leased by that one alone; expected its URL in "
            "HONE_ORCHESTRATOR_URL of the worker"
        )


def add_routes(service: Service, store: Store, episodes: Episodes) -> None:
    async def lease_episodes(body: LeaseEpisodes) -> LeasedEpisodes:
        """Takes episodes for a worker. Repeated with the same Idempotency-Key, it has the same
        answer. 503: another orchestrator runs the job."""
        taken = await episodes.lease(body)
        if body.job_id and not taken and not episodes.runs[body.job_id]:
            with contextlib.suppress(NotFound):  # it was deleted, and offers nothing
                check_here(await store.get(body.job_id))
        return LeasedEpisodes(episodes=taken)

    async def renew_leases(body: RenewLeases) -> LeasesRenewed:
        """Renews a worker's leases, and gives some back."""
        return episodes.renew(body)

    service.operation("POST", "/v1/episodes/lease", lease_episodes, cancellable=True)
    service.operation("POST", "/v1/episodes/renew", renew_leases)

    @service.app.post("/v1/episodes/{id}/result")
    async def end_episode(id: Id, result: EpisodeResult) -> ResultTaken:
        """Ends an episode with what it earned, or with why its agent failed."""
        return episodes.end(id, result)
