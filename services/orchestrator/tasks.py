"""Ending a task for certain."""

from __future__ import annotations

import asyncio
from typing import Any

PATIENCE_S = 0.5


async def stop(*tasks: asyncio.Task[Any]) -> None:
    """Returns once every task has ended, by being cancelled as often as it takes: a single cancellation that arrives together
    with a library's own time-out can be swallowed by it. What the tasks raise stays with them."""
    waiting = {task for task in tasks if not task.done()}
    while waiting:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=PATIENCE_S)
