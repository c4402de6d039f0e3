"""A process whose event loop stands still ends; a busy or stopped process does not."""

from __future__ import annotations

import asyncio
import threading
import time
from unittest.mock import Mock

import pytest

from services.orchestrator import __main__ as watchdog
from shared.settings import Settings

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
