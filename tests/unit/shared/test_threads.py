"""Work in a thread of its own: its value, its error, and a loop that continues meanwhile."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shared.host.processes import BoundedProbe, run_in_thread


async def test_a_thread_returns_its_value_or_raises_its_error() -> None:
    assert await run_in_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(lambda: 1 // 0)


async def test_the_loop_continues_while_a_thread_works() -> None:
    release = threading.Event()
    waiting = asyncio.create_task(run_in_thread(release.wait))
    await asyncio.sleep(0)
    assert not waiting.done()
    release.set()
    assert await waiting is True


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
async def test_who_is_cancelled_does_not_wait_and_the_thread_ends_undisturbed() -> None:
    threads: list[threading.Thread] = []
    begun, release = threading.Event(), threading.Event()

    def work() -> None:
        threads.append(threading.current_thread())
        begun.set()
        release.wait()

    waiting = asyncio.create_task(run_in_thread(work))
    await asyncio.to_thread(begun.wait)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert threads[0].is_alive()
    release.set()
    threads[0].join(5)
    assert not threads[0].is_alive()


async def test_a_look_that_hangs_is_one_thread_and_keeps_no_one_waiting() -> None:
    answers, looks, look = threading.Event(), list[str](), BoundedProbe[str](0.05)

    def hangs() -> str:
        looks.append("looked")
        answers.wait(60)
        return "there"

    assert [await look.at(hangs, "late") for _ in range(3)] == ["late"] * 3
    assert looks == ["looked"]
    answers.set()
    while (said := await look.at(hangs, "late")) == "late":
        await asyncio.sleep(0)
    assert said == "there"
