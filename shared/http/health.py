"""What a service says of its own state: the routes /healthz, /readyz, /metrics and /version, and
draining, the time between SIGTERM and the service's end. A draining service tells waiting callers
at once that it will not finish their work."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from shared.errors import Unavailable
from shared.http import openapi
from shared.wire import Dependency, Health, Readiness, VersionInfo

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz", "/version"})
"""Paths that need no token. Only the sampler has `/health`, as vLLM's server does."""


class Starting(str):
    """Why a dependency is not ready when it only needs time to start."""

    __slots__ = ()


Check = Callable[[], Awaitable[str | None]]
"""Returns None when the dependency is ready, else what it waits for."""


def hone_version() -> str:
    try:
        return version("hone-rl")
    except PackageNotFoundError:
        return "0+unknown"


def add_health_routes(
    app: FastAPI,
    name: str,
    readiness: Mapping[str, Check],
    registry: CollectorRegistry,
    draining: Draining,
    version_info: Callable[[], dict[str, Any]],
) -> None:
    @app.get("/healthz")
    async def healthz() -> Health:
        """The process lives."""
        return Health(service=name)

    not_ready: openapi.Responses = {503: openapi.problem_responses()[503] | {"model": Readiness}}

    @app.get("/readyz", responses=not_ready)
    async def readyz(response: Response) -> Readiness:
        """Every dependency, and whether the service is ready: 200 or 503."""
        details = {name: await check() for name, check in readiness.items()}
        if draining.has_begun():
            details["service"] = draining.error().detail
        ready = not any(details.values())
        response.status_code = 200 if ready else 503
        dependencies = {
            name: Dependency(
                ok=detail is None, detail=detail or "ready", starting=isinstance(detail, Starting)
            )
            for name, detail in details.items()
        }
        return Readiness(ready=ready, dependencies=dependencies)

    metrics_text: openapi.Responses = {
        200: openapi.without_model("metrics as text", "text/plain", schema=openapi.TEXT)
    }

    @app.get("/metrics", response_class=PlainTextResponse, responses=metrics_text)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version_() -> VersionInfo:
        """Versions of Hone and of the engine inside."""
        return VersionInfo(service=name, hone=hone_version(), **version_info())


def own_metrics(text: str, service: str) -> dict[str, float]:
    """Returns the service's own metrics without labels from the text of its `/metrics`, by their
    names without `hone_<service>_`."""
    prefix = f"hone_{service}_"
    return {
        sample.name.removeprefix(prefix): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(prefix) and not sample.labels and math.isfinite(sample.value)
    }


class Draining:
    """Whether the service `name` drains. Begins once, in the service's event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = asyncio.Event()
        self._streams: set[asyncio.Task[Any]] = set()

    def begin(self) -> None:
        """Releases everyone in `wait` and ends the streams."""
        self._begun.set()
        for task in self._streams:
            task.cancel()

    def has_begun(self) -> bool:
        return self._begun.is_set()

    async def wait(self) -> None:
        await self._begun.wait()

    def error(self) -> Unavailable:
        return Unavailable(
            f"the {self._name} service is shutting down; ask the one that follows it",
            code="draining",
        )

    def ends_stream(self, task: asyncio.Task[Any]) -> None:
        """Cancels the task when draining begins. The task answers a stream that would never end by
        itself."""
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)
