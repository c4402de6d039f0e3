"""Routes of workers: leases of episodes that agents elsewhere play."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from services.orchestrator.play.agents import Episodes
from shared.http.service import Service
from shared.wire import (
    EpisodeResult,
    LeasedEpisodes,
    LeaseEpisodes,
    LeaseId,
    LeasesRenewed,
    RenewLeases,
    ResultTaken,
)

Id = Annotated[LeaseId, Path()]


def add_routes(service: Service, episodes: Episodes) -> None:
    async def lease_episodes(body: LeaseEpisodes) -> LeasedEpisodes:
        """Takes episodes for a worker. Repeated with the same Idempotency-Key, it has the same
        answer."""
        return LeasedEpisodes(episodes=await episodes.lease(body))

    async def renew_leases(body: RenewLeases) -> LeasesRenewed:
        """Renews a worker's leases, and gives some back."""
        return episodes.renew(body)

    service.operation("POST", "/v1/episodes/lease", lease_episodes, cancellable=True)
    service.operation("POST", "/v1/episodes/renew", renew_leases)

    @service.app.post("/v1/episodes/{id}/result")
    async def end_episode(id: Id, result: EpisodeResult) -> ResultTaken:
        """Ends an episode with what it earned, or with why its agent failed."""
        return episodes.end(id, result)
