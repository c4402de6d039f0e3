"""The replicas of an environment's server: which of them gets an episode."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

RETRY_S = 0.5
"""Seconds after which a full replica is asked again, once, and waiting episodes look again."""


@dataclass
class Replica:
    """`num_open` counts this job's episodes, open or being opened. `most`: how many of them there
    were when it refused another one. `full_since`: since when it has refused episodes while
    none of the job was open there; None: it has not. Times are of the event loop's clock."""

    url: str
    num_open: int = 0
    most: float = math.inf
    full_until: float = 0.0
    away_until: float = 0.0
    full_since: float | None = None


class Replicas:
    """A replica that was away is skipped for `skip_s` seconds."""

    def __init__(self, urls: Sequence[str], skip_s: float) -> None:
        self.all: tuple[Replica, ...] = ()
        self._skip_s = skip_s
        self._changed = asyncio.Event()
        self.add(urls)

    def add(self, urls: Sequence[str]) -> None:
        """Adds replicas, if there are none yet."""
        self.all = self.all or tuple(map(Replica, urls))

    def number_of(self, replica: Replica) -> int:
        """Returns the replica's place among all, from 0 on."""
        return next(number for number, each in enumerate(self.all) if each is replica)

    async def take(self) -> Replica:
        """Returns the replica with the fewest episodes that may have room for one more, which is
        counted. Waits until there is one."""
        while (chosen := self._free()) is None:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), RETRY_S)
        if chosen.num_open >= chosen.most:
            chosen.most, chosen.full_until = chosen.num_open + 1, _now() + RETRY_S
        chosen.num_open += 1
        return chosen

    def leave(self, replica: Replica) -> None:
        """Counts an episode less."""
        replica.num_open -= 1
        self._changed.set()

    def full(self, replica: Replica) -> None:
        """The replica refused the episode, because it has no room."""
        replica.num_open -= 1
        replica.most, replica.full_until = replica.num_open, _now() + RETRY_S

    def away(self, replica: Replica) -> None:
        """The replica could not be reached."""
        replica.num_open -= 1
        replica.away_until, replica.most = _now() + self._skip_s, math.inf
        self._changed.set()

    def back(self, replica: Replica, url: str) -> None:
        """The replica can be reached again, at `url`."""
        replica.url, replica.away_until, replica.full_since = url, 0.0, None
        self._changed.set()

    def _free(self) -> Replica | None:
        now = _now()
        there = [
            replica
            for replica in self.all
            if replica.away_until <= now
            and (replica.num_open < replica.most or replica.full_until <= now)
        ]
        return min(there, key=lambda replica: replica.num_open, default=None)


def _now() -> float:
    return asyncio.get_running_loop().time()
