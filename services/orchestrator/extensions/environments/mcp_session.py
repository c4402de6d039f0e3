"""A session with an MCP server, over streamable HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import httpx2 as httpx
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from services.orchestrator.extensions.environments.openenv import MAX_MESSAGE_BYTES
from services.orchestrator.extensions.environments.tools import of_blocks, result, tool_schema
from services.orchestrator.seams import EpisodeLost
from shared.errors import first_line
from shared.http.connecting import ssl_context
from shared.wire import ToolCall, ToolResult

GONE = frozenset({-32000, -32001})
"""The package's error codes for a closed connection and for a request without an answer."""

MAX_PAGES = 100


class McpSession:
    """One task owns the session from its beginning to its end, because the package's cancel scopes
    belong to a task. Other tasks send it requests. `limit_s` bounds each request."""

    def __init__(self, url: str, limit_s: float) -> None:
        self.url = url
        self._limit_s = limit_s
        self._asked: asyncio.Queue[tuple[Callable[[Client], Awaitable[Any]], Any]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def tools(self) -> tuple[dict[str, Any], ...]:
        """Returns the tools that the server lists, in OpenAI's shape."""
        return await self._ask(_listed)

    async def call(self, call: ToolCall, arguments: dict[str, Any]) -> ToolResult:
        """Returns the tool's answer. Raises EpisodeLost if there is none."""

        async def made(client: Client) -> ToolResult:
            try:
                found = await client.call_tool(call.name, arguments)
            except MCPError as error:
                if error.code in GONE:
                    raise
                return result(call, error.message, failed=True)
            blocks = [block.model_dump() for block in found.content]
            return result(call, of_blocks(blocks) or "", failed=found.is_error)

        return await self._ask(made)

    def drop(self) -> asyncio.Task[None] | None:
        """Starts to end the session; returns the task that does."""
        if self._task:
            self._task.cancel()
        return self._task

    async def _ask(self, work: Callable[[Client], Awaitable[Any]]) -> Any:
        self._task = self._task or asyncio.create_task(self._live())
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((work, answer))
        await asyncio.wait((answer, self._task), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        error = None if self._task.cancelled() else self._task.exception()
        why = first_line(_leaf(error)) if error else "the session was ended"
        raise EpisodeLost(f"the MCP server at {self.url} gave no answer: {why}") from error

    async def _live(self) -> None:
        async with (
            httpx.AsyncClient(
                verify=ssl_context(),
                timeout=self._limit_s,
                trust_env=False,
                headers={"accept-encoding": "identity"},
                event_hooks={"response": [_bound]},
            ) as http,
            Client(
                streamable_http_client(self.url, http_client=http),
                read_timeout_seconds=self._limit_s,
            ) as client,
        ):
            while True:
                work, answer = await self._asked.get()
                answer.set_result(await work(client))


async def _listed(client: Client) -> tuple[dict[str, Any], ...]:
    tools: list[dict[str, Any]] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += [
            tool_schema(tool.name, tool.description, tool.input_schema) for tool in page.tools
        ]
        if (cursor := page.next_cursor) is None:
            break
    return tuple(tools)


def _leaf(error: BaseException) -> BaseException:
    """Returns the first error in nested groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = cast(BaseException, error.exceptions[0])
    return error


async def _bound(response: httpx.Response) -> None:
    """Bounds an answer to MAX_MESSAGE_BYTES: the package bounds only events. Refuses a compressed
    answer, which would grow after it was counted."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise httpx.ReadError(
            "its answer is compressed, which was not requested", request=response.request
        )
    stream = cast(httpx.AsyncByteStream, response.stream)
    response.stream = _BoundedStream(stream, response.request)


class _BoundedStream(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, request: httpx.Request) -> None:
        self._stream = stream
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = MAX_MESSAGE_BYTES
        async for piece in self._stream:
            left -= len(piece)
            if left < 0:
                raise httpx.ReadError(
                    f"its answer has more than {MAX_MESSAGE_BYTES} bytes", request=self._request
                )
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
