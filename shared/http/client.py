"""The one client for the services. It sends, polls and waits; retry.py decides what is sent again,
when, and when a call is given up.

A call has a deadline. It sends `Prefer: respond-async`, so work longer than a proxy's time limit is
polled for. After a dropped connection or a restart of the service it asks again with the same
idempotency key. Streams and files are resumed where they broke. (Redis and judges have clients of
their own, which retry by their own rules.)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar, cast

import httpx2 as httpx
from pydantic import BaseModel

from shared.errors import BadRequest, Busy, HoneError, Unavailable, from_problem
from shared.host import tracing
from shared.host.logs import get_logger, request_id
from shared.http import codec
from shared.http.connecting import (
    Absence,
    Poller,
    Presence,
    Tell,
    client_options,
    no_notify,
    send_following,
)
from shared.http.retry import GiveUp, Poll, Retry, Send
from shared.http.urls import PORTS, without_password
from shared.wire import VersionInfo

WAIT_S = 20
READ_S = WAIT_S + 10.0
FILE_READ_S = 60.0
"""Seconds without a byte of a file, which a slow disk may need for the first one."""

MAX_FETCHES = 4
"""Most results fetched at once: polled operations end together, and their results are large."""

CHUNK_BYTES = 1 << 20
"""Larger bodies are sent in pieces of this size."""

HUB = "the Hugging Face Hub"

M = TypeVar("M", bound=BaseModel)


def _timeout(read_s: float) -> httpx.Timeout:
    return httpx.Timeout(connect=5.0, read=read_s, write=60.0, pool=None)


class Client:
    """Calls one service, which errors call `name`. `binary` sends and asks for msgpack instead of
    JSON. A call fails once the service was unavailable (unreachable, or answering 503) for
    `patience_s` seconds without a break, even if its deadline is later. `tell` is called when the
    service has been away for some seconds, and when it is back; `unreachable` is as in `Presence`.
    `headers` go with every request."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        token: str | None = None,
        binary: bool = False,
        patience_s: float = 90.0,
        transport: httpx.AsyncBaseTransport | None = None,
        tell: Tell = no_notify,
        unreachable: dict[Presence, Absence] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._shown = without_password(self.url)
        self._patience_s = patience_s
        self._media_type = codec.MSGPACK if binary else codec.JSON
        options = client_options(self.url, token)
        options["headers"] |= {"accept": self._media_type, **(headers or {})}
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            **options, timeout=_timeout(READ_S), limits=limits, transport=transport
        )
        self.poller = Poller(self._http, WAIT_S)
        self._fetching = asyncio.Semaphore(MAX_FETCHES)
        self.presence = Presence(name, tell, unreachable)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self.presence.forget()
        await self.poller.close()
        await self._http.aclose()

    async def ping(self, deadline_s: float) -> None:
        """Raises Unavailable at once if nothing answers. Raises BadRequest, naming the setting, if
        another service or something else answers."""
        named = (
            f"HONE_{self.name.upper()}_URL is the {self.name} service's, by default "
            f"http://127.0.0.1:{PORTS[self.name]}"
        )
        try:
            found = await self.call(
                "GET", "/version", None, VersionInfo, deadline_s=deadline_s, patience_s=0
            )
        except Unavailable:
            raise
        except HoneError as error:
            raise BadRequest(
                f"what answers at {self._shown} is no service of Hone; {named}"
            ) from error
        if found.service != self.name:
            raise BadRequest(
                f"{self._shown} is the {found.service} service of Hone, not the {self.name} "
                f"service; {named}"
            )

    async def get(
        self, path: str, result: type[M], *, deadline_s: float = 30.0, beside: bool = False
    ) -> M:
        """Returns what `GET path` answers. Raises the service's own HoneError, or Unavailable after
        `deadline_s`. It may be asked `beside` a call that the service cannot work on now: then the
        answer does not say that the service is back."""
        ask = _Ask("GET", path, beside=beside)
        return await self._call(ask, self._retry(ask, deadline_s), result)

    async def call(
        self,
        method: str,
        path: str,
        body: BaseModel | None,
        result: type[M],
        *,
        deadline_s: float,
        key: str | None = None,
        wait_s: int | None = None,
        patience_s: float | None = None,
    ) -> M:
        """Returns the result of the operation. `deadline_s`: the maximum time for it, in seconds.

        `key` is its Idempotency-Key; without one each call has its own. After `wait_s` seconds (20)
        the operation is polled for, together with all others of this client, so it holds no
        connection. `patience_s` replaces the client's; if it is longer than the deadline, time in
        which the service is unreachable does not count towards the deadline. Raises the service's
        own HoneError, or Unavailable naming the service and what it waited for.
        """
        wait_s = WAIT_S if wait_s is None else wait_s
        ask = _Ask(method, path, body, key or secrets.token_hex(12), wait_s)
        return await self._call(ask, self._retry(ask, deadline_s, patience_s), result)

    async def upload(
        self,
        path: str,
        file: IO[bytes],
        name: str,
        fields: Mapping[str, str],
        result: type[M],
        *,
        deadline_s: float,
        key: str,
    ) -> M:
        """Returns the answer to the form with `fields` and the seekable `file`, called `name`.
        `key` is its Idempotency-Key."""
        ask = _Ask("POST", path, None, key, WAIT_S, _Form(file, name, fields))
        return await self._call(ask, self._retry(ask, deadline_s), result)

    async def follow(
        self,
        path: str,
        *,
        last_id: str | None = None,
        patience_s: float,
        away: Callable[[float], None] = lambda _: None,
    ) -> AsyncGenerator[tuple[str, str, str]]:
        """Yields as `events` does, and resumes after the last event with an id, until the caller
        closes it or the service was unreachable for `patience_s` seconds. `away` is called with
        these seconds at each attempt that failed."""
        retry = self._retry(_Ask("GET", path), math.inf, patience_s)
        while True:
            try:
                async with contextlib.aclosing(self.events(path, last_id=last_id)) as events:
                    async for event in events:
                        retry.progressed(time.monotonic())
                        last_id = event[0] or last_id
                        yield event
            except HoneError as error:
                pause_s = retry.pause_s(error, time.monotonic())
                away(retry.away_s(time.monotonic()))
                await asyncio.sleep(pause_s)

    async def events(
        self, path: str, *, last_id: str | None = None
    ) -> AsyncGenerator[tuple[str, str, str]]:
        """Yields `(id, event, data)` of the server-sent events at `path` after `last_id`, without
        resuming."""
        headers = {"accept": "text/event-stream"} | ({"last-event-id": last_id} if last_id else {})
        async with self._stream(path, headers, 200) as response:
            fields: dict[str, str] = {}
            async for line in _lines(response):
                name, _, value = line.partition(":")
                if line and name:
                    before = f"{fields[name]}\n" if name == "data" and "data" in fields else ""
                    fields[name] = before + value.removeprefix(" ")
                elif not line and "data" in fields:
                    yield fields.get("id", ""), fields.get("event", "message"), fields["data"]
                    fields = {}

    async def download(
        self,
        path: str,
        target: Path,
        size_bytes: int,
        *,
        patience_s: float,
        progress: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Appends the bytes of the file at `path` that `target` lacks, until it has `size_bytes` or
        the file has ended, and returns how many `target` has, which can be more. `progress` is
        called with that number after each piece. Resumes where a connection breaks. Raises the
        service's own HoneError, and Unavailable after `patience_s` seconds without a byte."""
        retry = self._retry(_Ask("GET", path), math.inf, patience_s)
        have_bytes = target.stat().st_size
        with target.open("ab") as sink:
            while have_bytes < size_bytes:
                pieces = self.pieces(path, first_byte=(first_byte := have_bytes))
                try:
                    async with contextlib.aclosing(pieces):
                        async for piece in pieces:
                            sink.write(piece)
                            have_bytes += len(piece)
                            progress(have_bytes)
                            retry.progressed(time.monotonic())
                            if have_bytes > size_bytes:
                                break
                except HoneError as error:
                    pause_s = retry.pause_s(error, time.monotonic())
                    get_logger().warning("transfer interrupted", file=path, reason=error.detail)
                    await asyncio.sleep(pause_s)
                else:
                    if have_bytes == first_byte:
                        break
        return have_bytes

    async def pieces(self, path: str, *, first_byte: int = 0) -> AsyncGenerator[bytes]:
        """Yields the bytes of the file at `path` from `first_byte` on, without resuming. Raises the
        service's own HoneError, and Unavailable where the connection breaks."""
        part = {"range": f"bytes={first_byte}-"} if first_byte else {}
        headers = {"accept-encoding": "identity"} | part
        async with self._stream(path, headers, 200, 206, read_s=FILE_READ_S) as response:
            # a proxy may have dropped the range
            left_out = 0 if response.status_code == 206 else first_byte
            async for piece in response.aiter_raw():
                if new := piece[left_out:]:  # what the caller has is no progress
                    yield new
                left_out = max(left_out - len(piece), 0)

    @contextlib.asynccontextmanager
    async def _stream(
        self, path: str, headers: Mapping[str, str], *statuses: int, read_s: float = READ_S
    ) -> AsyncGenerator[httpx.Response]:
        """Yields the open response with one of the statuses. Raises the service's own HoneError for
        another one, and Unavailable if the connection breaks in the block."""
        headers = {"x-request-id": request_id(), **headers}
        timeout = _timeout(read_s)
        try:
            async with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
                if response.status_code not in statuses:
                    await response.aread()
                    raise self._error(response)
                yield response
        except httpx.RequestError as error:
            raise self._unreachable(error) from error

    def _request(self, ask: _Ask) -> httpx.Request:
        content: bytes | _Chunks | None = None
        headers = {"x-request-id": request_id(), **tracing.headers()}
        if ask.body is not None:
            data = (
                codec.pack(ask.body)
                if self._media_type == codec.MSGPACK
                else memoryview(codec.encode(ask.body))
            )
            content = bytes(data) if len(data) <= CHUNK_BYTES else _Chunks(data)
            headers |= {"content-type": self._media_type, "content-length": str(len(data))}
        if ask.key:
            prefer = f"respond-async, wait={ask.wait_s}"
            headers |= {"prefer": prefer, "idempotency-key": ask.key}
        if ask.form is None:
            return self._http.build_request(ask.method, ask.path, content=content, headers=headers)
        files = {"file": (ask.form.name, ask.form.file)}
        return self._http.build_request(
            ask.method, ask.path, data=dict(ask.form.fields), files=files, headers=headers
        )

    def _retry(self, ask: _Ask, deadline_s: float, patience_s: float | None = None) -> Retry:
        return Retry(
            f"{self.name} at {self._shown}",
            f"{ask.method} {ask.path}",
            time.monotonic(),
            deadline_s=deadline_s,
            patience_s=self._patience_s if patience_s is None else patience_s,
            counts_away=patience_s is None or patience_s <= deadline_s,
        )

    async def _call(self, ask: _Ask, retry: Retry, result: type[M]) -> M:
        """Does what `retry` says until there is a result."""
        request = self._request(ask)
        action: Send | Poll | GiveUp = Send()
        while True:
            try:
                async with asyncio.timeout(retry.left_s(time.monotonic())):
                    response = await self._answer(action, request, retry)
            except TimeoutError as error:
                raise retry.late().error from error
            except httpx.RequestError as error:
                problem = self._unreachable(error)
            else:
                if response.status_code < 500 and not ask.beside:
                    await self.presence.heard()
                if response.status_code in (200, 201):
                    media_type = response.headers.get("content-type", codec.JSON).partition(";")[0]
                    return codec.decode_tolerantly(result, response.content, media_type)
                if response.status_code == 202 and "location" in response.headers:
                    action = retry.accepted(response.headers["location"], time.monotonic())
                    continue
                problem = self._error(response)
            asked_at, action = retry.sent_at, retry.failed(problem, time.monotonic())
            if isinstance(action, GiveUp):
                raise action.error
            if isinstance(problem, Unavailable) and not isinstance(problem, Busy):
                who = HUB if problem.code == "hub_away" else None
                await self.presence.missed(asked_at, problem.detail, who)

    async def _answer(
        self, action: Send | Poll, request: httpx.Request, retry: Retry
    ) -> httpx.Response:
        """Returns the answer to the request, or the result of the operation once it has ended."""
        if action.pause_s:
            await asyncio.sleep(action.pause_s)
        if isinstance(action, Send):
            response = await send_following(self._http, request)
        else:
            try:
                await self.poller.ended(action.location)
            finally:
                retry.heard(self.poller.heard_at)
            async with self._fetching:
                fetch = self._http.build_request("GET", action.location)
                response = await send_following(self._http, fetch)
        return response

    def _error(self, response: httpx.Response) -> HoneError:
        try:
            document: Any = response.json()
        except (json.JSONDecodeError, UnicodeDecodeError):
            document = None
        problem = cast(dict[str, Any], document) if isinstance(document, dict) else None
        error = from_problem(response.status_code, problem, f"{self.name} at {self._shown}")
        after = response.headers.get("retry-after", "")
        if isinstance(error, Busy) and after.isdecimal():
            error.retry_after_s = int(after)
        return error

    def _unreachable(self, error: httpx.RequestError) -> Unavailable:
        why = f"{type(error).__name__}: {str(error) or 'connection lost'}"
        return Unavailable(
            f"cannot reach the {self.name} service at {self._shown}: {why}", code="unreachable"
        )


async def _lines(response: httpx.Response) -> AsyncGenerator[str]:
    """Yields the lines of a stream of events. Other line separators, such as U+2028, do not end a
    line: JSON contains them unescaped."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode()


@dataclass(frozen=True)
class _Ask:
    """A request, with the arguments of `Client.call`. Without a key it is not an operation."""

    method: str
    path: str
    body: BaseModel | None = None
    key: str | None = None
    wait_s: int = 0
    form: _Form | None = None
    beside: bool = False


@dataclass(frozen=True)
class _Form:
    """A file and the fields of its form. Each attempt reads the file from its beginning."""

    file: IO[bytes]
    name: str
    fields: Mapping[str, str]


class _Chunks:
    """A large body, sent in pieces as often as it is asked for: sent at once, it would be copied
    twice on its way into the socket."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        for start in range(0, len(self._data), CHUNK_BYTES):
            yield bytes(self._data[start : start + CHUNK_BYTES])
