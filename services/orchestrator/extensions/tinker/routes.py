"""`/api/v1`: what the `tinker` SDK asks for. Every operation is answered at once with the id of its
future, once it is on disk; `/retrieve_future` has the result, and 408 until it is there."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import JSONResponse, Response

from services.orchestrator.api.checking import Checks
from services.orchestrator.extensions.tinker.bodies import MAX_JSON_BYTES, MAX_SAMPLE_BYTES, Bodies
from services.orchestrator.extensions.tinker.downloads import FILES, Downloads
from services.orchestrator.extensions.tinker.futures import Futures
from services.orchestrator.extensions.tinker.managing import Management
from services.orchestrator.extensions.tinker.models import Models
from services.orchestrator.extensions.tinker.operations import Operations
from services.orchestrator.extensions.tinker.paths import ROOT
from services.orchestrator.extensions.tinker.requests import read_ttl
from services.orchestrator.extensions.tinker.results import SAVED
from services.orchestrator.extensions.tinker.sampling import SampleOrders
from services.orchestrator.extensions.tinker.sampling_sessions import SamplingSessions
from services.orchestrator.store.store import Store
from services.orchestrator.store.writable import Writable
from shared.http.operations import DownloadedFile
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import SavedKind

CHECKPOINT = "training_runs/{id}/checkpoints/{checkpoint:path}"

Limit = Annotated[int, Query(ge=1, le=1000)]

Offset = Annotated[int, Query(ge=0)]

Answer = Callable[[dict[str, Any], str], Awaitable[Any]]
"""Returns the answer to a body of JSON and its digest."""


def add_routes(
    service: Service,
    settings: Settings,
    store: Store,
    writable: Writable,
    checks: Checks,
    orders: SampleOrders,
) -> None:
    bodies = Bodies()
    models = Models(settings, store, writable, checks)
    sessions = SamplingSessions(store, models, orders)
    futures = Futures(store, models, orders)
    _add_session_routes(service)
    _add_posts(service, bodies, models, sessions, Operations(store, models), futures)
    _add_management(service, bodies, models, sessions, Management(store))
    _add_downloads(service, models, Downloads(store, settings.runs_dir))


def _add(service: Service, method: str, path: str, route: Callable[..., Awaitable[Any]]) -> None:
    service.app.add_api_route(
        f"{ROOT}/{path}", route, methods=[method], include_in_schema=False, response_model=None
    )


def _add_session_routes(service: Service) -> None:
    """Adds the routes of the SDK's session, which is only its id."""

    async def create_session() -> dict[str, Any]:
        return {"type": "create_session", "session_id": secrets.token_hex(16)}

    async def heartbeat() -> dict[str, Any]:
        return {"type": "session_heartbeat"}

    async def telemetry() -> dict[str, Any]:
        return {"status": "accepted"}

    async def nothing() -> dict[str, Any]:
        return {}

    async def health() -> dict[str, Any]:
        return {"status": "ok"}

    _add(service, "POST", "create_session", create_session)
    _add(service, "POST", "session_heartbeat", heartbeat)
    _add(service, "POST", "telemetry", telemetry)
    _add(service, "POST", "client/config", nothing)
    _add(service, "POST", "sessions/{session}/finish", nothing)
    _add(service, "GET", "healthz", health)


def _add_posts(
    service: Service,
    bodies: Bodies,
    models: Models,
    sessions: SamplingSessions,
    operations: Operations,
    futures: Futures,
) -> None:
    async def forward_backward(request: Request) -> dict[str, Any]:
        return await operations.forward_backward(*await bodies.message(request))

    def add(path: str, answer: Answer, max_bytes: int = MAX_JSON_BYTES) -> None:
        async def route(request: Request) -> Response:
            found = await answer(*await bodies.json(request, max_bytes))
            return found if isinstance(found, Response) else JSONResponse(found)

        _add(service, "POST", path, route)

    def saving(kind: SavedKind) -> Answer:
        return lambda body, digest: operations.save(body, digest, kind)

    async def load(body: dict[str, Any], digest: str) -> dict[str, Any]:
        is_new = body.get("session_id") is not None
        return await (models.load(body) if is_new else operations.refuse_load(body, digest))

    for path in ("forward_backward", "forward"):
        _add(service, "POST", path, forward_backward)
    add("create_model", lambda body, _: models.create(body))
    add("load_weights", load)
    add("get_info", lambda body, _: models.info(body))
    add("weights_info", lambda body, _: models.weights_info(body))
    add("optim_step", operations.optim_step)
    for kind, path in SAVED.items():
        add(path, saving(kind))
    add("unload_model", operations.unload)
    add("create_sampling_session", lambda body, _: sessions.create(body))
    add("asample", lambda body, _: sessions.order(body), MAX_SAMPLE_BYTES)
    add("retrieve_future", lambda body, _: futures.retrieve(body))


def _add_management(
    service: Service,
    bodies: Bodies,
    models: Models,
    sessions: SamplingSessions,
    management: Management,
) -> None:
    async def training_runs(limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
        return await management.training_runs(limit, offset)

    async def training_run(id: str) -> dict[str, Any]:
        return await management.training_run(await models.get(id))

    async def checkpoints(id: str) -> dict[str, Any]:
        return await management.checkpoints(await models.get(id))

    async def all_checkpoints(limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
        return await management.all_checkpoints(limit, offset)

    async def delete(id: str, checkpoint: str) -> Response:
        await management.delete(await models.get(id), checkpoint)
        return Response(status_code=204)

    async def expire(id: str, checkpoint: str, request: Request) -> Response:
        body, _ = await bodies.json(request)
        await management.expire(await models.get(id), checkpoint, read_ttl(body))
        return Response(status_code=204)

    _add(service, "GET", "get_server_capabilities", models.capabilities)
    _add(service, "GET", "samplers/{id}", sessions.get)
    _add(service, "GET", "training_runs", training_runs)
    _add(service, "GET", "training_runs/{id}", training_run)
    _add(service, "GET", "training_runs/{id}/checkpoints", checkpoints)
    _add(service, "GET", "checkpoints", all_checkpoints)
    _add(service, "PUT", f"{CHECKPOINT}/ttl", expire)
    _add(service, "DELETE", CHECKPOINT, delete)


def _add_downloads(service: Service, models: Models, downloads: Downloads) -> None:
    async def urls(id: str, checkpoint: str, request: Request) -> dict[str, Any]:
        return await downloads.urls(await models.get(id), checkpoint, str(request.base_url))

    async def file(sign: str, expires: int, job: str, number: int, name: str) -> Response:
        path = await downloads.file(sign, expires, job, number, name)
        return DownloadedFile(path, path.name)

    _add(service, "GET", f"{CHECKPOINT}/external_weights_urls", urls)
    files = FILES.removeprefix(f"{ROOT}/")
    _add(service, "GET", f"{files}/{{sign}}/{{expires}}/{{job}}/{{number}}/{{name:path}}", file)
