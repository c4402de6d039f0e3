"""What every service has: bearer auth, problem documents, health, metrics, request ids, idempotent
operations.

    async def score(request: ScoreRequest) -> ScoreResult: ...

    service = Service("reward", settings, readiness={"sandbox": check})
    service.operation("POST", "/score", score)
    service.run(port)

A body is JSON or msgpack by its Content-Type, the answer by Accept. Without a token the service
answers only requests addressed to this machine (the Host header), so that no web page can reach it
through a name it controls. It takes no change from a web page of another origin (gate.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Annotated, Any, get_type_hints

import uvicorn
from fastapi import Depends, FastAPI, Query, Request, params
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, Gauge
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from shared.errors import HoneError
from shared.host import tracing
from shared.host.logs import get_logger
from shared.host.processes import check_port, resident_bytes
from shared.http import codec, operations, rendering
from shared.http.gate import AcceptedKeys, Gate, HttpConnection, RequestMetrics, scope_key
from shared.http.operations import (
    Check,
    DrainState,
    Operation,
    Operations,
    add_health_routes,
    hone_version,
)
from shared.http.ownership import Ownership
from shared.settings import Settings
from shared.wire import WAIT_PATH, WaitRequest, WaitResult

GRACE_S = 5
"""Seconds that requests which wait for no operation may take after SIGTERM."""

request_key: ContextVar[str | None] = ContextVar("request_key", default=None)
"""The key of the current operation, for handlers that store it more durably than this process."""


class Service:
    """One HTTP service: `app` is the ASGI application, with the health routes. `busy` returns how
    much work is under way, in the service's own unit; None: its number of operations. `keys` are
    accepted beside HONE_TOKEN. `ownership`: which orchestrator owns it, if it can be owned. Paths
    that are `public` need no token to be read. `most_bytes` returns how many bytes a body of a path
    may have, if fewer than HONE_MAX_BODY_MIB, and `most_weight` how much a body of a path and type
    may weigh (`codec.json_weight`); None: it is no JSON, or may weigh anything."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        *,
        readiness: Mapping[str, Check] | None = None,
        version_info: Callable[[], dict[str, Any]] = dict,
        busy: Callable[[], int] | None = None,
        lifespan: Callable[
            [], contextlib.AbstractAsyncContextManager[None]
        ] = contextlib.nullcontext,
        keys: AcceptedKeys | None = None,
        ownership: Ownership | None = None,
        public: Callable[[str], bool] = lambda path: False,
        most_bytes: Callable[[str], int] | None = None,
        most_weight: Callable[[str, str], int | None] | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.ownership = ownership or Ownership(name)
        self.registry = CollectorRegistry()
        self.draining = DrainState(name)
        self.operations = Operations(settings.operation_deadline_s, self.draining)
        self._busy = busy or self.operations.num_running
        self._lifespan = lifespan
        self._keys = keys
        self._public = public
        self._most_bytes = most_bytes
        self._most_weight = most_weight
        self._bodies: dict[tuple[str, str], Any] = {}
        self.gauge("memory_bytes", "Resident memory of the process and its children").set_function(
            resident_bytes
        )
        self.app = self._make_app()
        add_health_routes(
            self.app, name, readiness or {}, self.registry, self.draining, version_info
        )

    def gauge(self, name: str, description: str) -> Gauge:
        return Gauge(f"hone_{self.name}_{name}", description, registry=self.registry)

    def operation(
        self,
        method: str,
        path: str,
        handler: Callable[[Any], Awaitable[BaseModel]],
        *,
        key: Callable[[Any], str] | None = None,
        cancellable: bool = False,
        durable: bool = False,
        parameters: bool = False,
        dependencies: Sequence[params.Depends] = (),
    ) -> None:
        """Adds a route that runs `handler` once per key, however often it is retried. The key is
        `key(body)` (the natural key) or the request's Idempotency-Key; with neither, each request
        has a new key.

        `cancellable`: an operation without a key, waited for by a plain request, ends with the
        request, because no one can ask for it again. A `durable` handler remembers the result of
        `request_key` itself, and is called each time. With `parameters` the body's fields may be
        query parameters, in place of a body. `dependencies` are the route's; they refuse a request
        before its operation starts.
        """
        hints = get_type_hints(handler, include_extras=True)
        result_type = hints.pop("return")
        (body_type,) = hints.values()
        name = f"{method} {path}"

        async def endpoint(request: Request) -> Response:
            data = await request.body()
            kind = rendering.media_type(request, data)
            if parameters and request.query_params:
                data, kind = rendering.body_of_parameters(request, data), codec.JSON
            most = rendering.most_weight(request)
            body = await rendering.parse_body(len(data), codec.decode, body_type, data, kind, most)
            given = key(body) if key else request.headers.get("idempotency-key")
            given = given and scope_key(given)
            request_key.set(given)
            with tracing.continuing(request.headers):
                operation = self.operations.start(
                    lambda: handler(body),
                    f"{name} {given}" if given else None,
                    hashlib.sha256(data).hexdigest(),
                    name,
                    durable=durable,
                )
            return await self.answer(operation, request, ends_with_client=cancellable and not given)

        self.body(body_type, method, path)
        self.app.add_api_route(
            path,
            endpoint,
            methods=[method],
            name=handler.__name__,
            description=handler.__doc__ or "",
            responses=rendering.answers(result_type) | rendering.accepted(),
            dependencies=dependencies,
            openapi_extra=rendering.parameters(body_type) if parameters else None,
        )

    def body(self, body_type: type[BaseModel], method: str, path: str) -> None:
        """Declares the body of a route that reads its request itself, for the OpenAPI document."""
        self._bodies[path, method] = body_type

    def query(self, path: str, handler: Callable[[], Awaitable[BaseModel]]) -> None:
        """Adds a GET route without parameters that answers in JSON or msgpack."""

        async def endpoint(request: Request) -> Response:
            return await rendering.render(await handler(), request)

        self.app.add_api_route(
            path,
            endpoint,
            methods=["GET"],
            name=handler.__name__,
            description=handler.__doc__ or "",
            responses=rendering.answers(get_type_hints(handler, include_extras=True)["return"]),
        )

    async def answer(
        self, operation: Operation, request: Request, *, ends_with_client: bool = False
    ) -> Response:
        """Returns the operation's result, or 202 if it takes longer than the request prefers to
        wait."""
        wait_s = rendering.preferred_wait_s(request)
        gone = operations.client_gone(request) if ends_with_client and wait_s is None else None
        result = await self.operations.wait(operation, wait_s, gone)
        return _accepted(operation) if result is None else await rendering.render(result, request)

    def run(self, port: int, opening: Callable[[], Awaitable[None]] | None = None) -> None:
        """Serves until SIGTERM or SIGINT; `opening` is awaited before. Raises BadRequest if the
        port is in use."""
        server = self.server(port)

        async def serve() -> None:
            if opening:
                await opening()
            await server.serve()

        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(serve())

    def server(self, port: int) -> uvicorn.Server:
        """Returns the server, its port checked to be free. The caller runs it (`run()`, or
        `serve()` in an event loop).

        When asked to end it stops listening. Requests that wait for an operation are told to ask
        again (503, "draining"), other requests have `GRACE_S`, and then operations are cancelled.
        """
        host = self.settings.host
        check_port(host, port, self.name)
        config = uvicorn.Config(
            self.app,
            host=host,
            port=port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=75,
            http=HttpConnection,
        )
        return _Server(config, self.draining)

    def _make_app(self) -> FastAPI:
        app = FastAPI(
            title=f"Hone {self.name}",
            version=hone_version(),
            lifespan=self._run_lifespan,
            dependencies=[Depends(rendering.refuse_unknown_parameters)],
            responses=rendering.problem_responses(),
        )
        app.add_middleware(
            Gate,
            settings=self.settings,
            metrics=RequestMetrics(self.registry),
            draining=self.draining,
            ownership=self.ownership,
            keys=self._keys,
            public=self._public,
            most_bytes=self._most_bytes,
            most_weight=self._most_weight,
        )
        app.add_exception_handler(HoneError, rendering.answer_error)
        app.add_exception_handler(RequestValidationError, rendering.answer_validation)
        app.add_exception_handler(HTTPException, rendering.answer_http)
        app.add_api_route(
            "/operations/{id}", self._poll, methods=["GET"], responses=rendering.any_answer()
        )
        app.add_api_route(
            WAIT_PATH, self._wait_any, methods=["POST"], responses=rendering.answers(WaitResult)
        )
        self.body(WaitRequest, "POST", WAIT_PATH)
        app.openapi = lambda: rendering.document(app, self._bodies)
        return app

    @contextlib.asynccontextmanager
    async def _run_lifespan(self, _app: FastAPI) -> AsyncGenerator[None]:
        async with self._lifespan():
            get_logger().info("service started")
            yield
            await self.operations.close()
        await asyncio.to_thread(tracing.close)
        get_logger().info("service stopped")

    async def _wait_any(self, request: Request) -> Response:
        """Waits for the first of many operations, in one request."""
        wanted = await rendering.read_body(request, WaitRequest)
        return await rendering.render(await self.operations.wait_any(wanted, self._busy), request)

    async def _poll(
        self, id: str, request: Request, wait: Annotated[float, Query(allow_inf_nan=False)] = 0.0
    ) -> Response:
        """The result of an operation; 202 if it takes longer than `wait` seconds."""
        operation = self.operations.get(id)
        wait_s = min(max(wait, 0.0), rendering.MAX_WAIT_S)
        result = await self.operations.wait(operation, wait_s)
        return _accepted(operation) if result is None else await rendering.render(result, request)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, draining: DrainState) -> None:
        super().__init__(config)
        self._draining = draining

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._draining.begin()
        await super().shutdown(sockets)


def _accepted(operation: Operation) -> Response:
    return JSONResponse(
        rendering.Accepted(operation=operation.id).model_dump(),
        202,
        {"location": f"/operations/{operation.id}", "preference-applied": "respond-async"},
    )
