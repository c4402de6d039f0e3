"""Who is next, where only so many can be served at a time."""

from __future__ import annotations

import asyncio

import pytest

from services.orchestrator.jobs import check_executor
from services.orchestrator.jobs.check_executor import RoundRobin
from shared.errors import Busy


async def begun(turns: RoundRobin, who: str, order: list[str], size_bytes: int = 0) -> None:
    await turns.begin(who, size_bytes)
    order.append(who)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_place_is_kept_from_whoever_has_all_others() -> None:
    turns, order = RoundRobin(3), list[str]()
    tasks = [asyncio.create_task(begun(turns, "slow", order)) for _ in range(50)]
    await settle()
    assert order == ["slow", "slow"] and turns.num_waiting == 48
    await begun(turns, "quick", order)
    assert order == ["slow", "slow", "quick"], "it waits for none of the 50"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert turns.num_waiting == 0


async def test_those_who_wait_take_turns_whoever_asked_how_often() -> None:
    turns, order = RoundRobin(1), list[str]()
    tasks = [
        asyncio.create_task(begun(turns, who, order)) for who in ("a", "a", "a", "a", "b", "c", "b")
    ]
    for _ in tasks:
        await settle()
        turns.end(order[-1], 0.0)
    await asyncio.gather(*tasks)
    assert "".join(order) == "aabcaba", "the first came before any other waited"


async def test_who_goes_away_while_waiting_takes_no_turn() -> None:
    turns, order = RoundRobin(1), list[str]()
    began = await turns.begin("a")
    gone = asyncio.create_task(begun(turns, "b", order))
    given = asyncio.create_task(begun(turns, "c", order))
    await settle()
    gone.cancel()
    await settle()
    turns.end("a", began)
    given.cancel()  # in the moment in which its turn was given
    await settle()
    await asyncio.wait_for(begun(turns, "d", order), 5)
    assert order == ["d"]


async def test_what_waits_is_bounded_by_its_bytes_not_by_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check_executor, "MAX_WAITING_BYTES", 100 * check_executor.LEAST_BYTES)
    turns, order = RoundRobin(1), list[str]()
    tasks = [asyncio.create_task(begun(turns, "a", order)) for _ in range(101)]
    await settle()
    assert turns.num_waiting == 100, "one has its turn, and is not counted"
    with pytest.raises(Busy, match="100 jobs wait to be checked, which take 409600 bytes") as busy:
        await turns.begin("a")
    assert busy.value.retry_after_s == 60, "a hundred at a second each, and a minute at most"
    tasks += [asyncio.create_task(begun(turns, "b", order)) for _ in range(60)]
    await settle()
    assert turns.num_waiting == 150, "another caller has its share all the same: a half"
    assert sum(task.done() and isinstance(task.exception(), Busy) for task in tasks) == 10
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_large_job_is_taken_where_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_executor, "MAX_WAITING_BYTES", 10)
    await asyncio.wait_for(RoundRobin(2).begin("a", 1000), 5)
