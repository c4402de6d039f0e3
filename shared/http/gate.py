"""What every request passes: request id, Host and bearer check, body limit, timing, draining. And
how long a request may take to arrive: without that limit connections that send nothing would add
up. Also which files and folders of the service's host a caller may name."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import re
import secrets
import time
from collections import Counter as Counts
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from shared.errors import (
    BadRequest,
    Failed,
    Forbidden,
    HoneError,
    Malformed,
    NotFound,
    TooLarge,
    Unauthorized,
)
from shared.host.logs import get_logger
from shared.http import codec
from shared.http.operations import OPEN_PATHS, DrainState
from shared.http.ownership import HEADER, Ownership, asking, requester_of
from shared.http.rendering import MOST_WEIGHT, problem
from shared.http.urls import is_loopback
from shared.settings import Settings
from shared.wire import ApiKey

SINGLE = (
    *("host", "authorization", "x-api-key", "content-type", "content-length", "idempotency-key"),
)
"""Headers that may come only once. Of two values, a proxy and this service might read different
ones."""

REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,100}")
"""A valid request id. A request with any other X-Request-Id gets a new id."""

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Characters that no path may have: `$` in a route's pattern also matches before a final line
feed."""

TINKER = "tml-"
"""What the keys of Tinker's SDK begin with: it takes no others."""

DISCONNECTED = 499
"""Status, in log and metrics, of a request whose client disconnected before it was answered, as
nginx has it."""

READING = ("GET", "HEAD")
"""Methods that change nothing."""

caller: ContextVar[ApiKey | None] = ContextVar("caller", default=None)
"""The API key of the current request; None: it has HONE_TOKEN, or needs no token."""


class RequestMetrics:
    """How many requests were answered, and in what time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.count = Counter(
            "hone_http_requests",
            "Requests answered",
            ["method", "path", "status"],
            registry=registry,
        )
        self.seconds = Histogram(
            "hone_http_request_seconds", "Time to answer", ["method", "path"], registry=registry
        )


def caller_name() -> str:
    """Returns the name of the caller's API key; "" for HONE_TOKEN, or where none is needed."""
    key = caller.get()
    return key.name if key else ""


def own_jobs_of() -> str | None:
    """Returns the name of the caller's API key if it may see its own jobs alone."""
    key = caller.get()
    return key.name if key and key.access == "own" else None


def scope_key(key: str) -> str:
    """Returns the stored form of an idempotency key, which differs for each API key that sees its
    own jobs alone."""
    owner = own_jobs_of()
    return f"{owner}/{key}" if owner else key


class AcceptedKeys(Protocol):
    """The API keys that a service accepts beside HONE_TOKEN."""

    async def check(self, secret: str, method: str, path: str) -> ApiKey:
        """Returns the key with this secret. Raises Unauthorized if there is none, and Forbidden if
        it does not allow the method. Routes check further rights by `caller`."""
        ...


