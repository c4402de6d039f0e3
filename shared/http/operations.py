"""Work that outlives the request that asked for it: idempotent by key, waited for or polled (RFC
7240 `respond-async`).

The same key with the same body joins the work under way, or gets its result again; with another
body it is a conflict. A client that goes away cancels nothing. Failed work is forgotten with its
key, so a repeated request tries again.

Beside it are the routes for a service's own state and draining, the time between SIGTERM and the
service's end, in which waiting callers are told at once that their work will not be finished; and
files, whole or by range.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from shared.errors import Conflict, Failed, HoneError, Malformed, NotFound, Unavailable
from shared.host import tracing
from shared.host.logs import get_logger
from shared.http import rendering
from shared.wire import Dependency, Health, Readiness, VersionInfo, WaitRequest, WaitResult

T = TypeVar("T")

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz", "/version"})
"""Paths that need no token. Only the sampler has `/health`, as vLLM's server does."""


class Starting(str):
    """Why a dependency is not ready when it only needs time to start."""

    __slots__ = ()


Check = Callable[[], Awaitable[str | None]]
"""Returns None when the dependency is ready, else what it waits for."""


@functools.cache
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
    draining: DrainState,
    version_info: Callable[[], dict[str, Any]],
) -> None:
    @app.get("/healthz")
    async def healthz() -> Health:
        """The process lives."""
        return Health(service=name)

    not_ready: rendering.Responses = {
        503: rendering.problem_responses()[503] | {"model": Readiness}
    }

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

    metrics_text: rendering.Responses = {
        200: rendering.without_model("metrics as text", "text/plain", schema=rendering.TEXT)
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


class DrainState:
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
            f"the {self._name} service is shutting down; ask its successor",
            code="draining",
        )

    def ends_stream(self, task: asyncio.Task[Any]) -> None:
        """Cancels the task when draining begins. The task answers a stream that would never end on
        its own."""
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)


KEEP_S = 600.0
"""How long the result of an operation is kept, whether or not someone fetched it."""

KEEP_COUNT = 1024
"""How many fetched results are kept, in case an answer is lost on its way. Results that no one has
fetched yet do not count: a step may have any number of groups under way."""

BUSY_CHECK_S = 0.05
"""Poll interval of the load check, in seconds, while a caller waits for the load to fall."""


@dataclass
class Operation:
    id: str
    key: str | None
    fingerprint: str
    task: asyncio.Task[BaseModel]
    durable: bool = False
    finished_at: float | None = field(default=None)
    fetched: bool = False


class Operations:
    """All operations of one process. Finished operations are kept `KEEP_S` seconds, but only the
    newest `KEEP_COUNT` fetched ones."""

    def __init__(self, deadline_s: float, draining: DrainState) -> None:
        self._deadline_s = deadline_s
        self._draining = draining
        self._by_id: dict[str, Operation] = {}
        self._by_key: dict[str, Operation] = {}
        self._finished_ids: deque[str] = deque()
        self._fetched_ids: deque[str] = deque()

    def start(
        self,
        work: Callable[[], Awaitable[BaseModel]],
        key: str | None,
        fingerprint: str,
        name: str,
        *,
        durable: bool = False,
    ) -> Operation:
        """Returns the operation of `key`, and starts it unless it was started before. Raises
        Conflict for the same key with another body. `durable` work remembers its result itself, by
        key: while it runs it is joined, afterwards it is called again."""
        self._forget_old()
        if key and (known := self._by_key.get(key)):
            if known.fingerprint != fingerprint:
                raise Conflict(
                    f"{key!r} was already asked for with another body; the same key must come with "
                    "the same body",
                    code="body_differs",
                )
            return known
        task = asyncio.create_task(self._run(work, name))
        operation = Operation(secrets.token_hex(12), key, fingerprint, task, durable)
        self._by_id[operation.id] = operation
        if key:
            self._by_key[key] = operation
        task.add_done_callback(lambda _: self._finished(operation))
        return operation

    def get(self, id: str) -> Operation:
        if operation := self._by_id.get(id):
            return operation
        raise NotFound(
            f"no operation {id!r}: it was never started here, or the service was restarted since",
            code="no_operation",
        )

    async def wait(
        self,
        operation: Operation,
        wait_s: float | None,
        gone: Coroutine[Any, Any, None] | None = None,
    ) -> BaseModel | None:
        """Returns the result, or None if the work takes longer than `wait_s` seconds.

        Raises the work's own HoneError, or Unavailable as soon as the service drains. `gone` ends
        when the client goes away; if it ends first, the work is cancelled.
        """
        ended = await first_of([operation.task], self._draining.wait(), gone, timeout_s=wait_s)
        if not operation.task.done() and self._draining.has_begun():
            raise self._draining.error()
        if not operation.task.done() and ended:
            operation.task.cancel()
            await asyncio.wait({operation.task})
        if not operation.task.done():
            return None
        if not operation.fetched:
            operation.fetched = True
            self._fetched_ids.append(operation.id)
        return operation.task.result()

    async def wait_any(self, wanted: WaitRequest, busy: Callable[[], int]) -> WaitResult:
        """Returns which of the operations have ended, unknown ones included. Returns as soon as one
        has ended, or `busy()` is below `busy_below` and the caller does not know it, or the time is
        over, or the service drains."""
        tasks = [self._by_id[id].task for id in wanted.ids if id in self._by_id]
        if len(tasks) == len(wanted.ids) and not any(task.done() for task in tasks):
            few = _until_below(busy, wanted.busy_below, wanted.busy) if wanted.busy_below else None
            await first_of(tasks, self._draining.wait(), few, timeout_s=wanted.wait_s)
        ended = tuple(
            id for id in wanted.ids if id not in self._by_id or self._by_id[id].task.done()
        )
        return WaitResult(ids=wanted.ids if self._draining.has_begun() else ended, busy=busy())

    def num_running(self) -> int:
        return sum(not operation.task.done() for operation in self._by_id.values())

    async def close(self) -> None:
        running = [
            operation.task for operation in self._by_id.values() if not operation.task.done()
        ]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, work: Callable[[], Awaitable[BaseModel]], name: str) -> BaseModel:
        try:
            with tracing.span(name, serves=True):
                async with failing_as(name, self._deadline_s):
                    return await work()
        except asyncio.CancelledError as error:
            if self._draining.has_begun():
                raise self._draining.error() from error
            raise Failed(f"{name} was cancelled: its client disconnected") from error

    def _finished(self, operation: Operation) -> None:
        operation.finished_at = time.monotonic()
        self._finished_ids.append(operation.id)
        failed = operation.task.cancelled() or operation.task.exception() is not None
        forgotten = failed or operation.durable
        if forgotten and operation.key and self._by_key.get(operation.key) is operation:
            del self._by_key[operation.key]

    def _forget_old(self) -> None:
        """Forgets what is older than `KEEP_S` or beyond `KEEP_COUNT`. Each start of an operation
        calls it, so it looks only at operations that it forgets."""
        while len(self._fetched_ids) > KEEP_COUNT:
            self._forget(self._fetched_ids.popleft())
        before = time.monotonic() - KEEP_S
        while self._finished_ids:
            oldest = self._by_id.get(self._finished_ids[0])
            if oldest and oldest.finished_at is not None and oldest.finished_at >= before:
                break
            self._forget(self._finished_ids.popleft())

    def _forget(self, id: str) -> None:
        operation = self._by_id.pop(id, None)
        if operation and operation.key and self._by_key.get(operation.key) is operation:
            del self._by_key[operation.key]


