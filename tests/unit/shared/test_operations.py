"""Which results of operations are kept, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shared.errors import NotFound
from shared.http import operations
from shared.http.operations import DrainState, Operation, Operations
from shared.wire import Checkpoint


async def answer() -> Checkpoint:
    return Checkpoint(step=1, path="/x", size_bytes=1)


async def many(count: int) -> tuple[Operations, list[Operation], Callable[[], Operation]]:
    """Returns that many finished operations, and what starts one more."""
    table = Operations(10.0, DrainState("trainer"))

    def start() -> Operation:
        return table.start(answer, f"key {len(table._by_id)}", "body", "POST /x")

    started = [start() for _ in range(count)]
    await asyncio.wait({operation.task for operation in started})
    await asyncio.sleep(0)
    return table, started, start


async def test_no_answer_is_lost_before_it_is_fetched_however_many_there_are() -> None:
    table, started, start = await many(1_400)
    for operation in started:
        start()
        assert await table.wait(table.get(operation.id), 0) == await answer()


async def test_fetched_answers_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "KEEP_COUNT", 2)
    table, started, start = await many(4)
    for operation in started[:3]:
        await table.wait(operation, 0)
    start()
    with pytest.raises(NotFound):
        table.get(started[0].id)
    assert [table.get(operation.id) for operation in started[1:]] == started[1:]


async def test_no_answer_is_kept_for_longer_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "KEEP_S", 0.0)
    table, started, start = await many(1)
    await asyncio.sleep(0.01)
    start()
    with pytest.raises(NotFound):
        table.get(started[0].id)