class Gate:
    """Plain ASGI middleware, so streams stream."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        metrics: RequestMetrics,
        draining: DrainState,
        ownership: Ownership,
        keys: AcceptedKeys | None = None,
        public: Callable[[str], bool] = lambda path: False,
        most_bytes: Callable[[str], int] | None = None,
        most_weight: Callable[[str, str], int | None] | None = None,
    ) -> None:
        self._app = app
        self._most_bytes = most_bytes
        self._most_weight = most_weight
        self._public = public
        self._ownership = ownership
        self._keys = keys
        self._token = settings.bearer()
        self._max_body_bytes = settings.max_body_mib << 20
        self._metrics = metrics
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        request_id = headers.get("x-request-id", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(8)
        structlog.contextvars.bind_contextvars(request_id=request_id)
        status = 0
        start = time.perf_counter()
        task = asyncio.current_task()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if task and _is_stream(message):
                    self._draining.ends_stream(task)
                message.setdefault("headers", []).append((b"x-request-id", request_id.encode()))
            await send(message)

        try:
            _check_single([name.decode("latin-1").lower() for name, _ in scope["headers"]])
            is_authorized = await self._authorize(scope, headers)
            _check_origin(scope["method"], headers)
            self._check(scope["path"], headers)
            asking.set(requester_of(headers.get(HEADER, "")) if is_authorized else None)
            self._ownership.hear()
            kind = headers.get("content-type", "").partition(";")[0].strip()
            most_weight = self._most_weight(scope["path"], kind) if self._most_weight else None
            if self._most_weight:
                scope[MOST_WEIGHT] = self._most_weight(scope["path"], codec.JSON)
            bounded = self._bounded(receive, scope["path"], most_weight)
            await self._app(scope, bounded, send_with_id)
        except HoneError as error:
            await problem(error)(scope, receive, send_with_id)
        except ClientDisconnect:  # while it sent its body: no one is left to answer
            status = status or DISCONNECTED
        except asyncio.CancelledError:  # by the end of the service: see `Service.server`
            if not self._draining.has_begun():
                raise
            if not status:
                await problem(self._draining.error())(scope, receive, send_with_id)
        except Exception as error:  # a bug: the last resort of a request
            get_logger().exception("request failed", method=scope["method"], path=scope["path"])
            if status:  # the answer has begun, and breaks off
                raise
            # Its text may hold what the caller must not see, such as another's data or a path.
            bug = (
                f"{scope['method']} {scope['path']:.200}: internal error "
                f"({type(error).__name__}); the service's log has the traceback, under this "
                "answer's x-request-id"
            )
            await problem(Failed(bug, code="bug"))(scope, receive, send_with_id)
        finally:
            self._note_end(scope, status or 500, time.perf_counter() - start)

    async def _authorize(self, scope: Scope, headers: dict[str, str]) -> bool:
        """Returns whether the caller's ownership header counts: not on an open path, where anybody
        may call. Raises Unauthorized and Forbidden."""
        caller.set(None)
        if self._token is None:
            host = re.sub(r":\d+$", "", headers.get("host", ""))
            if not is_loopback(host):
                raise Unauthorized(
                    f"Host is {host!r}; without HONE_TOKEN this service answers only requests to "
                    "127.0.0.1 or localhost"
                )
            return True
        given = given_token(headers)
        if given and hmac.compare_digest(given.encode(), self._token.encode()):
            return True
        if scope["path"] in OPEN_PATHS:
            return False
        if scope["method"] in READING and self._public(scope["path"]):
            return False
        if not given:
            raise Unauthorized("the header 'Authorization: Bearer <HONE_TOKEN>' is missing")
        if self._keys is None:
            raise Unauthorized("the token of the header 'Authorization: Bearer' is wrong")
        key = await self._keys.check(given, scope["method"], scope["path"])
        caller.set(key)
        structlog.contextvars.bind_contextvars(key=key.name)
        return True

    def _check(self, path: str, headers: dict[str, str]) -> None:
        if CONTROL.search(path):
            raise NotFound(f"no route {path!r:.200}: a path has no control characters")
        if self._draining.has_begun() and path not in OPEN_PATHS:
            raise self._draining.error()
        length = headers.get("content-length", "0")
        if not re.fullmatch(r"[0-9]{1,18}", length) or int(length) > self._limit(path):
            raise self._too_long(length[:80], path)

    def _limit(self, path: str) -> int:
        """Returns how many bytes a body of the path may have."""
        most = self._max_body_bytes
        return min(most, self._most_bytes(path)) if self._most_bytes else most

    def _bounded(self, receive: Receive, path: str, most_weight: int | None) -> Receive:
        """Returns `receive` with limits, because a body may hide its length and may never
        arrive."""
        weight, taken, is_complete, start = 0, 0, False, asyncio.get_running_loop().time()
        most_bytes = self._limit(path)

        async def bounded() -> Message:
            nonlocal weight, taken, is_complete
            if is_complete:
                return await receive()
            latest = start + BODY_S + taken / MIN_BODY_BYTES_PER_S
            try:
                async with asyncio.timeout_at(latest):
                    message = await receive()
            except TimeoutError as error:
                raise Malformed(
                    f"the body did not arrive in time: {taken} bytes after {latest - start:.0f} s"
                ) from error
            taken += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if taken > most_bytes:
                raise self._too_long(f"more than {most_bytes}", path)
            if most_weight is not None:
                weight += codec.json_weight(message.get("body", b""))
                codec.check_weight(weight, most_weight)
            return message

        return bounded

    def _too_long(self, length: str, path: str) -> BadRequest:
        if (most_bytes := self._limit(path)) < self._max_body_bytes:
            return TooLarge(
                f"body of {length} bytes; at most {most_bytes} are taken at {path:.200}: put data "
                "into a file, and upload it to POST /v1/files"
            )
        return BadRequest(
            f"body of {length} bytes; at most {self._max_body_bytes} are taken (setting "
            "HONE_MAX_BODY_MIB)"
        )

    def _note_end(self, scope: Scope, status: int, seconds: float) -> None:
        path = getattr(scope.get("route"), "path", "other")
        self._metrics.count.labels(scope["method"], path, status).inc()
        self._metrics.seconds.labels(scope["method"], path).observe(seconds)
        if path not in OPEN_PATHS and path != "/metrics":
            get_logger().info(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status,
                seconds=round(seconds, 4),
            )


def given_token(headers: Mapping[str, str]) -> str:
    """Returns the token of the Authorization header, or else of X-Api-Key, where clients of
    Anthropic and Tinker send it; "" without one. Clients that take a URL and no token, such as
    TRL's, send `http://hone:<token>@host` as Basic, with the token as password."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):  # no base64, or no UTF-8
            return base64.b64decode(given, validate=True).decode().partition(":")[2]
    if scheme.lower() == "bearer":
        return given
    return headers.get("x-api-key", "").removeprefix(TINKER)


