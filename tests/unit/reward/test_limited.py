"""The pool of limited processes: shared, bounded, replaced when one dies, ended when idle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from services.reward.graders.math import Math
from services.reward.grading import registry
from services.reward.grading.failures import GradingFailed
from services.reward.grading.limited.pool import Call, LimitedPool, NoValue
from shared.job import RewardSpec
from shared.wire import ScoreItem
from tests.support.reward_helpers import is_alive, scripted


@pytest.fixture(autouse=True)
def none_of_another_test() -> None:
    for pid in children():
        os.kill(pid, signal.SIGKILL)


@pytest_asyncio.fixture(loop_scope="module")
async def pool() -> AsyncGenerator[LimitedPool]:
    pool = LimitedPool(2)
    yield pool
    await pool.close()


def search(pattern: str, text: str, cpu_s: float = 1.0, limit_s: float = 10.0) -> Call:
    arguments = (pattern, [], "search", "last", 0, text, cpu_s)
    return Call("limited.texts", "find", arguments, limit_s)


def children() -> list[int]:
    """Returns the limited processes of this one."""
    found: list[int] = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = file.read_text()
            if "grading.limited" in command and f"main({os.getpid()})" in command:
                found.append(int(file.parent.name))
    return [pid for pid in found if is_alive(pid)]


async def until_gone(pids: list[int]) -> None:
    async with asyncio.timeout(90):
        while any(is_alive(pid) for pid in pids):
            await asyncio.sleep(0.01)


async def test_processes_are_bounded_and_all_ended_at_the_close(pool: LimitedPool) -> None:
    replies = await asyncio.gather(*(pool.run(search("b+", "abbc")) for _ in range(20)))
    assert replies == [{"found": "bb", "late": False}] * 20
    pids = children()
    assert len(pids) == 2
    await pool.close()
    await until_gone(pids)


async def test_unneeded_processes_are_ended_after_a_while(
    pool: LimitedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.reward.grading.limited.pool.IDLE_S", 0.2)
    await asyncio.gather(pool.run(search("b", "b")), pool.run(search("b", "b")))
    await until_gone(children())
    assert (await pool.run(search("b", "b")))["found"] == "b"


async def test_one_killed_from_outside_is_replaced_once(pool: LimitedPool) -> None:
    await pool.run(search("b", "b"))
    (first,) = children()
    os.kill(first, signal.SIGKILL)
    assert (await pool.run(search("b", "b")))["found"] == "b"
    assert children() != [first]


async def test_a_call_that_is_killed_is_made_again_with_a_quarter_of_its_memory(
    pool: LimitedPool,
) -> None:
    """As by a host that has run out of memory. A million of a pattern's letters take 270 MiB."""
    large = Call("limited.texts", "groups", ("a{1000000}", []), 10.0, 600)
    assert (await pool.run(large))["count"] == 0
    for call in (search("b", "b"), large):
        await pool.run(search("b", "b"))
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        if call is large:
            with pytest.raises(NoValue, match="it took more than 150 MiB") as raised:
                await pool.run(call)
            assert (raised.value.part().value, raised.value.end) == (0.0, "memory_limit")
        else:
            assert (await pool.run(call))["found"] == "b"


async def test_a_search_that_does_not_stop_itself_is_ended_by_the_kernel(
    pool: LimitedPool,
) -> None:
    with pytest.raises(NoValue, match=r"more than 0\.2 s of CPU time") as raised:
        await pool.run(search(r"^(?:a|a|aa)+$", "a" * 60 + "b", cpu_s=1000.0, limit_s=0.2))
    part = raised.value.part()
    assert (part.value, part.verdict) == (0.0, "time_limit")


async def test_a_pattern_that_takes_all_memory_takes_its_process_with_it(
    pool: LimitedPool,
) -> None:
    await pool.run(search("b", "b"))
    (first,) = children()
    with pytest.raises(NoValue, match="more than 256 MiB"):
        await pool.run(Call("limited.texts", "groups", ("a{1000000000}", []), 10.0, 256))
    assert not is_alive(first)


async def test_what_a_text_makes_a_library_raise_earns_nothing(pool: LimitedPool) -> None:
    with pytest.raises(NoValue, match="IndexError: no such group") as raised:
        await pool.run(Call("limited.texts", "find", ("a", [], "full", "last", 7, "a", 1.0), 5.0))
    part = raised.value.part()
    assert (part.value, part.verdict) == (0.0, "wrong")


async def test_a_call_that_was_given_up_ends_its_process(pool: LimitedPool) -> None:
    slow = pool.run(search(r"^(?:a|a|aa)+$", "a" * 60 + "b", cpu_s=1000.0, limit_s=60.0))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await slow
    await until_gone(children())
    assert (await pool.run(search("b", "b")))["found"] == "b"


async def test_ending_twice_says_nothing_of_the_call(pool: LimitedPool) -> None:
    async def killer() -> None:
        while True:
            for pid in children():
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.01)

    killing = asyncio.create_task(killer())
    with pytest.raises(GradingFailed, match="ended twice, last with code -9"):
        await pool.run(search(r"^(?:a|a|aa)+$", "a" * 60 + "b", cpu_s=1000.0, limit_s=60.0))
    killing.cancel()


async def test_jobs_share_the_processes_that_compare_answers() -> None:
    tools = scripted()
    item = ScoreItem(prompt="", completion=r"\boxed{2}", row={"answer": r"\sqrt{4}"})
    for number in range(3):
        spec = RewardSpec(grader="math", name=f"math{number}")
        bound = registry.bind(spec, tools)
        assert isinstance(bound, Math)
        assert [part.value for part in await bound.grade([item])] == [1.0]
    pids = children()
    assert len(pids) == 1
    await tools.limited.close()
    await until_gone(pids)


PARENT = """
import asyncio
from services.reward.grading.limited.pool import Call, LimitedPool

async def main():
    pool = LimitedPool(1)
    await pool.run(Call("limited.texts", "find", ("b", [], "search", "last", 0, "b", 1.0), 5.0))
    print(pool._idle[0].process.pid, flush=True)
    await pool.run(Call("limited.texts", "find", ("^(?:a|a|aa)+$", [], "search", "last", 0,
                                              "a" * 60 + "b", 1000.0), 600.0))

asyncio.run(main())
"""


async def test_none_outlives_a_service_that_was_killed() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    await until_gone([pid])
