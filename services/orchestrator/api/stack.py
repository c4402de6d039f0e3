"""`GET /v1/services`: what each service of the stack says of itself now, for people who look."""

from __future__ import annotations

import asyncio
import math
import time
from urllib.parse import urlsplit

import httpx2 as httpx
from prometheus_client.parser import text_string_to_metric_families

from services.orchestrator.pool.discovery import sampler_urls
from services.orchestrator.run.needs import ASKED
from services.orchestrator.store.store import Store
from shared.errors import from_problem
from shared.http.connecting import proxy_headers, trusted_by
from shared.http.service import Service
from shared.http.urls import is_direct, without_password
from shared.settings import Settings
from shared.wire import ServiceList, ServiceState, ServingWeights, TrainerState

ANSWER_S = 3.0
"""Seconds for a service to answer. A service that computes answers too."""


def add_route(service: Service, settings: Settings, store: Store) -> None:
    answered: dict[str, float] = {}

    @service.app.get("/v1/services")
    async def services() -> ServiceList:
        """Each trainer, sampler and reward service of this orchestrator: whether it answers, what
        it serves, and its load."""
        samplers = await sampler_urls(settings.rollout_urls, store.samplers.urls)
        places = [("trainer", url) for url in settings.trainer_urls]
        places += [("rollout", url) for url in samplers] + [("reward", settings.reward_url)]
        found = await asyncio.gather(*(_look(*place, settings, answered) for place in places))
        return ServiceList(services=tuple(found))


async def _look(
    name: str, url: str, settings: Settings, answered: dict[str, float]
) -> ServiceState:
    """Returns what the service says. Keeps when it `answered` last, by URL."""
    token = settings.bearer()
    own = {"authorization": f"Bearer {token}"} if token else {}
    state, gauges, error = None, {}, None
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            httpx.AsyncClient(
                base_url=url,
                headers=own | proxy_headers(url),
                trust_env=not is_direct(urlsplit(url).hostname or ""),
                verify=trusted_by(url),
            ) as http,
        ):
            path, kind = ASKED[name]
            asked, metrics = await asyncio.gather(http.get(path), http.get("/metrics"))
            if asked.status_code == 200:
                state = kind.model_validate_json(asked.content, extra="ignore")
                gauges = _gauges(metrics.text, name)
                answered[url] = time.time()
            else:
                error = from_problem(asked.status_code, asked.json(), name).detail
    except TimeoutError:
        error = f"it gave no answer in {ANSWER_S:g} s"
    except (httpx.HTTPError, ValueError) as problem:
        error = f"it does not answer ({type(problem).__name__})"
    return ServiceState(
        service=name,
        url=without_password(url),
        error=error,
        answered_at=answered.get(url),
        trainer=state if isinstance(state, TrainerState) else None,
        sampler=state.model_copy(update={"canary_logprobs": ()})
        if isinstance(state, ServingWeights)
        else None,
        gauges=gauges,
    )


def _gauges(text: str, name: str) -> dict[str, float]:
    """Returns the service's own metrics without labels, by their names without prefix."""
    prefix = f"hone_{name}_"
    return {
        sample.name.removeprefix(prefix): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(prefix) and not sample.labels and math.isfinite(sample.value)
    }