def _check_origin(method: str, headers: Mapping[str, str]) -> None:
    """Raises Forbidden for a change that a web page of another origin asks for with nothing but the
    browser's own credentials: none, or a remembered Basic password. Every browser says the origin
    of a request that is not a GET or HEAD. No page can send a bearer token that it does not
    have."""
    origin = headers.get("origin")
    has_token = "x-api-key" in headers or headers.get("authorization", "").lower()[:7] == "bearer "
    if method in READING or origin is None or has_token:
        return
    if origin.partition("://")[2] != headers.get("host", ""):
        raise Forbidden(
            f"Origin is {origin!r:.200}, and Host is {headers.get('host', '')!r:.200}: a page of "
            "another site may change nothing here"
        )


def _check_single(names: list[str]) -> None:
    times = Counts(names)
    for name in SINGLE:
        if times[name] > 1:
            raise Malformed(f"the header {name!r} came {times[name]} times, expected once")


def _is_stream(start: Message) -> bool:
    headers = dict(start.get("headers", []))
    return headers.get(b"content-type", b"").startswith(b"text/event-stream")


HEADERS_S = 10.0
"""How long a request's headers may take, from the connection or the request's first byte on.
Between two requests a connection may be idle for longer."""

BODY_S = 30.0
"""How long a body may take to begin, and how far it may fall behind `MIN_BODY_BYTES_PER_S`."""

MIN_BODY_BYTES_PER_S = 100_000


class Deadlines(asyncio.Protocol):
    """Closes a connection whose request headers are late. A mixin before one of uvicorn's
    protocols. `Gate` keeps the body's deadline, because it can answer."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        protocol: Any = self  # uvicorn's two protocols have these in common, and no base class
        request = protocol.cycle
        if request is not None and not request.response_complete:
            self._unwatch()
        elif self._late is None and not protocol.transport.is_closing():
            self._late = protocol.loop.call_later(HEADERS_S, protocol.transport.close)

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class HttpConnection(Deadlines, AutoHTTPProtocol):
    """One connection of a service."""


def may_name(path: Path, folders: Sequence[Path] | None, settings: Settings) -> bool:
    """Returns whether the resolved path is below one of the `folders`. Without `folders`, any path
    may be named if the service listens on this machine only and no API key asks, and none
    otherwise."""
    if folders is None and is_loopback(settings.host) and caller.get() is None:
        return True
    return any(path.is_relative_to(folder.resolve()) for folder in folders or ())


def other_folders(path: Path, settings: Settings) -> str | None:
    """Returns the folders below which models may be named, for people, if the resolved path is
    below none of them; else None."""
    folders = settings.model_dirs
    if path.is_relative_to(settings.runs_dir.resolve()) or may_name(path, folders, settings):
        return None
    unset = ", as HONE_MODEL_DIRS is not set" if folders is None else ""
    return ", ".join(map(str, (settings.runs_dir, *(folders or ())))) + unset