@contextlib.asynccontextmanager
async def failing_as(name: str, deadline_s: float) -> AsyncGenerator[None]:
    """Turns any exception of the block into a HoneError that names the operation."""
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError as error:
        raise Failed(
            f"{name} was not done after {deadline_s:g} s (setting HONE_OPERATION_DEADLINE_S)"
        ) from error
    except HoneError:
        raise
    except Exception as error:  # a bug: the last resort of a request's work
        get_logger().exception("operation failed", operation=name)
        raise Failed(f"{name}: {type(error).__name__}: {error}", code="bug") from error


async def first_of(
    work: Iterable[asyncio.Task[Any]],
    *ends: Coroutine[Any, Any, None] | None,
    timeout_s: float | None = None,
) -> bool:
    """Waits until one of the tasks or of `ends` is done, or the time is over. Returns whether one
    of `ends` was done. `ends` are then cancelled, the tasks are not."""
    watches = [asyncio.create_task(end) for end in ends if end is not None]
    try:
        await asyncio.wait(
            {*work, *watches}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        return any(watch.done() for watch in watches)
    finally:
        for watch in watches:
            watch.cancel()


async def _until_below(busy: Callable[[], int], limit: int, told: int | None) -> None:
    """Returns once `busy()` has changed from the value that the caller was told, and is below the
    limit. Never returns at once: work that was just asked for may not have begun."""
    await asyncio.sleep(BUSY_CHECK_S)
    while busy() == told:
        await asyncio.sleep(BUSY_CHECK_S)
    while busy() >= limit:
        await asyncio.sleep(BUSY_CHECK_S)


async def unless_gone(work: Coroutine[Any, Any, T], request: Request) -> T:
    """Returns the result of the work. If the request's client disconnects before, cancels the work
    and raises ClientDisconnect, which is logged with status 499."""
    task = asyncio.create_task(work)
    is_gone = False
    try:
        is_gone = await first_of([task], client_gone(request))
    finally:
        task.cancel()
        await asyncio.wait({task})
    if task.cancelled():
        raise ClientDisconnect if is_gone else Failed("the work of the request was cancelled")
    return task.result()


async def client_gone(request: Request) -> None:
    """Returns once the client has disconnected. The request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


BYTES = "application/octet-stream"

RANGE = re.compile(r"bytes=(?:(?P<first>\d{1,18})-(?P<last>\d{1,18})?|-\d{1,18})")
"""One range: from one byte to another, from a byte on, or the last so many bytes."""

DOWNLOADED: rendering.Responses = {
    200: rendering.without_model("the file", BYTES),
    206: rendering.without_model("the part of the file that `Range` asked for", BYTES),
    416: rendering.without_model("`Range` begins beyond the end of the file", "text/plain"),
}


class DownloadedFile(FileResponse):
    """The file at `path`, as `filename` if one is given. Raises NotFound for a file that was
    removed since, and Malformed for an invalid `Range`."""

    chunk_size = 1 << 20

    def __init__(
        self, path: os.PathLike[str], filename: str | None = None, status_code: int = 200
    ) -> None:
        # FastAPI reads the status that the OpenAPI document shows from these parameters.
        super().__init__(path, status_code, media_type=BYTES, filename=filename)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _check_range(Headers(scope=scope).get("range"))
        try:
            self.stat_result = await asyncio.to_thread(os.stat, self.path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"{str(self.path)!r} is not there any more") from error
        self.set_stat_headers(self.stat_result)
        await super().__call__(scope, receive, send)


def _check_range(given: str | None) -> None:
    found = None if given is None else RANGE.fullmatch(given)
    is_backward = found and found["last"] and int(found["last"]) < int(found["first"])
    if given is not None and (found is None or is_backward):
        raise Malformed(
            f"the header Range is {given!r:.80}; expected one range of bytes, such as "
            "bytes=1000-1999 or bytes=1000-"
        )
