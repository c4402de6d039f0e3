"""The services of the stack: samplers that register themselves, whose registration lasts as long as
the sampler renews its lease; and the current state of each service."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated
from urllib.parse import urlsplit

import httpx2 as httpx
from fastapi import Path

from services.orchestrator.api.access import TOKEN_ONLY
from services.orchestrator.jobs.needs import ASKED, ServiceName, services_of
from services.orchestrator.store.store import Store
from shared.errors import BadRequest
from shared.http.connecting import client_options
from shared.http.operations import own_metrics
from shared.http.service import Service
from shared.http.urls import REGISTERED, is_loopback, without_password
from shared.settings import Settings
from shared.wire import (
    RegisteredSampler,
    Registration,
    SamplerList,
    ServiceList,
    ServiceState,
    ServingWeights,
    TrainerState,
    Unregistered,
)

Replica = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,99}$")]

FRESH_S = 2.0
"""Seconds for which all callers get the same answer."""

ANSWER_S = 3.0
"""Seconds for a service to answer. A service that is computing answers within this time too."""


def add_routes(service: Service, settings: Settings, store: Store) -> None:
    stack, app = Stack(settings, store), service.app

    @app.put("/v1/samplers/{replica}", dependencies=[TOKEN_ONLY])
    async def register(replica: Replica, registration: Registration) -> RegisteredSampler:
        """Registers a sampler, or renews its lease. Running jobs find it within seconds."""
        _check_registration(replica, registration, settings)
        return await store.samplers.register(replica, registration)

    @app.delete("/v1/samplers/{replica}", dependencies=[TOKEN_ONLY])
    async def unregister(replica: Replica, boot_id: str | None = None) -> Unregistered:
        """Ends a sampler's registration; with `boot_id` only if that process registered. Running
        jobs give it no further groups."""
        await store.samplers.unregister(replica, boot_id)
        return Unregistered(replica=replica)

    @app.get("/v1/samplers")
    async def list_samplers() -> SamplerList:
        """The registered samplers, when their leases end, and the versions that they serve."""
        return SamplerList(samplers=tuple(await store.samplers.all()))

    @app.get("/v1/services")
    async def services() -> ServiceList:
        """Each trainer, sampler and reward service of this orchestrator: whether it answers, what
        it serves, and its load, as of at most two seconds ago."""
        return await stack.services()


class Stack:
    """Requests the state of the services once for all concurrent callers."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self._lock = asyncio.Lock()
        self._found = ServiceList(services=())
        self._probed_at: float | None = None

    async def services(self) -> ServiceList:
        async with self._lock:
            now = time.monotonic()
            if self._probed_at is None or now >= self._probed_at + FRESH_S:
                self._found, self._probed_at = await self._look(), now
            return self._found

    async def _look(self) -> ServiceList:
        services = await services_of(self._settings, self._store)
        before = {one.url: one.answered_at for one in self._found.services}
        states = await asyncio.gather(*(_look(*service, self._settings) for service in services))
        return ServiceList(
            services=tuple(
                one.model_copy(update={"answered_at": one.answered_at or before.get(one.url)})
                for one in states
            )
        )


async def _look(name: ServiceName, url: str, settings: Settings) -> ServiceState:
    """Returns the service's current state."""
    state, error = None, None
    gauges: dict[str, float] = {}
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            httpx.AsyncClient(**client_options(url, settings.bearer())) as http,
        ):
            path, kind = ASKED[name]
            answer, metrics = await asyncio.gather(http.get(path), http.get("/metrics"))
            if answer.status_code == 200:
                state = kind.model_validate_json(answer.content, extra="ignore")
                gauges = own_metrics(metrics.text, name)
            else:
                error = f"it answers with status {answer.status_code}"
    except TimeoutError:
        error = f"it did not answer within {ANSWER_S:g} s"
    except httpx.HTTPError as problem:
        error = f"it does not answer ({type(problem).__name__})"
    except ValueError:
        error = f"its answer to GET {ASKED[name][0]} is no answer of a {name} service"
    return ServiceState(
        service=name,
        url=without_password(url),
        error=error,
        answered_at=None if error else time.time(),
        trainer=state if isinstance(state, TrainerState) else None,
        sampler=state.model_copy(update={"canary_logprobs": ()})
        if isinstance(state, ServingWeights)
        else None,
        gauges=gauges,
    )


def _check_registration(replica: str, registration: Registration, settings: Settings) -> None:
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
