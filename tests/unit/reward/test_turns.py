"""Graders' calls and programs have their turns by job, group and completion, in whatever order they
came."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.reward.grading.calling import Caller
from services.reward.grading.registry import Grader, GraderTools, Params
from services.reward.sandbox.base import asking
from services.reward.sandbox.local import LocalSandbox
from shared.job import RewardSpec
from shared.wire import ExecuteRequest, Execution, ScoreItem

HOLD_S = 0.02


class Slow(Grader[Params]):
    """Takes a while for each."""

    items_per_call = 1
    max_concurrency = 2

    async def grade(self, items):  # type: ignore[no-untyped-def]
        seen.append((str(items[0].prompt), tuple(asking.get())))
        await asyncio.sleep(HOLD_S)
        raise AssertionError("not looked at")


seen: list[tuple[str, tuple[object, ...]]] = []


async def test_a_graders_calls_are_taken_in_turns_by_group(scripted_tools: GraderTools) -> None:
    seen.clear()
    Slow.name = "slow"
    caller = Caller(Slow(RewardSpec(grader="slow"), Params(), scripted_tools))
    big, small = (
        [ScoreItem(prompt=name, completion=str(number)) for number in range(count)]
        for name, count in (("big", 20), ("small", 2))
    )
    await asyncio.gather(*(caller.grade(items) for items in (big, small)))
    assert max(at for at, (name, _) in enumerate(seen) if name == "small") <= 6
    assert ("big", (None, "big", 3)) in seen


class ScriptedSlots(LocalSandbox):
    """Slots whose programs need the seconds that are their text: of CPU, or with an `i` of
    idling; one with an `l` idles the first time, and is busy later. `began` has the programs in the
    order in which they began, each with the CPU time that it may use."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(isolated=True, num_slots=num_slots)
        self._problem = None
        self._idle.extend(Any for _ in range(num_slots))  # type: ignore[misc]
        self.began: list[tuple[str, float]] = []
        self.names: set[str] = set()

    async def _twice(self, slot: Any, request: ExecuteRequest) -> Execution:
        name = str(asking.get()[-1:])
        idles = request.code.endswith("i") or (
            request.code.endswith("l") and name not in self.names
        )
        self.names.add(name)
        self.began.append((request.code, request.cpu_s))
        needed_s = float(request.code.rstrip("il"))
        used_s = min(needed_s, request.idle_s if idles else request.cpu_s)
        await asyncio.sleep(used_s / 50)
        return Execution(
            verdict="ok" if used_s == needed_s else "time_limit",
            wall_s=used_s,
            cpu_s=0.0 if idles else used_s,
        )


async def scripted(num_slots: int, programs: list[str]) -> tuple[list[str], list[Any]]:
    """Returns what programs of one group ended with, in the order in which they did, and what
    began."""
    slots, ended = ScriptedSlots(num_slots), list[str]()

    async def run(number: int, code: str) -> None:
        asking.set(("job", "group", number))
        execution = await slots.execute(ExecuteRequest(code=code, cpu_s=4, idle_s=3))
        ended.append(f"{code} {execution.verdict}")

    await asyncio.gather(*(run(number, code) for number, code in enumerate(programs)))
    return ended, slots.began


@pytest.mark.parametrize("num_slots", [1, 4])
async def test_short_programs_end_before_any_that_never_end(num_slots: int) -> None:
    ended, began = await scripted(num_slots, ["9"] * 16 + ["9i"] * 4 + ["0.1"] * 4)
    assert ended[:4] == ["0.1 ok"] * 4
    assert sorted(ended[4:]) == ["9 time_limit"] * 16 + ["9i time_limit"] * 4
    assert began.count(("9", 0.25)) == began.count(("9", 4)) == 16


async def test_a_program_that_needs_long_is_run_again_with_its_own_limits() -> None:
    ended, began = await scripted(2, ["3.5", "0.2", "2i"])
    assert sorted(ended) == ["0.2 ok", "2i ok", "3.5 ok"]
    assert sorted(began) == [
        *[("0.2", 0.25), ("2i", 0.25), ("2i", 0.25)],  # idles again, and may not be busy for long
        *[("3.5", 0.25), ("3.5", 4)],
    ]


@pytest.mark.parametrize("code", ["200", "200l"])
async def test_a_program_that_comes_late_finds_a_slot_not_busy_for_long(code: str) -> None:
    slots, events = ScriptedSlots(2), list[str]()

    async def run(code: str, times: int = 1, number: int = 0) -> None:
        asking.set(("job", "group", f"{code} {number}"))
        for _ in range(times):
            await slots.execute(ExecuteRequest(code=code, cpu_s=100))
            events.append(code)

    long = [asyncio.create_task(run(code, number=number)) for number in range(3)]
    while not any(cpu_s == 100 for _, cpu_s in slots.began) or len(slots.names) < 3:
        await asyncio.sleep(0)
    await run("0.1", times=3)
    assert events == ["0.1"] * 3  # while the first of the long ones has not ended
    for task in long:
        task.cancel()


async def test_the_later_programs_of_a_completion_that_needs_long_are_run_once() -> None:
    slots = ScriptedSlots(2)
    for code in ("2", "2", "0.1"):
        assert (await slots.execute(ExecuteRequest(code=code, cpu_s=4))).verdict == "ok"
    assert slots.began == [("2", 0.25), ("2", 4), ("2", 4), ("0.1", 4)]


async def test_programs_of_a_job_wait_for_no_other_jobs_queue() -> None:
    slots, ended = ScriptedSlots(1), list[str]()

    async def run(job: str, number: int) -> None:
        asking.set((job, "group", number))
        await slots.execute(ExecuteRequest(code="0.2"))
        ended.append(job)

    await asyncio.gather(*(run("hostile", number) for number in range(8)), run("honest", 0))
    assert ended.index("honest") <= 2
