"""How long a reward service that grades hostile completions leaves others without an answer.

A group of 16 hostile completions and 4 honest ones is graded over HTTP while `/healthz` is asked
again and again. The hostile ones return what costs most to judge, or are fences and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator

import httpx2 as httpx

from bench.report import Figure
from shared.host.processes import free_port
from shared.http.client import Client
from shared.job import RewardSpec
from shared.wire import ScoreItem, ScoreRequest, ScoreResult

STALL_GOAL_S = 0.5
HONEST_GOAL_S = 30.0
NUM_HOSTILE, NUM_HONEST = 16, 4
HOSTILE = {
    "a power of a fraction": (
        "assert 2 ** f(8) == 8",
        "from fractions import Fraction\nf = lambda x: Fraction(10**10)",
    ),
    "a long number": ("assert int(str(f(7)) * 5) == 1", "f = lambda x: 7**230000"),
    "a long list": ("assert sorted(f(7)) == 1", "f = lambda x: [[i] for i in range(15000)]"),
    "260 kB of fences": ("assert f(7) == 1", "```\n" * 65_000),
}


@contextlib.asynccontextmanager
async def running_service(num_slots: int) -> AsyncGenerator[tuple[Client, str]]:
    """Yields a client of a reward service of its own, and its URL."""
    url = f"http://127.0.0.1:{free_port()}"
    environment = {
        "PATH": os.environ["PATH"],
        "HONE_REWARD_PORT": url.rpartition(":")[2],
        "HONE_SANDBOX_SLOTS": str(num_slots),
    }
    service = subprocess.Popen(
        [sys.executable, "-m", "services.reward"], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        async with Client("reward", url) as client:
            yield client, url
    finally:
        service.terminate()
        service.wait()


async def stalls() -> list[Figure]:
    """Returns the longest that `/healthz` took, and that honest completions waited."""
    answers_s: list[float] = []
    waits_s: list[float] = []
    async with running_service(num_slots=4) as (client, url):
        await _grade(client, "assert f(1) == 1", ["f = int"], 1.0)
        for tests, program in HOSTILE.values():
            asking = asyncio.create_task(_ask(url, answers_s))
            programs = [f"{program}\n# {number}" for number in range(NUM_HOSTILE)]
            hostile = asyncio.create_task(_grade(client, tests, programs, 0.0))
            await asyncio.sleep(0.1)
            start = time.perf_counter()
            right = [f"f = lambda x: x\n# {number}, {tests}" for number in range(NUM_HONEST)]
            await _grade(client, "assert f(7) == 7", right, 1.0)
            waits_s.append(time.perf_counter() - start)
            await hostile
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    honest = f"{NUM_HONEST} honest completions beside {NUM_HOSTILE} hostile ones, longest"
    return [
        Figure("/healthz beside these, longest", max(answers_s), "s", STALL_GOAL_S, "max"),
        Figure(honest, max(waits_s), "s", HONEST_GOAL_S, "max"),
    ]


async def _ask(url: str, answers_s: list[float]) -> None:
    """Adds how long each answer of `/healthz` took, until it is cancelled."""
    async with httpx.AsyncClient(timeout=600) as client:
        while True:
            start = time.perf_counter()
            (await client.get(f"{url}/healthz")).raise_for_status()
            answers_s.append(time.perf_counter() - start)
            await asyncio.sleep(0.01)


async def _grade(client: Client, tests: str, programs: list[str], wanted: float) -> None:
    items = tuple(
        ScoreItem(prompt="", completion=program, row={"tests": tests}) for program in programs
    )
    request = ScoreRequest(items=items, rewards=(RewardSpec(grader="code_tests"),))
    result = await client.call("POST", "/score", request, ScoreResult, deadline_s=600)
    assert all(score.value == wanted for score in result.scores), result.scores
