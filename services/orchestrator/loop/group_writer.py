"""Writes a step's finished groups to disk as they come; groups that come together are one write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from services.orchestrator.runs.finished import FinishedGroup, Place
from services.orchestrator.tasks import to_the_end


class GroupWriter:
    """Writes the groups of one step. Groups that come during a write are gathered for the next.
    `write` runs in a thread, one call at a time."""

    def __init__(self, write: Callable[[Mapping[Place, FinishedGroup]], None]) -> None:
        self._write = write
        self._writing = asyncio.Lock()
        self._waiting: dict[Place, FinishedGroup] = {}

    async def add(self, place: Place, group: FinishedGroup) -> None:
        """Returns once the group is on disk, also if it is cancelled meanwhile, so that a worker
        that is asked to end loses no sampled group."""
        self._waiting[place] = group
        await to_the_end(self._written(place))

    async def _written(self, place: Place) -> None:
        async with self._writing:
            if place not in self._waiting:  # it was written together with another group
                return
            groups, self._waiting = self._waiting, {}
            try:
                await asyncio.to_thread(self._write, groups)
            except BaseException:  # the waiting callers write them again
                self._waiting = groups | self._waiting
                raise
