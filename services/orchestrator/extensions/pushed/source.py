"""The groups of a job that are sampled and scored elsewhere. Its steps take them in the order in
which they were accepted."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.orchestrator.extensions.pushed.queue import PushedQueue
from services.orchestrator.samplers.waits import Waits
from services.orchestrator.seams import Round
from services.orchestrator.tasks import to_disk
from shared.wire import ScoredGroup

POLL_S = 0.2
"""Seconds between two looks for groups that other processes accepted."""


class PushedGroups:
    """A step holds `turn` until it has its groups. Steps ask for it in their order, so they get
    groups in their order."""

    def __init__(self, queue: PushedQueue, waits: Waits) -> None:
        self._queue = queue
        self._waits = waits
        self.turn = asyncio.Lock()

    async def take(self, asked: Round) -> list[ScoredGroup]:
        """Returns the groups of a round. Waits for them without a limit."""
        numbers, is_whole = await to_disk(self._queue.take, asked)
        while not is_whole:
            numbers, is_whole = await self._after(len(numbers), asked)
        return [await asyncio.to_thread(self._queue.group, number) for number in numbers]

    async def _after(self, num_here: int, asked: Round) -> tuple[list[int], bool]:
        """Returns what the queue gives once that is more than `num_here` groups."""
        what = f"{num_here} of the {asked.count} that step {asked.step} needs are here"
        with self._waits.on("pushed groups", what):
            while True:
                await asyncio.sleep(POLL_S)
                numbers, is_whole = await to_disk(self._queue.take, asked)
                if len(numbers) != num_here:
                    return numbers, is_whole


def pushed_groups(run: Path, waits: Waits) -> PushedGroups:
    """Returns the groups that were pushed to the run folder `run`."""
    return PushedGroups(PushedQueue(run), waits)
