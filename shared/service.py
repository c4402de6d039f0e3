"""What every service has: bearer auth, problem documents, health, metrics, request ids, idempotent
operations.

    service = Service("reward", settings, readiness={"sandbox": check})
    service.operation("POST", "/score", score)       # async def score(request: ScoreRequest) -> ScoreResult
    service.run(port)

A body is JSON or msgpack by its Content-Type, the answer by Accept; an operation that can be
streamed is a line of JSON for each result to those who accept `application/x-ndjson`. Without a
token the service answers only requests addressed to this machine (the Host header), so that no web
page can reach it through a name it controls.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_type_hints

import structlog
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared import codec, streams
from shared.config import Settings, is_loopback
from shared.errors import (
    MEDIA_TYPE,
    BadRequest,
    Busy,
    HoneError,
    NotFound,
    Unauthorized,
    Unavailable,
    from_problem,
)
from shared.logs import get_logger
from shared.operations import Operation, Operations
from shared.ports import check_port

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/version"})
MAX_WAIT_S = 60.0

Check = Callable[[], Awaitable[str | None]]
"""Returns None when the dependency is ready, else a sentence saying what it waits for."""

request_key: ContextVar[str | None] = ContextVar("request_key", default=None)
"""The key of the operation under way, for handlers that keep it somewhere more durable than this
process."""


def hone_version() -> str:
    try:
        return version("hone-rl")
    except PackageNotFoundError:
        return "0+unknown"


class Service:
    """One HTTP service: `app` is the ASGI application, with the health routes in place."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        *,
        readiness: Mapping[str, Check] | None = None,
        version_info: Callable[[], dict[str, Any]] = dict,
        lifespan: Callable[
            [], contextlib.AbstractAsyncContextManager[None]
        ] = contextlib.nullcontext,
    ) -> None:
        self.name = name
        self.settings = settings
        self.registry = CollectorRegistry()
        self.operations = Operations(settings.operation_deadline_s)
        self.draining = False
        self._readiness = dict(readiness or {})
        self._version_info = version_info
        self._lifespan = lifespan
        self.app = FastAPI(
            title=f"Hone {name}", version=hone_version(), lifespan=self._run_lifespan
        )
        self.app.add_middleware(_Gate, service=self)
        self.app.add_exception_handler(HoneError, _answer_error)
        self.app.add_exception_handler(RequestValidationError, _answer_validation)
        self.app.add_exception_handler(HTTPException, _answer_http)
        self._add_health_routes()
        self.app.add_api_route("/operations/{id}", self._poll, methods=["GET"])

    def gauge(self, name: str, description: str) -> Gauge:
        return Gauge(f"hone_{self.name}_{name}", description, registry=self.registry)

    def operation(
        self,
        method: str,
        path: str,
        handler: Callable[[Any], Awaitable[BaseModel]],
        *,
        key: Callable[[Any], str] | None = None,
        stream: Callable[[Any], AsyncGenerator[BaseModel]] | None = None,
        cancellable: bool = False,
    ) -> None:
        """Adds a route that runs `handler` once a key, whoever retries. The key is `key(body)` (the
        natural one) or the request's Idempotency-Key; with neither, each request is its own.

        `stream` yields the same results one by one; it is run for each request that accepts NDJSON,
        and ends with it. With `cancellable`, so does an operation that nobody can ask for again:
        one without a key, waited for by a plain request.
        """
        hints = get_type_hints(handler)
        result_type = hints.pop("return")
        (body_type,) = hints.values()

        async def endpoint(request: Request) -> Response:
            if self.draining:
                raise Unavailable(f"the {self.name} service is shutting down", code="draining")
            data = await request.body()
            media_type = _media_type(request, data)
            body = codec.decode(body_type, data, media_type)
            if stream is not None and streams.LINES in request.headers.get("accept", ""):
                return await streams.answer(
                    stream(body), request, f"{method} {path}", self.settings.operation_deadline_s
                )
            given = key(body) if key else request.headers.get("idempotency-key")
            request_key.set(given)
            full_key = f"{method} {path} {given}" if given else None
            operation = self.operations.start(
                lambda: handler(body),
                full_key,
                hashlib.sha256(data).hexdigest(),
                f"{method} {path}",
            )
            if cancellable and not given and _preferred_wait_s(request) is None:
                await streams.done_or_gone(operation.task, request)
            return await self._answer(operation, request)

        self.app.add_api_route(
            path,
            endpoint,
            methods=[method],
            name=handler.__name__,
            description=handler.__doc__ or "",
            responses={200: {"model": result_type}},
            openapi_extra={
                "requestBody": {
                    "content": {codec.JSON: {"schema": body_type.model_json_schema()}},
                    "required": True,
                }
            },
        )

    def query(self, path: str, handler: Callable[[], Awaitable[BaseModel]]) -> None:
        """Adds a GET route without parameters that answers in JSON or msgpack."""

        async def endpoint(request: Request) -> Response:
            return _render(await handler(), request)

        self.app.add_api_route(
            path,
            endpoint,
            methods=["GET"],
            name=handler.__name__,
            description=handler.__doc__ or "",
        )

    def run(self, port: int) -> None:
        """Serves until SIGTERM or SIGINT. Raises BadRequest if the port is in use."""
        self.server(port).run()

    def server(self, port: int) -> uvicorn.Server:
        """Returns the server, its port checked to be free. The caller runs it (`run()`, or
        `serve()` in an event loop)."""
        host = self.settings.host
        check_port(host, port, self.name)
        config = uvicorn.Config(
            self.app,
            host=host,
            port=port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=5,
            timeout_keep_alive=75,
        )
        return uvicorn.Server(config)

    @contextlib.asynccontextmanager
    async def _run_lifespan(self, _app: FastAPI) -> AsyncGenerator[None]:
        async with self._lifespan():
            get_logger().info("service started")
            yield
            self.draining = True
            await self.operations.close()
        get_logger().info("service stopped")

    async def _answer(self, operation: Operation, request: Request) -> Response:
        wait_s = _preferred_wait_s(request)
        result = await self.operations.wait(operation, wait_s)
        if result is not None:
            return _render(result, request)
        location = f"/operations/{operation.id}"
        return JSONResponse(
            {"operation": operation.id},
            202,
            {"location": location, "preference-applied": "respond-async"},
        )

    async def _poll(self, id: str, request: Request, wait: float = 0.0) -> Response:
        operation = self.operations.get(id)
        result = await self.operations.wait(operation, min(max(wait, 0.0), MAX_WAIT_S))
        if result is None:
            return JSONResponse({"operation": id}, 202, {"location": f"/operations/{id}"})
        return _render(result, request)

    def _add_health_routes(self) -> None:
        async def healthz() -> dict[str, str]:
            """The process lives."""
            return {"status": "ok", "service": self.name}

        async def readyz() -> JSONResponse:
            """Every dependency, and whether the service is of use now: 200 or 503."""
            details = {name: await check() for name, check in self._readiness.items()}
            if self.draining:
                details["service"] = "shutting down"
            ready = not any(details.values())
            shown = {
                name: {"ok": detail is None, "detail": detail or "ready"}
                for name, detail in details.items()
            }
            return JSONResponse({"ready": ready, "dependencies": shown}, 200 if ready else 503)

        async def metrics() -> Response:
            """Prometheus metrics."""
            return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

        async def version_() -> dict[str, Any]:
            """Versions of Hone and of the engine inside."""
            return {"service": self.name, "hone": hone_version(), **self._version_info()}

        for path, endpoint in (
            ("/healthz", healthz),
            ("/readyz", readyz),
            ("/metrics", metrics),
            ("/version", version_),
        ):
            self.app.add_api_route(path, endpoint, methods=["GET"])


