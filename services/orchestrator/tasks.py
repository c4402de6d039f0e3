"""Waits for tasks that must end, or that must not be interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar

PATIENCE_S = 0.5

P = ParamSpec("P")
T = TypeVar("T")


async def stop(*tasks: asyncio.Task[Any]) -> None:
    """Cancels the tasks repeatedly until every task has ended. A single cancellation can be lost if
    it arrives together with a library's own time-out. The tasks' errors stay in them. If this call
    is cancelled meanwhile, it raises that after they have ended."""
    waiting = {task for task in tasks if not task.done()}
    cancelled: asyncio.CancelledError | None = None
    while waiting:
        for task in waiting:
            task.cancel()
        try:
            await asyncio.wait(waiting, timeout=PATIENCE_S)
        except asyncio.CancelledError as error:
            cancelled = error
        waiting = {task for task in waiting if not task.done()}
    if cancelled:
        raise cancelled


async def finish_despite_cancel(work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of work that must not be left half done, such as closing connections. If
    this call is cancelled meanwhile, it raises that after the work has ended."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled:
        raise cancelled
    return task.result()


async def write_despite_cancel(write: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns the result of `write`, run in a thread. If this call is cancelled meanwhile, it
    raises that after `write` has ended: an abandoned write would continue while another worker has
    the job."""
    return await finish_despite_cancel(asyncio.to_thread(write, *args, **kwargs))


async def gather_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns all results, in order. If one fails, raises its error after the others have ended."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await stop(*tasks)
