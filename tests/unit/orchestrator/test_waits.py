"""Who waits for whom, in a sentence, and when it is said."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from services.orchestrator.samplers.waits import PendingCalls, watch
from shared.errors import Failed


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_sentence_names_who_is_waited_for_and_what_each_did_last() -> None:
    clock = Clock()
    waits = PendingCalls(clock)
    with waits.on("trainer", "training a step"):
        clock.now += 5
    clock.now += 60
    with contextlib.ExitStack() as under_way:
        under_way.enter_context(waits.on("rollout", "sampling a group"))
        clock.now += 10
        with waits.on("reward", "grading a group"):
            pass
        for _ in range(2):
            under_way.enter_context(waits.on("rollout", "sampling a group"))
        clock.now += 240
        assert waits.sentence({"http://a:1": 24, "http://b:1": 0}) == (
            "no progress for 240 s: it waits for rollout (http://a:1 has 24 completions): "
            "3 x sampling a group, the oldest for 250 s; last answered: "
            "trainer training a step 310 s ago, reward grading a group 240 s ago"
        )
    assert waits.is_idle


def test_what_failed_is_no_progress() -> None:
    clock = Clock()
    waits = PendingCalls(clock)
    clock.now += 7
    with contextlib.suppress(ValueError), waits.on("trainer", "training a step"):
        raise ValueError
    assert (waits.stalled_s(), waits.is_idle) == (7, True)


async def test_a_stall_is_told_once_and_its_end_too() -> None:
    told: list[tuple[str, bool]] = []

    async def tell(message: str, stalls: bool) -> None:
        told.append((message, stalls))

    waits = PendingCalls()
    watching = asyncio.create_task(watch(waits, 0.05, dict, tell))
    for _ in range(2):
        with waits.on("trainer", "training a step"):
            await asyncio.sleep(0.3)
        await asyncio.sleep(0.03)
    watching.cancel()
    assert [stalls for _, stalls in told] == [True, False, True, False]
    assert told[0][0].startswith("no progress for 0 s: it waits for trainer: 1 x training a step")


async def test_where_nothing_is_under_way_the_work_is_begun_again() -> None:
    async def tell(*_: object) -> None:
        raise AssertionError

    with pytest.raises(Failed, match="no progress for 0 s: nothing is under way"):
        await asyncio.wait_for(watch(PendingCalls(), 0.05, dict, tell), 5)


async def test_a_stall_that_was_told_and_whose_call_failed_begins_the_work_again() -> None:
    told = asyncio.Event()

    async def tell(_message: str, _stalls: bool) -> None:
        told.set()

    waits = PendingCalls()
    watching = asyncio.create_task(watch(waits, 0.05, dict, tell))
    with contextlib.suppress(ValueError), waits.on("rollout", "sampling a group"):
        await told.wait()
        raise ValueError
    with pytest.raises(Failed, match="nothing is under way"):
        await asyncio.wait_for(watching, 60)