class _Gate:
    """What every request passes: request id, Host and bearer check, body limit, timing. Plain ASGI,
    so streams stream."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._max_body_bytes = service.settings.max_body_mib << 20
        labels = ["method", "path", "status"]
        self._count = Counter(
            "hone_http_requests", "Requests answered", labels, registry=service.registry
        )
        self._time = Histogram(
            "hone_http_request_seconds",
            "Time to answer",
            ["method", "path"],
            registry=service.registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        request_id = headers.get("x-request-id", "")
        if not re.fullmatch(r"[\w.-]{1,64}", request_id):
            request_id = secrets.token_hex(8)
        structlog.contextvars.bind_contextvars(request_id=request_id)
        status = 500
        start = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((b"x-request-id", request_id.encode()))
            await send(message)

        try:
            self._check(scope["path"], headers)
            await self._app(scope, self._bounded(receive), send_with_id)
        except HoneError as error:
            await _problem(error)(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - start
            path = getattr(scope.get("route"), "path", "other")
            self._count.labels(scope["method"], path, status).inc()
            self._time.labels(scope["method"], path).observe(seconds)
            if path not in OPEN_PATHS and path != "/metrics":
                get_logger().info(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    seconds=round(seconds, 4),
                )

    def _check(self, path: str, headers: dict[str, str]) -> None:
        token = self._service.settings.bearer()
        if token is None:
            host = re.sub(r":\d+$", "", headers.get("host", ""))
            if not is_loopback(host):
                raise Unauthorized(
                    f"Host is {host!r}; without HONE_TOKEN this service answers only requests to "
                    "127.0.0.1 or localhost"
                )
        elif path not in OPEN_PATHS:
            given = headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                raise Unauthorized(
                    "the header 'Authorization: Bearer <HONE_TOKEN>' is missing or wrong"
                )
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            raise self._too_long(length)

    def _bounded(self, receive: Receive) -> Receive:
        """Returns `receive` for a body that may not say how long it is."""
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body_bytes:
                raise self._too_long(f"more than {self._max_body_bytes}")
            return message

        return bounded

    def _too_long(self, length: str) -> BadRequest:
        return BadRequest(
            f"body of {length} bytes; at most {self._max_body_bytes} are taken (setting "
            "HONE_MAX_BODY_MIB)"
        )


def _media_type(request: Request, data: bytes) -> str:
    given = request.headers.get("content-type", "").partition(";")[0].strip()
    if given in (codec.JSON, codec.MSGPACK) or (not data and not given):
        return given or codec.JSON
    raise BadRequest(f"Content-Type is {given!r}; expected {codec.JSON} or {codec.MSGPACK}")


def _render(result: BaseModel, request: Request) -> Response:
    media_type = codec.MSGPACK if codec.MSGPACK in request.headers.get("accept", "") else codec.JSON
    return Response(codec.encode(result, media_type), media_type=media_type)


def _preferred_wait_s(request: Request) -> float | None:
    """Returns how long to wait before answering 202: None (as long as it takes) unless the caller
    prefers respond-async."""
    prefer = request.headers.get("prefer", "")
    if "respond-async" not in prefer:
        return None
    wait = re.search(r"wait=(\d+)", prefer)
    return min(float(wait.group(1)), MAX_WAIT_S) if wait else 0.0


def _problem(error: HoneError) -> JSONResponse:
    headers = {"retry-after": str(error.retry_after_s)} if isinstance(error, Busy) else {}
    return JSONResponse(error.problem(), error.status, headers, media_type=MEDIA_TYPE)


async def _answer_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HoneError)
    return _problem(error)


async def _answer_validation(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = [
        {
            "pointer": "/" + "/".join(map(str, fault["loc"])),
            "detail": f"{fault['loc'][-1]!r}: {fault['msg']}",
        }
        for fault in error.errors()
    ]
    return _problem(BadRequest("; ".join(fault["detail"] for fault in faults), errors=faults))


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _problem(NotFound(f"no route {request.method} {request.url.path}"))
    problem = from_problem(
        error.status_code,
        {"detail": f"{request.method} {request.url.path}: {error.detail}"},
        "service",
    )
    return JSONResponse(
        problem.problem() | {"status": error.status_code}, error.status_code, media_type=MEDIA_TYPE
    )
