"""Calls that take longer than a front door waits, and front doors that answer in a service's place:
each call happens once, and its caller gets its answer."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

import httpx2 as httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from shared.errors import Unavailable
from shared.http.client import Client
from shared.http.connecting import proxy_headers
from shared.http.service import Service, request_key
from shared.settings import Settings
from shared.wire import Aborted, NoBody

CALL = "__modal_function_call_id"


class ModalFrontDoor:
    """An ASGI application before `service`. What the service has not answered within `limit_s`
    (150 s, at Modal) is asked for at the location of a 303, by GET alone. Without the `key` and
    `secret` of a proxy token nothing gets through. `seen` counts the answers by status."""

    def __init__(self, service: Any, *, limit_s: float, key: str, secret: str) -> None:
        transport = httpx.ASGITransport(app=service)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
        self._limit_s = limit_s
        self._token = (key, secret)
        self._numbers = itertools.count(1)
        self._calls: dict[str, asyncio.Task[httpx.Response]] = {}
        self.seen: Counter[int] = Counter()
        self.app = Starlette(
            routes=[Route("/{path:path}", self._answer, methods=["GET", "POST", "PUT", "DELETE"])]
        )

    async def _answer(self, request: Request) -> Response:
        response = await self._answered(request)
        self.seen[response.status_code] += 1
        return response

    async def _answered(self, request: Request) -> Response:
        headers = request.headers
        if (headers.get("modal-key"), headers.get("modal-secret")) != self._token:
            return PlainTextResponse("modal-http: missing credentials for proxy authorization", 401)
        call = request.query_params.get(CALL)
        if call is None:
            call = f"fc-{next(self._numbers)}"
            self._calls[call] = asyncio.create_task(self._passed_on(request, await request.body()))
        elif request.method != "GET":
            return PlainTextResponse("modal-http: bad redirect method", 400)
        done, _ = await asyncio.wait({self._calls[call]}, timeout=self._limit_s)
        if not done:
            location = f"{request.url.path}?{CALL}={call}"
            return Response(status_code=303, headers={"location": location})
        answer = self._calls[call].result()
        kept = {k: v for k, v in answer.headers.items() if k in ("content-type", "location")}
        return Response(answer.content, answer.status_code, kept)

    async def _passed_on(self, request: Request, body: bytes) -> httpx.Response:
        headers = {k: v for k, v in request.headers.items() if not k.startswith("modal-")}
        url = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return await self._http.request(
            request.method, url, content=body, headers=headers | {"host": "127.0.0.1"}
        )


class BadGateway:
    """An ASGI application before `service` that answers some requests itself: the first of each
    path with 502 before the service sees it, the second with 504 after it has."""

    def __init__(self, service: Any) -> None:
        transport = httpx.ASGITransport(app=service)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
        self.seen: Counter[str] = Counter()
        self.app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])])

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        self.seen[path] += 1
        if self.seen[path] == 1:
            return PlainTextResponse("<html>502 Bad Gateway</html>", 502)
        headers = {**request.headers, "host": "127.0.0.1"}
        answer = await self._http.request(
            request.method, path, content=await request.body(), headers=headers
        )
        if self.seen[path] == 2:
            return PlainTextResponse("<html>504 Gateway Time-out</html>", 504)
        kept = {k: v for k, v in answer.headers.items() if k in ("content-type", "location")}
        return Response(answer.content, answer.status_code, kept)


KEY, SECRET = "wk-abc", "ws-def"
LIMIT_S = 0.05
"""For Modal's 150 s."""

URL = "http://test--api.modal.run"


class Work:
    """A service whose work takes `takes_s`; `done` counts it by key."""

    def __init__(self, settings: Settings, takes_s: float) -> None:
        self.done: Counter[str | None] = Counter()
        self._takes_s = takes_s
        service = Service("reward", settings)
        service.operation("POST", "/work", self._work)
        self.app = service.app

    async def _work(self, _: NoBody) -> Aborted:
        await asyncio.sleep(self._takes_s)
        self.done[request_key.get()] += 1
        return Aborted(num_requests=1)


