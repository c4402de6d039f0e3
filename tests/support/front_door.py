"""The front doors that stand before services elsewhere: Modal's, which answers 303 to what takes
long and is asked on by GET; and a proxy's, which answers 502 or 504."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

import httpx2 as httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

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
