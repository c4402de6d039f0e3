"""How much may wait to be checked."""

from __future__ import annotations

import asyncio

import pytest

from services.orchestrator.jobs import check_executor
from services.orchestrator.jobs.check_executor import CheckTurns
from shared.errors import Busy


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_waits_is_bounded_by_its_bytes_not_by_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check_executor, "MAX_WAITING_BYTES", 100 * check_executor.LEAST_BYTES)
    turns = CheckTurns(1)
    tasks = [asyncio.create_task(turns.take("a")) for _ in range(101)]
    await settle()
    with pytest.raises(Busy, match="100 jobs wait to be checked, which take 409600 bytes") as busy:
        await turns.take("a")
    assert busy.value.retry_after_s == 60, "a hundred at a second each, and a minute at most"
    tasks += [asyncio.create_task(turns.take("b")) for _ in range(60)]
    await settle()
    refused = [task for task in tasks if task.done() and isinstance(task.exception(), Busy)]
    assert len(refused) == 10, "another caller has its share all the same: a half"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_large_job_is_taken_where_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_executor, "MAX_WAITING_BYTES", 10)
    await asyncio.wait_for(CheckTurns(2).take("a", 1000), 5)
