"""A proxy before real services, to break one thing on the way and nothing else, or to choose
between them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable

import httpx2 as httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.support.running import served

Edit = Callable[[bytes], Awaitable[bytes]]
SKIPPED = {"host", "content-length", "content-encoding", "connection", "transfer-encoding"}
"""Headers that are of one connection, or of a body that httpx has decompressed."""


@contextlib.asynccontextmanager
async def proxy(
    target: str, path: str, *, request: Edit | None = None, response: Edit | None = None
) -> AsyncGenerator[str]:
    """Yields the URL of a proxy to `target`. Bodies of `path` pass through the edits; everything
    else passes as it is."""

    async def forward(incoming: Request) -> Response:
        edited = incoming.url.path == path
        edit_request, edit_response = (request, response) if edited else (None, None)
        return await _pass_on(client, incoming, edit_request, edit_response)

    async with _client(target) as client, _serving(forward) as url:
        yield url


@contextlib.asynccontextmanager
async def round_robin(*targets: str) -> AsyncGenerator[str]:
    """Yields the URL of a load balancer: each request goes to the next of the targets."""

    async def forward(incoming: Request) -> Response:
        return await _pass_on(next(turns), incoming)

    async with contextlib.AsyncExitStack() as clients:
        turns = itertools.cycle(
            [await clients.enter_async_context(_client(target)) for target in targets]
        )
        async with _serving(forward) as url:
            yield url


def _client(target: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=target, timeout=120, trust_env=False)


async def _pass_on(
    client: httpx.AsyncClient,
    incoming: Request,
    edit_request: Edit | None = None,
    edit_response: Edit | None = None,
) -> Response:
    body = await incoming.body()
    if edit_request:
        body = await edit_request(body)
    headers = {name: value for name, value in incoming.headers.items() if name not in SKIPPED}
    url = f"{incoming.url.path}?{incoming.url.query}"
    answer = await client.request(incoming.method, url, content=body, headers=headers)
    content = answer.content
    if edit_response and answer.status_code in (200, 201, 409):
        content = await edit_response(content)
    kept = {name: value for name, value in answer.headers.items() if name not in SKIPPED}
    return Response(content, answer.status_code, kept)


@contextlib.asynccontextmanager
async def _serving(forward: Callable[[Request], Awaitable[Response]]) -> AsyncGenerator[str]:
    app = Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST", "PUT"])])
    async with served(uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))) as url:
        yield url
