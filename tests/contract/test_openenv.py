"""Environments of OpenEnv servers: the orchestrator's client, against a real server of frames."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from services.orchestrator.extensions.environments.openenv import OpenEnv, Socket
from services.orchestrator.extensions.environments.tools import check_allowed
from services.orchestrator.seams import EpisodeLost
from shared.errors import BadRequest, Unavailable
from shared.host.processes import free_port
from shared.job import EnvironmentSpec
from shared.settings import Settings
from shared.wire import EpisodeStepped, ToolCall
from tests.support.openenv_server import FAILS, HANGS, HANGS_UP, GuessServer

ROW = {"secret": 7, "prompt": "Guess."}


@contextlib.asynccontextmanager
async def environment(*urls: str, **spec: Any) -> AsyncGenerator[OpenEnv]:
    given = EnvironmentSpec(kind="openenv", url=urls, **{"boot_s": 1.0, "step_s": 1.0, **spec})
    made = OpenEnv(given, Settings())
    try:
        yield made
    finally:
        await made.shut()


def guess(number: Any, id: str = "c") -> ToolCall:
    return ToolCall(id=id, name="step", arguments={"number": number})


async def stepped(made: OpenEnv, *numbers: Any, id: str = "a", turn: int = 0) -> EpisodeStepped:
    calls = tuple(guess(number, f"c{at}") for at, number in enumerate(numbers))
    return await made.step(id, turn, calls)


async def test_an_episode_of_actions_is_tools_results_and_rewards() -> None:
    async with GuessServer().running() as server, environment(server.url + "/") as made:
        opened = await made.open("a", ROW)
        assert opened.observation == " From 0 to 31." and server.resets == [ROW]
        (tool,) = opened.tools
        assert tool["function"]["name"] == "step"
        assert tool["function"]["parameters"]["properties"] == {"number": {"type": "integer"}}
        seen = await stepped(made, 5, 9)
        assert [each.content for each in seen.results] == ["higher", "lower"]
        assert [each.id for each in seen.results] == ["c0", "c1"]
        assert seen.reward == -0.5 and not seen.done
        seen = await stepped(made, 7, 8, turn=1)
        assert seen.done and seen.reward == 1.0
        assert [each.failed for each in seen.results] == [False, True]
        assert "is over" in seen.results[1].content
        closed = await made.close("a", rewarded=True)
        assert not closed.has_reward and server.open == 0
        await made.open("idle", ROW)
        await made.step("idle", 0, (guess("no number"),))
        assert (await made.close("idle", rewarded=True)).reward == 0.0


async def test_an_action_that_does_not_fit_is_told_to_the_model() -> None:
    deep = '{"number": ' + "[" * 9000 + "]" * 9000 + "}"
    async with GuessServer().running() as server, environment(server.url) as made:
        await made.open("a", ROW)
        calls = (
            guess("seven"),
            ToolCall(name="gues", arguments={}),
            ToolCall(name="step", arguments="{"),
            ToolCall(name="step", arguments='"7"'),
            ToolCall(name="step", arguments=deep),
            ToolCall(name="step", arguments='{"number": 7}'),
        )
        seen = await made.step("a", 0, calls)
        assert [each.failed for each in seen.results] == [True] * 5 + [False]
        said = [each.content for each in seen.results]
        assert said[0] == "Invalid message; number: Input should be a valid integer"
        assert said[1] == "There is no tool 'gues'; the tools are: step."
        assert "are not JSON" in said[2] and 'are "7", expected a JSON object' in said[3]
        assert "are not JSON" in said[4]
        assert said[5] == "correct" and seen.reward == 1.0


async def test_an_environment_of_tools_offers_its_tools() -> None:
    async with GuessServer(calls_tools=True).running() as server, environment(server.url) as made:
        opened = await made.open("a", ROW)
        assert [tool["function"]["name"] for tool in opened.tools] == ["add"]
        add = ToolCall(name="add", arguments={"a": 2, "b": 3})
        seen = await made.step("a", 0, (add, ToolCall(name="add", arguments={})))
        assert [(each.content, each.failed) for each in seen.results] == [
            ("5", False),
            ("a is missing", True),
        ]
        assert seen.reward == 0.5


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (FAILS, r"failed \(EXECUTION_ERROR\): it broke"),
        (HANGS_UP, "closed the connection"),
        (HANGS, r"turn 0 at http.* did not finish within 1 s \(step_s\)"),
    ],
    ids=["an error", "a lost connection", "no answer"],
)
async def test_an_environment_that_fails_loses_the_episode(number: int, reason: str) -> None:
    async with GuessServer().running() as server, environment(server.url) as made:
        await made.open("a", ROW)
        with pytest.raises(EpisodeLost, match=reason) as found:
            await stepped(made, 5, number)
        assert found.value.code == "episode_lost"
        with pytest.raises(EpisodeLost, match="is not open"):
            await stepped(made, 5)
        await made.open("a", ROW)
        assert (await stepped(made, 7)).reward == 1.0


async def test_a_reset_that_fails_loses_the_episode_and_no_room() -> None:
    async with GuessServer(1).running() as server, environment(server.url) as made:
        for _ in range(2):
            with pytest.raises(EpisodeLost, match="no such secret"):
                await made.open("a", {"secret": FAILS})
        await made.open("a", ROW)


async def test_a_full_server_is_waited_for_and_a_closed_episode_makes_room() -> None:
    async with GuessServer(2).running() as server, environment(server.url) as made:

        async def played(id: str) -> float | None:
            await made.open(id, ROW)
            found = await stepped(made, 7, id=id)
            await made.close(id, rewarded=True)
            return found.reward

        found = await asyncio.gather(*(played(str(number)) for number in range(20)))
        assert found == [1.0] * 20 and server.most == 2
        assert server.refused < 30, "an episode that ends lets exactly one in"


async def test_a_server_that_stays_full_without_an_episode_loses_those_that_wait() -> None:
    async with GuessServer(0).running() as server, environment(server.url, boot_s=0.3) as made:
        waiting = [made.open(str(number), ROW) for number in range(4)]
        async with asyncio.timeout(20):
            found = await asyncio.gather(*waiting, return_exceptions=True)
        told = {f"{type(each).__name__}: {each}" for each in found}
        assert told == {
            f"EpisodeLost: the environment at {server.url} has no room: full; waited 0.3 s "
            "(boot_s), with no other episode open"
        }
        server.capacity = 1
        await made.open("a", ROW)
        waits = asyncio.create_task(made.open("b", ROW))
        await asyncio.wait({waits}, timeout=1.5)
        assert not waits.done(), "the job has an episode there, which will end"
        await made.close("a", rewarded=True)
        await asyncio.wait_for(waits, 20)


async def test_episodes_go_to_the_server_with_the_fewest() -> None:
    servers = GuessServer().running(), GuessServer().running()
    async with servers[0] as one, servers[1] as two, environment(one.url, two.url) as made:
        for number in range(6):
            await made.open(str(number), ROW)
        assert (one.open, two.open) == (3, 3)
        for number in range(0, 6, 2):
            await made.close(str(number), rewarded=True)
        await made.open("6", ROW)
        await made.open("7", ROW)
        assert (one.open, two.open) == (2, 3)


async def test_a_server_that_dies_loses_its_episodes_and_others_take_the_next() -> None:
    async with GuessServer().running() as other, contextlib.AsyncExitStack() as life:
        dying = await life.enter_async_context(GuessServer().running())
        async with environment(dying.url, other.url, boot_s=30) as made:
            await made.open("a", ROW)
            await made.open("b", ROW)
            await life.aclose()
            with pytest.raises(EpisodeLost, match=f"{dying.url} closed the connection"):
                await stepped(made, 5)
            assert (await stepped(made, 7, id="b")).reward == 1.0
            async with asyncio.timeout(5):
                for number in range(4):
                    await made.open(str(number), ROW)
            assert other.open == 5
        async with environment(dying.url, boot_s=0.5) as made:
            with pytest.raises(EpisodeLost, match=f"{dying.url} cannot be reached"):
                await made.open("a", ROW)


async def test_a_job_is_told_what_is_wrong_with_its_server() -> None:
    async with GuessServer().running() as server, environment(server.url) as made:
        assert (await made.validate(ROW)).has_reward and server.open == 0
        with pytest.raises(BadRequest, match=r"cannot be opened: .*EXECUTION_ERROR.*no such"):
            await made.validate({"secret": FAILS})
        server.capacity = 0
        assert (await made.validate(ROW)).tools == ()
    away = f"http://127.0.0.1:{free_port()}"
    async with environment(away) as made:
        with pytest.raises(Unavailable, match=f"{away} cannot be reached: .*[Cc]onnect"):
            await made.validate(ROW)


async def test_a_server_of_something_else_and_a_redirect_are_refused() -> None:
    async def redirects(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/ws\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(redirects, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with environment(f"http://127.0.0.1:{port}") as made:
            with pytest.raises(Unavailable, match=r"redirects to 10.0.0.1, which is not followed"):
                await made.validate(ROW)
    other = GuessServer()
    other.app = FastAPI()
    async with other.running(), environment(other.url) as made:
        with pytest.raises(Unavailable, match="cannot be reached: 403"):
            await made.validate(ROW)


async def test_a_schema_that_comes_in_pieces_is_read_whole() -> None:
    async def in_pieces() -> AsyncGenerator[str]:
        for piece in ('{"action": {"properties"', ': {"number": {}}}}'):
            yield piece
            await asyncio.sleep(0.1)

    server = GuessServer()
    routes = server.app.router.routes
    routes[:] = [route for route in routes if getattr(route, "path", "") != "/schema"]
    server.app.get("/schema")(lambda: StreamingResponse(in_pieces()))
    async with server.running(), environment(server.url) as made:
        opened = await made.open("a", ROW)
        assert opened.tools[0]["function"]["parameters"] == {"properties": {"number": {}}}


@pytest.mark.parametrize(
    "frame",
    [
        '{"type": "observation", "data": {"observation": {}, "reward": 1e308}}',
        '{"type": "observation", "data": ' + "[" * 9000,
    ],
    ids=["a reward whose sum is infinite", "a frame without a bottom"],
)
def test_a_frame_that_cannot_be_counted_loses_the_episode(frame: str) -> None:
    socket: Any = None
    with pytest.raises(EpisodeLost, match="expected an observation with a finite reward"):
        Socket(socket, "http://games")._read(frame)


@pytest.mark.parametrize(
    ("url", "settings", "allowed"),
    [
        ("http://127.0.0.1:9/x", {}, True),
        ("http://localhost:9", {"host": "0.0.0.0", "token": "a" * 16}, False),
        ("http://games:8100", {}, False),
        ("http://games:8100", {"allowed_environments": "games"}, True),
        ("http://games", {"allowed_environments": "games:80, x"}, True),
        ("https://games", {"allowed_environments": "games:80"}, False),
        ("http://127.0.0.1:9", {"allowed_environments": "games"}, False),
        ("http://games.evil.org", {"allowed_environments": "games"}, False),
    ],
)
def test_jobs_name_only_hosts_of_the_setting(url: str, settings: Any, allowed: bool) -> None:
    given = Settings(**settings)
    if allowed:
        check_allowed(url, "url", given)
        return
    with pytest.raises(BadRequest, match=f"environment.url is '{url}'.*HONE_ALLOWED_ENVIRONMENTS"):
        check_allowed(url, "url", given)
