"""`/v1/models`, and the routes of agents' APIs (`DIALECTS`). Calls are passed on unchanged to a
sampler that serves the named model, unless they are turns of a session."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterable

import httpx2 as httpx
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.background import BackgroundTask

from services.orchestrator.extensions.agents.routes import (
    DIALECTS,
    add_post,
    answer_turn,
    session_of,
)
from services.orchestrator.extensions.agents.sessions import Sessions
from services.orchestrator.samplers.discovery import sampler_urls
from services.orchestrator.store.store import Store
from services.orchestrator.tasks import stop
from shared.errors import BadRequest, HoneError, NotFound, Unavailable, from_problem
from shared.host.logs import get_logger, request_id
from shared.http import codec, rendering
from shared.http.connecting import client_options
from shared.http.operations import unless_gone
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import ServedModel, ServedModelList

CONNECT_S = 5.0
MODELS_S = 10.0
"""Seconds for a sampler to list its models."""

POLICY, CALLED = "policy", "called"
"""A sampler's name for the weights in training, and the field of a model with that name."""

ANSWER_S = 600.0
"""Longest silence in an answer."""

STARTING = "starting"
"""Error code of a sampler whose engine is starting."""

PASSED_ON = ("content-type",)
"""Request headers that are passed on to the sampler. The token is replaced by the stack's own."""

PASSED_BACK = ("content-type", "retry-after")

ERRORS: rendering.Responses = {
    "default": rendering.without_model(
        "an error of the sampler's, in OpenAI's shape", codec.JSON, schema={}
    ),
}


def add_routes(service: Service, settings: Settings, store: Store, sessions: Sessions) -> None:
    """Adds the routes. A call that names a session becomes a turn of it."""
    calls = Calls(settings, store)
    app = service.app

    @app.get("/sessions/{name}/v1/models", name="list_models_of_session")
    @app.get("/v1/models")
    async def list_models() -> ServedModelList:
        """Models that can be called now, in OpenAI's shape: base models, `policy` (the weights that
        serve at present), and trained models by their jobs' ids."""
        return ServedModelList(data=tuple((await calls.served()).values()))

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> ServedModel:
        """One of the models that can be called now."""
        served = await calls.served()
        if model_id not in served:
            raise _not_served(model_id, served)
        return served[model_id]

    async def complete(request: Request, beta: bool | None = None) -> Response:
        """Samples a model, as OpenAI's API does; for a session, a turn of it."""
        if session := session_of(request, sessions):
            return await answer_turn(request, session, DIALECTS[request.url.path])
        return await calls.pass_on(request)

    for route in DIALECTS:
        add_post(service, route, complete, ERRORS)


