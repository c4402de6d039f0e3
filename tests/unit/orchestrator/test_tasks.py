"""Tasks that are stopped while they write."""

from __future__ import annotations

import asyncio

import pytest

from services.orchestrator import tasks
from services.orchestrator.tasks import stop, write_despite_cancel
from tests.support.slow_disk import SlowDisk


async def test_who_is_cancelled_as_it_writes_ends_after_the_write() -> None:
    disk = SlowDisk()
    writing = asyncio.create_task(write_despite_cancel(disk.write, "row"))
    await disk.until_begun()
    for _ in range(2):
        writing.cancel()
        assert not (await asyncio.wait({writing}, timeout=0.05))[0]
    disk.goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert disk.written == ["row"]


async def test_a_write_returns_what_it_gives_and_raises_what_it_raises() -> None:
    disk = SlowDisk()
    disk.goes_on.set()
    assert await write_despite_cancel(disk.write, what="row") == "row"
    with pytest.raises(ZeroDivisionError):
        await write_despite_cancel(divmod, 1, 0)


@pytest.mark.parametrize("times", [1, 2])
async def test_stopping_that_is_cancelled_still_waits_for_the_tasks(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user stops a worker cancels it again and again, and so what it stops."""
    monkeypatch.setattr(tasks, "PATIENCE_S", 0.01)
    disk = SlowDisk()
    writing = asyncio.create_task(write_despite_cancel(disk.write, "row"))
    await disk.until_begun()
    stopping = asyncio.create_task(stop(writing))
    for _ in range(times):
        await asyncio.sleep(0)
        stopping.cancel()
        assert not (await asyncio.wait({stopping}, timeout=0.05))[0]
    disk.goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert (writing.done(), disk.written) == (True, ["row"])
