"""Servers of the package `openenv`, unmodified, in an environment of its own: what its contract is
to the orchestrator's client, and a model that learns in one."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.orchestrator.extensions.environments.openenv import OpenEnv
from services.orchestrator.seams import EpisodeLost
from shared.job import EnvironmentSpec
from shared.settings import Settings
from shared.wire import ToolCall
from tests.compat.game import game_stack, write_job
from tests.compat.packages import ROOT, python_with

pytestmark = [pytest.mark.compat, pytest.mark.timeout(1200)]
PACKAGE = "openenv"

ROW = {"secret": 7, "prompt": "Find the number."}
STEPS = 8


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def serving(room: int, *words: str) -> Generator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    game = str(ROOT / "tests/compat/openenv_game.py")
    command = [str(python_with("openenv")), game, str(port), str(room), *words]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 180
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            except OSError:
                assert time.monotonic() < deadline and process.poll() is None, "it did not start"
                time.sleep(0.2)
        yield Server(f"http://127.0.0.1:{port}", process)
    finally:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def environment(*urls: str):
    made = OpenEnv(EnvironmentSpec(kind="openenv", url=urls, boot_s=10, step_s=10), Settings())
    try:
        yield made
    finally:
        await made.shut()


def guess(number: int | str, name: str = "step") -> ToolCall:
    return ToolCall(name=name, arguments={"number": number})


async def test_its_server_is_as_the_client_expects() -> None:
    with serving(2) as server:
        async with environment(server.url) as made:
            opened = await made.open("a", ROW)
            assert opened.observation == " It is from 0 to 31."
            (tool,) = opened.tools
            assert tool["function"]["description"] == "Guesses the number."
            assert tool["function"]["parameters"]["required"] == ["number"]
            seen = await made.step("a", 0, (guess("x"), guess(3), guess(7)))
            said = [result.content for result in seen.results]
            assert said[0].startswith("Invalid message; number: Input should be a valid integer")
            assert said[1:] == ["higher", "correct"] and seen.done and seen.reward == 1.0
            await made.open("b", ROW)
            waiting = asyncio.create_task(made.open("c", ROW))
            assert not (await asyncio.wait([waiting], timeout=2))[0], "there is room for two"
            await made.close("a", rewarded=True)
            await asyncio.wait_for(waiting, 5)
            with pytest.raises(EpisodeLost, match="numbers below 0 break the game"):
                await made.step("b", 0, (guess(-1),))
            server.process.send_signal(signal.SIGKILL)
            with pytest.raises(EpisodeLost, match="closed the connection"):
                await made.step("c", 0, (guess(7),))


async def test_its_environments_of_tools_offer_these() -> None:
    with serving(1, "tools") as server:
        async with environment(server.url) as made:
            opened = await made.open("a", ROW)
            (tool,) = opened.tools
            assert tool["function"]["name"] == "guess" and opened.observation is None
            assert tool["function"]["parameters"]["properties"]["number"]["type"] == "integer"
            seen = await made.step("a", 0, (guess(7, "guess"), guess("x", "guess")))
            assert [result.failed for result in seen.results] == [False, True]
            assert seen.results[0].content == "correct" and seen.reward is None
            assert "number" in seen.results[1].content


@pytest.mark.system
def test_a_model_learns_the_game_of_two_servers(tmp_path: Path) -> None:
    with serving(40) as one, serving(40) as two:
        environment = {"kind": "openenv", "url": [one.url, two.url]}
        write_job(tmp_path, "openenv", environment, tool="step", steps=STEPS)
        with game_stack(tmp_path) as stack:
            stack.hone("run", "job.toml")
            summary = stack.summary("openenv")
    assert summary["steps"] == STEPS
    assert summary["eval_after"] > summary["eval_before"] + 0.1, summary
