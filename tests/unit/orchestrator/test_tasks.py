"""Tasks that are stopped while they write; work in a process of its own, with real ones; and a
process whose event loop stands still, which ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from services.orchestrator import __main__ as watchdog
from services.orchestrator import tasks
from services.orchestrator.data.subprocesses import SubprocessTimeout, run_in_subprocess
from services.orchestrator.tasks import stop, write_despite_cancel
from shared.errors import Failed
from shared.settings import Settings
from tests.support.running import lives
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


ROOT = Path(__file__).parents[3]

ASKS_AND_IS_KILLED = """
import asyncio, os, time
from pathlib import Path
from services.orchestrator.data.subprocesses import run_in_subprocess

async def main():
    asked = asyncio.create_task(run_in_subprocess(time.sleep, 60, deadline_s=100))
    children = Path(f"/proc/self/task/{{os.getpid()}}/children")
    while not (found := children.read_text()):
        await asyncio.sleep(0)
    await asyncio.sleep({seconds})
    print(found, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@pytest.mark.parametrize("seconds", [0.02, 2.0], ids=["while it starts", "while it works"])
def test_work_ends_with_its_caller(seconds: float) -> None:
    source = ASKS_AND_IS_KILLED.format(seconds=seconds)
    asked = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, stdout=subprocess.PIPE, timeout=60, check=False
    )
    child, end = int(asked.stdout), time.monotonic() + 20
    while lives(child):
        assert time.monotonic() < end
        time.sleep(0.05)


def warn_and_exit() -> None:
    os.write(2, b"a warning\nno room on the disk\n\n")
    os._exit(3)


async def test_a_process_that_ends_without_a_result_is_named_with_its_last_line() -> None:
    with pytest.raises(Failed) as raised:
        await run_in_subprocess(warn_and_exit, deadline_s=60, what="fetching the model 'm'")
    assert raised.value.detail == (
        "fetching the model 'm' failed: its process ended with status 3: no room on the disk"
    )


async def test_work_that_takes_too_long_is_named_with_its_deadline() -> None:
    with pytest.raises(
        SubprocessTimeout, match=r"^reading the data 'x' did not finish within 0.1 s$"
    ):
        await run_in_subprocess(time.sleep, 60, deadline_s=0.1, what="reading the data 'x'")


LIMIT_S = 0.4


def run(work: object, codes: list[int]) -> threading.Thread:
    async def main() -> None:
        threads.append(watchdog.watch(asyncio.get_running_loop(), LIMIT_S, codes.append))
        await asyncio.sleep(0.05)
        await work()  # type: ignore[operator]

    threads: list[threading.Thread] = []
    asyncio.run(main())
    return threads[0]


async def stands_still() -> None:
    time.sleep(LIMIT_S * 2)


async def is_busy() -> None:
    for _ in range(20):
        time.sleep(LIMIT_S / 5)
        await asyncio.sleep(0)


def test_a_loop_that_stands_still_ends_the_process_and_says_where(
    capfd: pytest.CaptureFixture[str],
) -> None:
    codes: list[int] = []
    run(stands_still, codes).join(5)
    assert codes == [watchdog.EXIT_CODE]
    said, at_once = capfd.readouterr()
    assert at_once.splitlines() == [
        "the event loop stands still (for 0.2 s)",
        "the event loop stands still; exit code 70 (for 0.4 s)",
    ]
    assert said.count("the event loop stands still") == 2
    assert "time.sleep(LIMIT_S * 2)" in said and "MainThread" in said


def test_a_log_that_takes_nothing_does_not_keep_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(watchdog, "SAY_S", 0.01)
    monkeypatch.setattr(watchdog, "get_logger", lambda: Mock(error=lambda *_, **__: go_on.wait(20)))
    codes: list[int] = []
    thread = run(stands_still, codes)
    thread.join(5)
    go_on.set()
    assert codes == [watchdog.EXIT_CODE]


def test_a_busy_loop_continues_and_the_thread_ends_with_it() -> None:
    codes: list[int] = []
    thread = run(is_busy, codes)
    thread.join(5)
    assert codes == [] and not thread.is_alive()


@pytest.mark.parametrize(("lease_s", "limit_s"), [(30.0, 24.0), (60.0, 48.0), (1.0, 10.0)])
def test_it_may_stand_still_for_most_of_a_lease(lease_s: float, limit_s: float) -> None:
    assert watchdog.limit_s(Settings(lease_s=lease_s)) == limit_s
