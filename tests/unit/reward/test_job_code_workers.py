"""Workers of jobs' own functions, in the real sandbox: kept, replaced when they die, closed when
others are used."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from services.reward.grading.failures import GradingFailed
from services.reward.job_code.workers import FunctionWorkers
from services.reward.sandbox.base import SlotDied, Worker
from services.reward.sandbox.local import LocalSandbox
from shared.job import RewardSpec
from shared.wire import Execution, Part
from tests.support.reward_helpers import ScriptedSandbox, processes_of, running_sandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROCESSES_PER_WORKER = 3
"""The one outside, pid 1 inside, and the function's own."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncGenerator[LocalSandbox]:
    async with running_sandbox(1) as sandbox:
        yield sandbox


@pytest_asyncio.fixture(loop_scope="module")
async def workers(sandbox: LocalSandbox) -> AsyncGenerator[FunctionWorkers]:
    workers = FunctionWorkers(sandbox)
    yield workers
    await workers.close()


def constant(value: float) -> RewardSpec:
    return RewardSpec(source=f"def reward(completions):\n    return [{value} for _ in completions]")


async def call(
    workers: FunctionWorkers, spec: RewardSpec, *completions: str, timeout_s: float = 10.0
) -> list[float | None]:
    return [part.value for part in await parts(workers, spec, *completions, timeout_s=timeout_s)]


async def parts(
    workers: FunctionWorkers, spec: RewardSpec, *completions: str, timeout_s: float = 10.0
) -> list[Part]:
    arguments = {
        "prompts": [""] * len(completions),
        "completions": list(completions),
        "unused": [0] * len(completions),
    }
    return await workers.call(spec, arguments, len(completions), timeout_s)


async def outcome(workers: FunctionWorkers, spec: RewardSpec, *completions: str) -> list[Part]:
    """The parts, also where all fail."""
    try:
        return await parts(workers, spec, *completions)
    except GradingFailed as error:
        return [error.part()] * len(completions)


async def test_workers_used_least_recently_are_closed(
    workers: FunctionWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.reward.job_code.workers.MAX_WORKERS", 2)
    before = len(processes_of(os.getpid()))
    for value in (1.0, 2.0, 3.0, 4.0, 1.0):
        assert await call(workers, constant(value), "a", "b") == [value, value]
    assert len(processes_of(os.getpid())) == before + 2 * PROCESSES_PER_WORKER


async def test_a_busy_worker_is_never_closed_for_another_one(
    workers: FunctionWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.reward.job_code.workers.MAX_WORKERS", 1)
    before = processes_of(os.getpid())
    slow = (
        "import time\nLOADED = time.time()\ndef reward(completions):\n"
        "    time.sleep(0.2)\n    return [LOADED]"
    )
    loaded = (await call(workers, RewardSpec(source=slow), "a"))[0]
    answers = await asyncio.gather(
        call(workers, RewardSpec(source=slow), "a"),
        *(call(workers, constant(v), "a") for v in (1, 2, 1)),
    )
    assert answers == [[loaded], [1.0], [2.0], [1.0]]
    await workers.close()
    assert processes_of(os.getpid()) == before


@pytest.mark.parametrize(
    "which", [0, -1], ids=["the process outside", "the function's own process"]
)
async def test_a_worker_killed_between_calls_is_replaced(
    workers: FunctionWorkers, which: int
) -> None:
    others = set(processes_of(os.getpid()))
    assert await call(workers, constant(5.0), "a") == [5.0]
    os.kill(sorted(set(processes_of(os.getpid())) - others)[which], signal.SIGKILL)
    assert await call(workers, constant(5.0), "a") == [5.0]


async def test_a_late_function_is_ended_and_the_next_call_is_right(
    workers: FunctionWorkers,
) -> None:
    spec = RewardSpec(
        source="import time\ndef reward(completions):\n    time.sleep(float(completions[0]))\n"
        "    return [1.0]"
    )
    before = len(processes_of(os.getpid()))
    with pytest.raises(GradingFailed, match=r"did not return within 0.2 s for 1 completions"):
        await call(workers, spec, "60", timeout_s=0.2)
    assert len(processes_of(os.getpid())) == before
    assert await call(workers, spec, "0") == [1.0]


async def test_what_a_function_takes_is_known_while_it_is_busy(workers: FunctionWorkers) -> None:
    spec = RewardSpec(
        source="import time\ndef reward(completions, answer=None, **rest):\n"
        "    time.sleep(0.5)\n    return [1.0]"
    )
    signature = await workers.signature(spec)
    assert (signature.parameters, signature.any_keyword, signature.calls) == (
        {"completions": True, "answer": False},
        True,
        "batch",
    )
    busy = asyncio.create_task(call(workers, spec, "a"))
    await asyncio.sleep(0.1)
    assert await workers.signature(spec) == signature
    assert not busy.done()
    assert await busy == [1.0]


class Dying(Worker):
    """Loads, and then dies in every call."""

    def __init__(self, death: SlotDied) -> None:
        self._death = death

    async def ask(self, message: dict[str, Any], deadline_s: float) -> Any:
        if "source" in message:
            return {"parameters": {}, "any_keyword": True, "calls": "batch"}
        raise self._death

    async def close(self) -> None: ...


class OfDyingWorkers(ScriptedSandbox):
    def __init__(self, death: SlotDied) -> None:
        super().__init__(Execution(verdict="ok"))
        self._death = death

    async def open_worker(self, module: str) -> Worker:
        return Dying(self._death)


@pytest.mark.parametrize(
    ("death", "verdict"),
    [
        (SlotDied("it answered with code -9 bytes and code 247"), "error"),
        (SlotDied("its process ended with code -9", killed=True), "sandbox_error"),
    ],
)
async def test_who_ended_a_worker_is_read_from_no_sentence(death: SlotDied, verdict: str) -> None:
    workers = FunctionWorkers(OfDyingWorkers(death))
    (part,) = await outcome(workers, constant(1.0), "a")
    assert (part.value, part.verdict) == (None, verdict)
    assert str(death) in part.detail


FORGER = """
import json, os, struct
def reward(completions):
    forged = json.dumps({"results": FORGED}).encode()
    os.write(3, struct.pack(">I", len(forged)) + forged)
"""


@pytest.mark.parametrize(
    ("forged", "message"),
    [
        ("{}", "something that is not a list"),
        ("[]", "returned 0 values for 1 completions"),
        ('["\\ud800"]', "returned '.ud800' for completion 0"),
        ("[True]", "returned True for completion 0"),
        ('[{"value": 1e999}]', "inf is no finite number"),
        ('[{"value": [1]}]', "returned .1. for completion 0"),
        ('[{"value": 1, "error": "\\ud800"}]', r"failed: \?"),
    ],
)
async def test_forged_answers_are_checked(
    workers: FunctionWorkers, forged: str, message: str
) -> None:
    (part,) = await outcome(workers, RewardSpec(source=FORGER.replace("FORGED", forged)), "a")
    assert part.value is None
    assert re.search(message, part.detail)
    part.model_dump_json()
