"""Samplers that register themselves; a registration lasts as long as the sampler renews its
lease."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Path

from services.orchestrator.api.access import TOKEN_ONLY
from services.orchestrator.store.store import Store
from shared.errors import BadRequest
from shared.http.service import Service
from shared.http.urls import REGISTERED, is_loopback
from shared.settings import Settings
from shared.wire import RegisteredSampler, Registration, SamplerList, Unregistered

Name = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,99}$")]


def add_routes(service: Service, settings: Settings, store: Store) -> None:
    app = service.app

    @app.put("/v1/samplers/{replica}", dependencies=[TOKEN_ONLY])
    async def register(replica: Name, registration: Registration) -> RegisteredSampler:
        """Registers a sampler, or renews its lease. Running jobs find it within seconds."""
        _check(replica, registration, settings)
        return await store.samplers.register(replica, registration)

    @app.delete("/v1/samplers/{replica}", dependencies=[TOKEN_ONLY])
    async def unregister(replica: Name, boot_id: str | None = None) -> Unregistered:
        """Ends a sampler's registration; with `boot_id` only if that process registered. Running
        jobs give it no further groups."""
        await store.samplers.unregister(replica, boot_id)
        return Unregistered(replica=replica)

    @app.get("/v1/samplers")
    async def list_samplers() -> SamplerList:
        """The registered samplers, when their leases end, and the versions that they serve."""
        return SamplerList(samplers=tuple(await store.samplers.all()))


def _check(replica: str, registration: Registration, settings: Settings) -> None:
    """Raises BadRequest for a sampler that no job would ever use, or, without a token, for a
    sampler on another machine."""
    if REGISTERED not in settings.rollout_urls:
        raise BadRequest(
            f"sampler {replica!r} cannot register: HONE_ROLLOUT_URL of this orchestrator does not "
            f'have "{REGISTERED}" among its places, so no job would use it'
        )
    host = urlsplit(registration.url).hostname or ""
    if settings.token is None and not is_loopback(host):
        raise BadRequest(
            f"'url': got {registration.url!r}, and this orchestrator has no HONE_TOKEN; without "
            "one, only samplers of its own machine can register, such as http://127.0.0.1:8001"
        )
