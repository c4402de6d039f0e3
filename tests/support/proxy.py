"""A proxy before a real service, to break one thing on the way and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

import httpx2 as httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Edit = Callable[[bytes], Awaitable[bytes]]
SKIPPED = {"host", "content-length", "connection", "transfer-encoding"}


@contextlib.asynccontextmanager
async def proxy(
    target: str, path: str, *, request: Edit | None = None, response: Edit | None = None
) -> AsyncGenerator[str]:
    """Yields the URL of a proxy to `target`. Bodies of `path` pass through the edits; everything
    else passes as it is."""
    client = httpx.AsyncClient(base_url=target, timeout=120, trust_env=False)

    async def forward(incoming: Request) -> Response:
        body = await incoming.body()
        edited = incoming.url.path == path
        if edited and request:
            body = await request(body)
        headers = {name: value for name, value in incoming.headers.items() if name not in SKIPPED}
        url = f"{incoming.url.path}?{incoming.url.query}"
        answer = await client.request(incoming.method, url, content=body, headers=headers)
        content = answer.content
        if edited and response and answer.status_code == 200:
            content = await response(content)
        kept = {name: value for name, value in answer.headers.items() if name not in SKIPPED}
        return Response(content, answer.status_code, kept)

    app = Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST", "PUT"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    task = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        await client.aclose()
