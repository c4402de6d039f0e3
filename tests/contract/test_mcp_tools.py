"""Tools of MCP servers: the orchestrator's client, against servers of the package `mcp`."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
import uvicorn
from mcp.server import MCPServer

from services.orchestrator.extensions.environments.mcp_session import MAX_MESSAGE_BYTES
from services.orchestrator.extensions.environments.tools import Tools
from services.orchestrator.seams import EpisodeLost
from shared.errors import BadRequest, Unavailable
from shared.job import EnvironmentSpec
from shared.settings import Settings
from shared.wire import (
    EnvironmentValidated,
    EpisodeClosed,
    EpisodeOpened,
    EpisodeStepped,
    ToolCall,
    ToolResult,
)
from tests.support.running import served


def calculator(name: str = "add") -> MCPServer:
    server = MCPServer("calculator", log_level="CRITICAL")

    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    async def hang() -> str:
        """Never answers."""
        await asyncio.sleep(60)
        return ""

    def shout() -> str:
        """Answers too much."""
        return "x" * (MAX_MESSAGE_BYTES + 1)

    server.add_tool(add, name=name)
    server.add_tool(hang, name=f"{name}_hang")
    server.add_tool(shout, name=f"{name}_shout")
    return server


@contextlib.asynccontextmanager
async def running(server: MCPServer) -> AsyncGenerator[str]:
    app = server.streamable_http_app()
    config = uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1)
    async with served(uvicorn.Server(config)) as url:
        yield f"{url}/mcp"


class Own:
    """The functions of the job's file: `double`."""

    service = "reward"

    def __init__(self) -> None:
        self.turns: list[int] = []
        self.closed = 0

    async def open(self, id: str, row: Mapping[str, Any]) -> EpisodeOpened:
        return EpisodeOpened(observation=None, tools=({"function": {"name": "double"}},))

    async def step(self, id: str, turn: int, calls: tuple[ToolCall, ...]) -> EpisodeStepped:
        self.turns.append(turn)
        assert all(call.name == "double" for call in calls)
        return EpisodeStepped(results=tuple(ToolResult(id=c.id, content="own") for c in calls))

    async def close(self, id: str, *, rewarded: bool) -> EpisodeClosed:
        self.closed += 1
        return EpisodeClosed()

    def drop(self, id: str) -> None:
        self.closed += 1

    async def validate(self, row: Mapping[str, Any]) -> EnvironmentValidated:
        opened = await self.open("", row)
        return EnvironmentValidated(**opened.model_dump(), has_reward=False)

    async def shut(self) -> None: ...


@contextlib.asynccontextmanager
async def tools(*urls: str, own: Own | None = None, step_s: float = 20.0) -> AsyncGenerator[Tools]:
    spec = EnvironmentSpec(kind="tools", mcp=urls, boot_s=20, step_s=step_s)
    made = Tools(spec, Settings(), own)
    try:
        yield made
    finally:
        await made.shut()


def call(name: str, id: str = "c", **arguments: Any) -> ToolCall:
    return ToolCall(id=id, name=name, arguments=arguments)


async def test_tools_of_servers_and_of_the_file_answer_in_the_order_of_the_calls() -> None:
    own = Own()
    servers = running(calculator()), running(calculator("plus"))
    async with servers[0] as one, servers[1] as two, tools(one, two, own=own) as made:
        opened = await made.open("a", {})
        names = [tool["function"]["name"] for tool in opened.tools]
        assert names == ["double", "add", "add_hang", "add_shout", *("plus", "plus_hang"), names[6]]
        add = opened.tools[1]["function"]
        assert add["description"] == "Adds two numbers."
        assert add["parameters"]["required"] == ["a", "b"]
        calls = (
            call("add", "1", a=2, b=3),
            call("double", "2", x=1),
            call("plus", "3", a=1, b=1),
            call("add", "4", a="x"),
            call("sub", "5"),
        )
        told = (await made.step("a", 0, calls)).results
        assert [each.id for each in told] == ["1", "2", "3", "4", "5"]
        assert [each.content for each in told[:3]] == ["5", "own", "2"]
        assert [each.failed for each in told] == [False, False, False, True, True]
        assert "validation error" in told[3].content
        known = f"the tools are: {', '.join(names)}."
        assert told[4].content == f"There is no tool 'sub'; {known}"
        await made.step("a", 1, (call("plus", a=1, b=1),))
        assert own.turns == [0, 1], "each turn is one of the file's episode"
        await made.close("a", rewarded=True)
        assert own.closed == 1


async def test_a_server_that_dies_or_hangs_or_shouts_loses_the_episode() -> None:
    async with contextlib.AsyncExitStack() as life:
        url = await life.enter_async_context(running(calculator()))
        async with tools(url, step_s=1.5) as made:
            for name, why in (
                ("add_hang", "within 1.5 s"),
                ("add_shout", "more than 4194304"),
            ):
                await made.open("a", {})
                with pytest.raises(EpisodeLost, match=why):
                    await made.step("a", 0, (call(name),))
            await made.open("a", {})
            await life.aclose()
            with pytest.raises(EpisodeLost, match=f"{url} gave no answer: .*connection"):
                await made.step("a", 0, (call("add", a=1, b=2),))
            with pytest.raises(Unavailable, match=f"{url} gave no answer: .*connection"):
                await made.validate({})


async def test_a_compressed_answer_is_refused_before_it_grows() -> None:
    async def bomb(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
        body = gzip.compress(b" " * (8 << 20))
        head = "200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip"
        writer.write(f"HTTP/1.1 {head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        writer.close()

    async with await asyncio.start_server(bomb, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
        async with tools(url) as made:
            with pytest.raises(Unavailable, match="compressed"):
                await made.validate({})


async def test_a_job_is_told_what_is_wrong_with_its_tools() -> None:
    async with running(calculator()) as url, running(calculator()) as same:
        async with tools(url) as made:
            found = await made.validate({})
            assert len(found.tools) == 3 and not found.has_reward
        async with tools(url, same) as made:
            with pytest.raises(BadRequest, match=f"'add' is in {url} and in {same}; expected"):
                await made.validate({})
        own = Own()
        async with running(calculator("double")) as third, tools(third, own=own) as made:
            with pytest.raises(BadRequest, match="'double' is in the job's file and in"):
                await made.validate({})
        async with tools("http://10.0.0.1/mcp") as made:
            with pytest.raises(BadRequest, match=r"environment.mcp is .*10.0.0.1"):
                await made.validate({})
