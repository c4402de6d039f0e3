"""Sessions of the SDK, and the unsupported routes of Tinker's API. A session is only an id, which
the metadata of its models' jobs contain."""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query, Request

from services.orchestrator.extensions.tinker.log import ROOT, OperationLog
from services.orchestrator.extensions.tinker.models import Scope, models_of
from services.orchestrator.extensions.tinker.requests import SURROGATES, field, program_of
from services.orchestrator.store.store import Store
from shared.errors import BadRequest, Conflict, NotFound
from shared.http.service import Service

CHECKPOINT = "training_runs/{id}/checkpoints/{checkpoint:path}"

Limit = Annotated[int, Query(ge=1, le=1000)]

Offset = Annotated[int, Query(ge=0)]

BodyReader = Callable[[Request], Awaitable[tuple[dict[str, Any], str]]]
"""Returns a body of JSON and its digest."""

_LIST = "list_training_runs and `hone ls` list the models"

CONSTANT_ANSWERS: dict[tuple[str, str], dict[str, str]] = {
    ("POST", "session_heartbeat"): {"type": "session_heartbeat"},
    ("POST", "telemetry"): {"status": "accepted"},
    ("POST", "client/config"): {},
    ("POST", "client/dynamic_config"): {},
    ("POST", "sessions/{session}/finish"): {},
    ("GET", "healthz"): {"status": "ok"},
}
"""The answers of routes that always answer the same."""

NOT_SUPPORTED: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    # the message, and the parameters of the query, which are not read
    ("POST", f"{CHECKPOINT}/publish"): (
        "nothing is published: an API key that may use the jobs API may use any model",
        (),
    ),
    ("DELETE", f"{CHECKPOINT}/publish"): ("nothing is published, so nothing can be withdrawn", ()),
    ("POST", "copy_weights"): (
        "weights are not copied between projects; expected a new model that begins with the "
        "checkpoint: create_training_client_from_state",
        (),
    ),
    ("POST", "sessions/search"): ("sessions are not searched; list_sessions lists them", ()),
    ("PUT", "sessions/{id}/project"): ("there are no projects", ()),
    ("GET", "sessions/{id}/trace_export"): (
        "no trace of a session is recorded; `hone logs` and the metrics of its models' jobs say "
        "what was done",
        (),
    ),
    ("GET", "audit"): (f"there is no audit log; {_LIST}", ("event_type", "day")),
    ("GET", "billing/usage/events"): ("nothing is billed", ("starting_on", "ending_before")),
    ("GET", "billing/usage/checkpoints/current"): (
        "nothing is billed; list_user_checkpoints has the size of each checkpoint",
        ("project_id",),
    ),
    ("POST", "cancel_future"): ("samples that were ordered are not cancelled", ()),
    ("POST", "create_custom_loss"): (
        "custom losses run in the client; expected a client that asked client/config",
        (),
    ),
    ("POST", "join_sampling_session"): (
        "a copy of a sampling client chooses its numbers itself; expected a client that asked "
        "client/config",
        (),
    ),
    ("POST", "retrieve_futures"): ("futures are retrieved one by one, by retrieve_future", ()),
    ("POST", "auth/token"): ("there are no tokens but the API key", ()),
}
"""The messages of refused routes, by method and path, which the SDK raises at once. It calls the
last five only if client/config or client/dynamic_config requests it, which Hone's do not."""


def add_route(
    service: Service, method: str, path: str, route: Callable[..., Awaitable[Any]], **how: Any
) -> None:
    """Adds a route of Tinker's API. Conflicts are answered with 422: the SDK retries a 409 for five
    minutes before it shows the message, and a conflict is permanent."""

    @functools.wraps(route)
    async def answered(*args: Any, **kwargs: Any) -> Any:
        try:
            return await route(*args, **kwargs)
        except Conflict as error:
            raise BadRequest(error.detail, code=error.code) from error

    how = {"methods": [method], "include_in_schema": False, "response_model": None, **how}
    service.app.add_api_route(f"{ROOT}/{path}", answered, **how)


def add_session_routes(service: Service, store: Store, read: BodyReader) -> None:
    async def create_session(request: Request) -> dict[str, Any]:
        """Returns the id of a new session, and messages that the SDK logs."""
        body, _ = await read(request)
        answer = {"type": "create_session", "session_id": secrets.token_hex(16)}
        if project := field(body, "project_id", str):
            ignored = f"project_id {project!r:.80} is ignored: there are no projects"
            answer["warning_message"] = ignored
        notes = (
            f"the loss {name!r} is computed as {ours!r} (docs/tinker.md#losses)"
            for name, ours in SURROGATES.items()
        )
        return answer | {"info_message": "; ".join(notes)}

    async def sessions(
        limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "accessible"
    ) -> dict[str, Any]:
        found = await _models_by_session(store, access_scope)
        return {"sessions": [*found][offset : offset + limit]}

    async def session(id: str, access_scope: Scope = "accessible") -> dict[str, Any]:
        models = (await _models_by_session(store, access_scope)).get(id)
        if models is None:
            raise NotFound(
                f"no session {id!r:.200} has created a model that is {access_scope}; {_LIST}"
            )
        samplers: list[str] = []
        for model in models:
            run = Path((await store.get(model)).run_dir)
            names = await asyncio.to_thread(OperationLog(run).sessions)
            samplers += [f"{model}:{name}" for name in names]
        return {"training_run_ids": models, "sampler_ids": samplers}

    add_route(service, "POST", "create_session", create_session)
    add_route(service, "GET", "sessions", sessions)
    add_route(service, "GET", "sessions/{id}", session)
    for (method, path), answer in CONSTANT_ANSWERS.items():
        add_route(service, method, path, _constant_route(answer))
    for (method, path), (sentence, parameters) in NOT_SUPPORTED.items():
        declared = [{"name": name, "in": "query"} for name in parameters]
        add_route(
            service, method, path, _refusing(sentence), openapi_extra={"parameters": declared}
        )


def _constant_route(answer: dict[str, str]) -> Callable[[], Awaitable[dict[str, str]]]:
    async def constant() -> dict[str, str]:
        return answer

    return constant


def _refusing(sentence: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        raise BadRequest(sentence)

    return refuse


async def _models_by_session(store: Store, scope: Scope) -> dict[str, list[str]]:
    """Returns the models of each session, both newest first."""
    found: dict[str, list[str]] = {}
    async for one in models_of(store, scope):
        found.setdefault(program_of(one.metadata), []).append(one.id)
    return found
