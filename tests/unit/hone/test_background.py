"""The client's event loop in a thread: Ctrl-C reaches the caller whatever the loop is doing, and a
running loop is no obstacle."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import AsyncGenerator, Iterator

import pytest

from hone.client import CLOSE_S, Background


@pytest.fixture
def background() -> Iterator[Background]:
    background = Background()
    yield background
    background.close()


async def double(number: int) -> int:
    await asyncio.sleep(0)
    if number < 0:
        raise ValueError(number)
    return 2 * number


async def doubles(last: int) -> AsyncGenerator[int]:
    for number in range(last):
        yield await double(number)
    await double(-last)


async def deaf() -> AsyncGenerator[int]:
    """Yields one number, and then swallows a cancellation, as anything that awaits may do by
    mistake."""
    yield 1
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    await asyncio.sleep(60)


async def test_it_works_where_a_loop_already_runs(background: Background) -> None:
    assert background.run(double(21)) == 42
    assert list(background.iterate(doubles(0))) == []


def test_what_fails_in_the_loop_is_raised_here(background: Background) -> None:
    with pytest.raises(ValueError, match="-3"):
        background.run(double(-3))
    received: list[int] = []
    with pytest.raises(ValueError, match="-3"):
        received.extend(background.iterate(doubles(3)))
    assert received == [0, 2, 4]


@pytest.fixture
def from_a_terminal() -> Iterator[None]:
    """A shell's background jobs, of which the tests may be one, ignore Ctrl-C."""
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, ignored)


@pytest.mark.usefixtures("from_a_terminal")
def test_ctrl_c_is_raised_although_the_cancellation_is_swallowed() -> None:
    background = Background()
    main = threading.main_thread().ident
    assert main
    stream = background.iterate(deaf())
    assert next(stream) == 1
    threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    background.close()
    assert time.monotonic() - start < CLOSE_S + 5
    background.close()  # twice is once