class Calls:
    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store

    async def served(self) -> dict[str, ServedModel]:
        """Returns the models of all samplers, by name. Raises Unavailable if no sampler serves any,
        with code "starting" if one is starting."""
        answers = [answer async for answer in self._answers()]
        served = [models for _, models in answers if not isinstance(models, HoneError)]
        if not served:
            whys = {url: why for url, why in answers if isinstance(why, HoneError)}
            told = "; ".join(f"the sampler at {url}: {why.detail}" for url, why in whys.items())
            none = f"there is no sampler at HONE_ROLLOUT_URL {self._settings.rollout_url!r}"
            is_starting = any(why.code == STARTING for why in whys.values())
            raise Unavailable(
                f"no model is served now: {told or none}", code=STARTING if is_starting else None
            )
        return {model.id: model for models in served for model in models}

    async def _answers(self) -> AsyncGenerator[tuple[str, tuple[ServedModel, ...] | HoneError]]:
        """Yields each sampler's URL with its models, or why it serves none, as soon as it
        answers."""
        urls = await sampler_urls(self._settings.rollout_urls, self._store.samplers.urls)
        asked = [asyncio.create_task(self._models(url)) for url in urls]
        try:
            for answer in asyncio.as_completed(asked):
                yield await answer
        finally:
            await stop(*asked)

    async def pass_on(self, request: Request) -> Response:
        body = await request.body()
        name = await rendering.parse_body(len(body), _model, body)
        url, model = await self._sampler_of(name)
        if called := (model.model_extra or {}).get(CALLED):
            body = await rendering.parse_body(len(body), _renamed, body, called)
        async with contextlib.AsyncExitStack() as unless_answered:
            http = await unless_answered.enter_async_context(self._client(url))
            headers = {key: request.headers[key] for key in PASSED_ON if key in request.headers}
            headers["x-request-id"] = request_id()
            asked = http.build_request("POST", request.url.path, content=body, headers=headers)
            try:
                answer = await unless_gone(http.send(asked, stream=True), request)
                unless_answered.push_async_callback(answer.aclose)
                is_right = not called or await _job_of_policy(http) == name
            except httpx.RequestError as error:
                raise Unavailable(f"the sampler at {url} did not answer: {error!r}") from error
            if not is_right:
                raise Unavailable(
                    f"the sampler at {url} loaded another job's weights during the call of job "
                    f"{name!r:.200}; try again: another sampler may still serve that job"
                )
            stack = unless_answered.pop_all()
        return StreamingResponse(
            _bytes(answer, url, stack),
            answer.status_code,
            {key: answer.headers[key] for key in PASSED_BACK if key in answer.headers},
            background=BackgroundTask(stack.aclose),  # closes an answer whose body was never read
        )

    async def _sampler_of(self, name: str) -> tuple[str, ServedModel]:
        """Returns the first sampler that answers that it has the model, and the model. So a hanging
        sampler delays no call, and busy samplers get fewer calls."""
        async with contextlib.aclosing(self._answers()) as answers:
            async for url, models in answers:
                found = () if isinstance(models, HoneError) else models
                for model in found:
                    if model.id == name:
                        return url, model
        raise _not_served(name, await self.served())

    async def _models(self, url: str) -> tuple[str, tuple[ServedModel, ...] | HoneError]:
        """Returns the URL, and the models served there or the error why there are none."""
        try:
            async with self._client(url) as http:
                answer = await http.get("/v1/models", timeout=MODELS_S)
                if answer.status_code != 200:
                    return url, _problem(answer, url)
                models = ServedModelList.model_validate_json(answer.content).data
                return url, models + await _by_job(http, models)
        except (httpx.HTTPError, ValueError) as error:
            get_logger().warning("a sampler did not list its models", url=url, reason=repr(error))
            return url, Unavailable(f"it does not answer ({type(error).__name__})")

    def _client(self, url: str) -> httpx.AsyncClient:
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
        return httpx.AsyncClient(**client_options(url, self._settings.bearer()), timeout=timeout)


async def _by_job(
    http: httpx.AsyncClient, models: tuple[ServedModel, ...]
) -> tuple[ServedModel, ...]:
    """Returns the job whose own weights serve as `policy`, as a model that is called by its id."""
    known = {model.id for model in models}
    if POLICY not in known:
        return ()
    job = await _job_of_policy(http)
    return () if job is None or job in known else (ServedModel(id=job, **{CALLED: POLICY}),)


async def _job_of_policy(http: httpx.AsyncClient) -> str | None:
    """Returns the job whose weights serve as `policy`. Loading another job's weights ends running
    requests, so an answer that begins while these serve has them to its end."""
    answer = await http.get("/weights", timeout=MODELS_S)
    return answer.json().get("job_id") if answer.status_code == 200 else None


def _problem(answer: httpx.Response, url: str) -> HoneError:
    try:
        document = answer.json()
    except ValueError:
        document = None
    problem = document if isinstance(document, dict) else None
    return from_problem(answer.status_code, problem, f"the sampler at {url}")


def _not_served(name: str, served: Iterable[str]) -> NotFound:
    names = ", ".join(map(repr, sorted(served)))
    return NotFound(
        f"model {name!r:.200} is not served now; expected one of {names}, where 'policy' is the "
        "weights that serve now. A job's model is called by its id while a sampler has its weights "
        "or adapter; its checkpoint is listed by GET /v1/jobs/<id>/checkpoints"
    )


def _model(body: bytes) -> str:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    name = document.get("model") if isinstance(document, dict) else None
    if not isinstance(name, str):
        raise BadRequest(f"'model' is {name!r:.80}; expected the name of a model")
    return name


def _renamed(body: bytes, model: str) -> bytes:
    return json.dumps(json.loads(body) | {"model": model}).encode()


async def _bytes(
    answer: httpx.Response, url: str, stack: contextlib.AsyncExitStack
) -> AsyncGenerator[bytes]:
    """Yields the answer as it arrives; `stack` closes its connection at the end. If the sampler
    dies, the answer is cut off."""
    async with stack:
        try:
            async for chunk in answer.aiter_bytes():
                yield chunk
        except httpx.RequestError as error:
            get_logger().warning("a sampler's answer was cut off", url=url, reason=repr(error))
            raise
