"""How a caller reaches a service: the certificates that it trusts, Modal's front door, whether the
service is unreachable over all calls of one client, and waiting for many operations of the service
in one request. Modal's door asks for a proxy token, and redirects requests that take longer than
150 s."""

from __future__ import annotations

import asyncio
import functools
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypedDict
from urllib.parse import urlsplit

import httpx2 as httpx

from shared.errors import HoneError, Unavailable
from shared.host.logs import get_logger
from shared.http import codec
from shared.http.urls import is_direct
from shared.wire import WAIT_PATH, WaitRequest, WaitResult

HOSTS = (".modal.run", ".modal.direct")
"""Endings of its host names. The proxy token is sent to no other host."""


def proxy_headers(url: str) -> dict[str, str]:
    """Returns the headers with the proxy token, if the URL is of a host of Modal's."""
    if not (urlsplit(url).hostname or "").endswith(HOSTS):
        return {}
    from shared.settings import (
        load_settings,  # loads all settings, so only for Modal's hosts
    )

    settings = load_settings()
    if settings.modal_key is None or settings.modal_secret is None:
        return {}
    return {
        "modal-key": settings.modal_key.get_secret_value(),
        "modal-secret": settings.modal_secret.get_secret_value(),
    }


async def send_following(http: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    """Returns the answer to the request. It follows any number of 303 redirects by GET, so the
    request itself is not sent again. Raises Unavailable for a redirect to another host, which must
    not see this host's token."""
    response = await http.send(request)
    while response.status_code == 303:
        asked, location = response.request.url, response.headers.get("location", "")
        to = asked.join(location)
        if (to.scheme, to.host, to.port) != (asked.scheme, asked.host, asked.port):
            raise Unavailable(f"{asked} sends us on to another host: {to}", code="unreachable")
        response = await http.get(to)
    return response


@functools.cache
def ssl_context() -> ssl.SSLContext:
    """Returns one context for all clients. A context for each client would read every certificate
    again, 25 ms of CPU time."""
    return httpx.create_ssl_context()


@functools.cache
def context_without_certificates() -> ssl.SSLContext:
    """Returns the one context without certificates: reading certificates takes long."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def ssl_context_for(url: str) -> ssl.SSLContext:
    """Returns the context for clients of the service at `url`: without certificates for `http:`."""
    return context_without_certificates() if url.startswith("http:") else ssl_context()


class ClientOptions(TypedDict):
    """Arguments of an httpx client."""

    base_url: str
    headers: dict[str, str]
    trust_env: bool
    verify: ssl.SSLContext


def client_options(url: str, token: str | None) -> ClientOptions:
    """Returns how an httpx client reaches one of Hone's services: with the stack's token and
    Modal's, and by the environment's proxy only if the service is on another network."""
    authorization = {"authorization": f"Bearer {token}"} if token else {}
    return {
        "base_url": url,
        "headers": authorization | proxy_headers(url),
        "trust_env": not is_direct(urlsplit(url).hostname or ""),
        "verify": ssl_context_for(url),
    }


Tell = Callable[[str, bool], Awaitable[None]]
"""Called with a message for people, and with whether the service is unreachable."""

AWAY_S = 3.0
"""Seconds without an answer after which a service is said to be away. A restart within them is
not reported."""


def since(at: float) -> str:
    """Returns the start and length of a period for messages; `at` is Unix time."""
    return f"since {_clock(at)} UTC ({time.time() - at:.0f} s)"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(at))


async def no_notify(_message: str, _away: bool) -> None:
    pass


@dataclass(frozen=True)
class Absence:
    """A service, as "the trainer service", that is unreachable since a Unix time, and whether that
    is told."""

    who: str
    at: float
    is_told: bool


class Presence:
    """Tracks one service. It does not answer if there is no connection, or it says that it cannot
    work now. After `AWAY_S` seconds that is logged and told, once, as is its return; in between
    `unreachable` has it. Trackers may share `unreachable`: a service is back when it is so for
    all."""

    def __init__(
        self, service: str, tell: Tell, unreachable: dict[Presence, Absence] | None = None
    ) -> None:
        self._service = self._who = f"the {service} service"
        self._tell = tell
        self._since: float | None = None
        self._unreachable = dict[Presence, Absence]() if unreachable is None else unreachable

    async def missed(self, asked_at: float, reason: str, who: str | None = None) -> None:
        """Notes that a call made at `asked_at` (time.monotonic) had no answer, and why. `who` is
        the service that is really away, if the called service waits for another one."""
        if (who or self._service) != self._who:
            if who:  # the called service has answered
                await self.heard()
            else:
                self.forget()
            self._who = who or self._service
        self._since = asked_at if self._since is None else self._since
        away_s = time.monotonic() - self._since
        if self in self._unreachable or away_s < AWAY_S:
            return
        at, known = time.time() - away_s, self._is_told(self._who)
        self._unreachable[self] = Absence(self._who, at, self._tell is not no_notify)
        if known:
            return
        message = f"{self._who} is unreachable since {_clock(at)} UTC: {reason}; waiting for it"
        get_logger().warning("service unreachable", waits_for=self._who, reason=reason)
        await self._tell(message, True)

    async def heard(self) -> None:
        """Notes that the service answered."""
        if (absence := self.forget()) is None or self._is_told(absence.who):
            return
        away_s = round(time.time() - absence.at)
        get_logger().warning("service back", waits_for=absence.who, seconds=away_s)
        await self._tell(f"{absence.who} is back after {away_s} s", False)

    def forget(self) -> Absence | None:
        """Ends an absence. Returns it if it was long enough to be noted."""
        self._since = None
        return self._unreachable.pop(self, None)

    def _is_told(self, who: str) -> bool:
        return any(one.who == who and one.is_told for one in self._unreachable.values())


GATHER_S = 0.02
"""While a poll is running, new operations are gathered for this long and then polled together.
Without a running poll an operation is polled at once."""

MAX_POLLS = 4
"""Most polls at once. Instead of one more, a single poll takes over all operations."""


class Poller:
    """Polls for one client while it waits for operations. `heard_at` is the time of the service's
    last answer. Each poll also returns once the service is less busy than `busy_below()`. `heard`
    is called with how busy the service is."""

    def __init__(self, http: httpx.AsyncClient, wait_s: float) -> None:
        self._http = http
        self._wait_s = wait_s
        self._waiting: dict[str, asyncio.Event] = {}
        self._num_callers = Counter[str]()
        self._not_asked: set[str] = set()
        self._asked: set[str] = set()
        self._polls: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._busy: int | None = None
        self.heard_at = 0.0
        self.busy_below: Callable[[], int | None] = lambda: None
        self.heard: Callable[[int], None] = lambda _: None

    async def ended(self, location: str) -> None:
        """Returns once the caller should ask for the operation at `location`."""
        id = location.rpartition("/")[2]
        woken = self._waiting.setdefault(id, asyncio.Event())
        if id not in self._asked:
            self._ask_soon(id)
        self._num_callers[id] += 1
        try:
            await woken.wait()
        finally:
            self._num_callers[id] -= 1
            if not self._num_callers[id]:
                del self._num_callers[id]
                self._waiting.pop(id, None)

    async def close(self) -> None:
        self._waiting.clear()
        if self._timer:
            self._timer.cancel()
        for poll in self._polls:
            poll.cancel()
        await asyncio.gather(*self._polls, return_exceptions=True)

    def _ask_soon(self, *ids: str) -> None:
        self._not_asked.update(ids)
        if self._timer is None:
            gather_s = GATHER_S if self._polls else 0.0
            self._timer = asyncio.get_running_loop().call_later(gather_s, self._start)

    def _start(self) -> None:
        self._timer = None
        if len(self._polls) >= MAX_POLLS:
            for poll in self._polls:
                poll.cancel()  # their operations are polled again
        ids = tuple(id for id in self._not_asked if id in self._waiting)
        self._not_asked.clear()
        if ids:
            self._asked.update(ids)
            poll = asyncio.create_task(self._poll(ids))
            self._polls.add(poll)
            poll.add_done_callback(self._polls.discard)

    async def _poll(self, ids: tuple[str, ...]) -> None:
        try:
            for id in await self._ended_of(ids):
                if woken := self._waiting.pop(id, None):
                    woken.set()
        finally:
            self._asked.difference_update(ids)
            if left := [id for id in ids if id in self._waiting]:
                self._ask_soon(*left)

    async def _ended_of(self, ids: tuple[str, ...]) -> tuple[str, ...]:
        """Returns which operations have ended; all of them if the service does not say: each call
        then asks for its result, and pauses if there is none."""
        try:
            done = await self._ask(ids)
        except (httpx.RequestError, HoneError):
            return ids
        self.heard_at = time.monotonic()
        self._busy = done.busy
        self.heard(done.busy)
        return done.ids

    async def _ask(self, ids: tuple[str, ...]) -> WaitResult:
        wanted = WaitRequest(
            ids=ids, wait_s=self._wait_s, busy_below=self.busy_below(), busy=self._busy
        )
        headers = {"content-type": codec.JSON, "accept": codec.JSON}
        response = await self._http.post(WAIT_PATH, content=codec.encode(wanted), headers=headers)
        if response.status_code != 200:
            raise HoneError(f"{WAIT_PATH} answered {response.status_code}")
        return codec.decode(WaitResult, response.content)
