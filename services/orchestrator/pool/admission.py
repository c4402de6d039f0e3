"""Assigns groups to samplers. Groups wait for room in the order of asking, so that a step's groups
come before the next step's. The next turn of a conversation goes first, to the sampler with its
earlier turns in its cache, if that sampler has room soon."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from services.orchestrator.pool.replica import Replica

SOON_S = 2.0
"""Seconds that a turn waits for the sampler with its conversation in the cache, before any other
sampler takes it: about the time of sampling a few dozen tokens, or of computing a long prompt
again."""


@dataclass(eq=False)
class _Waiting:
    """A group that waits for room; at first only at the sampler `near`, unless that is None."""

    num_completions: int
    given: asyncio.Future[Replica]
    near: Replica | None = None

    def give(self, replica: Replica) -> None:
        replica.take(self.num_completions)
        self.given.set_result(replica)


class Admission:
    """The waiting groups. `up` returns the samplers that serve; `nobody` the error if none does.

    Call `admit` after freeing capacity.
    """

    def __init__(
        self, up: Callable[[], list[Replica]], nobody: Callable[[], BaseException]
    ) -> None:
        self._up = up
        self._nobody = nobody
        self._waiting: deque[_Waiting] = deque()
        self._turns: list[_Waiting] = []

    async def room_for(self, num_completions: int, near: Replica | None = None) -> Replica:
        """Waits for room, takes it, and returns the sampler: `near`, if it has room within SOON_S
        seconds. Raises `nobody`'s error if no sampler serves."""
        given = asyncio.get_running_loop().create_future()
        waiting = _Waiting(num_completions, given, near)
        (self._turns if near else self._waiting).append(waiting)
        self.admit()
        try:
            if near:
                await asyncio.wait({given}, timeout=SOON_S)
                self._wait_anywhere(waiting)
                self.admit()
            return await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled() and not given.exception():
                given.result().give_back(num_completions)
                self.admit()
            raise
        finally:
            for queue in (self._turns, self._waiting):
                if waiting in queue:
                    queue.remove(waiting)

    def admit(self) -> None:
        """Gives waiting groups to samplers as long as one has room."""
        for turn in [*self._turns]:
            near = turn.near
            if near is None or not (near.up and near.listed):
                self._wait_anywhere(turn)
            elif near.room > 0 and not near.held:
                self._turns.remove(turn)
                turn.give(near)
        while self._waiting:
            up = [replica for replica in self._up() if replica.listed]
            free = [replica for replica in up if not replica.held]
            if up and not free:
                return
            replica = min(free, key=lambda replica: replica.load, default=None)
            if replica and replica.room <= 0:
                return
            waiting = self._waiting.popleft()
            if waiting.given.done():
                continue
            if replica:
                waiting.give(replica)
            else:
                waiting.given.set_exception(self._nobody())

    def _wait_anywhere(self, turn: _Waiting) -> None:
        """Lets a turn that waits for its own sampler wait for any sampler, as the first."""
        if turn in self._turns:
            self._turns.remove(turn)
            self._waiting.appendleft(turn)

    def spare(self, replica: Replica) -> Replica | None:
        """Returns another sampler with room that no group waits for."""
        others = [
            other
            for other in self._up()
            if other is not replica and other.listed and other.room > 0 and not other.held
        ]
        return None if self._waiting else min(others, key=lambda other: other.load, default=None)