@pytest.fixture(autouse=True)
def proxy_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HONE_MODAL_KEY", KEY)
    monkeypatch.setenv("HONE_MODAL_SECRET", SECRET)


def caller(door: Any, **options: Any) -> Client:
    return Client("reward", URL, transport=httpx.ASGITransport(app=door.app), **options)


@pytest.mark.parametrize("wait_s", [20, 0])
async def test_a_call_that_outlives_many_legs_is_done_once(settings: Settings, wait_s: int) -> None:
    """By 303, where the caller would wait on; by 202 and polls, which are cut too, where not."""
    work = Work(settings, takes_s=30 * LIMIT_S)
    door = ModalFrontDoor(work.app, limit_s=LIMIT_S, key=KEY, secret=SECRET)
    async with caller(door) as client:
        got = await client.call(
            "POST", "/work", NoBody(), Aborted, deadline_s=60, key="a", wait_s=wait_s
        )
    assert got.num_requests == 1 and work.done == {"a": 1}
    assert door.seen[303] >= (20 if wait_s else 1), "more than httpx follows by itself"
    assert not door.seen[400], "no POST to where a 303 leads"


async def test_a_front_door_that_is_shown_no_proxy_token_lets_no_one_in(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HONE_MODAL_KEY")
    work = Work(settings, takes_s=0)
    door = ModalFrontDoor(work.app, limit_s=LIMIT_S, key=KEY, secret=SECRET)
    async with caller(door) as client:
        with pytest.raises(Exception, match="answered 401 without saying why"):
            await client.call("POST", "/work", NoBody(), Aborted, deadline_s=5)
    assert work.done == {}


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://ws--hone-orchestrator-api.modal.run", True),
        ("https://ws--hone-rollout-sampler0.us-east.modal.direct", True),
        ("https://modal.run.example.org", False),
        ("https://evilmodal.run", False),
        ("http://127.0.0.1:8000", False),
        ("https://example.org/.modal.run", False),
    ],
)
def test_the_proxy_token_is_shown_to_hosts_of_modal_only(url: str, shown: bool) -> None:
    assert proxy_headers(url) == ({"modal-key": KEY, "modal-secret": SECRET} if shown else {})


async def test_what_a_503_or_a_bad_gateway_hides_is_asked_for_again_and_done_once(
    settings: Settings,
) -> None:
    work = Work(settings, takes_s=0.01)
    door = BadGateway(work.app)
    async with caller(door) as client:
        got = await client.call("POST", "/work", NoBody(), Aborted, deadline_s=60, key="a")
    assert got.num_requests == 1
    assert work.done == {"a": 1} and door.seen["/work"] == 3


async def test_a_redirect_to_another_host_is_not_followed(settings: Settings) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return httpx.Response(303, headers={"location": "http://elsewhere.example/work"})

    transport = httpx.MockTransport(answer)
    async with Client("reward", URL, transport=transport, patience_s=0.0) as client:
        with pytest.raises(Unavailable, match="on to another host: http://elsewhere"):
            await client.call("POST", "/work", NoBody(), Aborted, deadline_s=5)
    assert set(asked) == {"test--api.modal.run"}


async def test_a_door_that_gives_up_the_poll_of_a_result_is_asked_from_the_start(
    settings: Settings,
) -> None:
    """Modal's has been seen to answer 408 where its 303 leads."""
    requests: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(f"{request.method} {request.url.raw_path.decode()}")
        if len(requests) == 1:
            return httpx.Response(303, headers={"location": "/work?call=fc-1"})
        if len(requests) == 2:
            return httpx.Response(408)
        return httpx.Response(200, json={"num_requests": 1})

    transport = httpx.MockTransport(answer)
    async with Client("reward", URL, transport=transport) as client:
        got = await client.call("POST", "/work", NoBody(), Aborted, deadline_s=20)
    assert got.num_requests == 1
    assert requests == ["POST /work", "GET /work?call=fc-1", "POST /work"]
