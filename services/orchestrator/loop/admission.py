"""Which sampler a group goes to, and which groups wait until one has room: in the order of asking,
so that a step's groups come before those of the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from services.orchestrator.loop.replica import Replica


@dataclass(eq=False)
class _Waiting:
    """A group that waits for room."""

    num_completions: int
    given: asyncio.Future[Replica]


class Admission:
    """The groups that wait. `up` gives the samplers that serve; `nobody` the error where none does.

    Whoever changes what there is room for calls `admit`.
    """

    def __init__(
        self, up: Callable[[], list[Replica]], nobody: Callable[[], BaseException]
    ) -> None:
        self._up = up
        self._nobody = nobody
        self._waiting: deque[_Waiting] = deque()

    async def room_for(self, num_completions: int) -> Replica:
        """Returns the sampler that the group goes to, once there is room, which is taken then.
        Raises `nobody`'s error if none serves."""
        given = asyncio.get_running_loop().create_future()
        waiting = _Waiting(num_completions, given)
        self._waiting.append(waiting)
        self.admit()
        try:
            return await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled() and not given.exception():
                given.result().give_back(num_completions)
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def admit(self) -> None:
        """Gives groups to samplers as long as one has room."""
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
                replica.take(waiting.num_completions)
                waiting.given.set_result(replica)
            else:
                waiting.given.set_exception(self._nobody())

    def spare(self, replica: Replica) -> Replica | None:
        """Returns another sampler with room that no group waits for."""
        others = [
            other
            for other in self._up()
            if other is not replica and other.room > 0 and not other.held
        ]
        return None if self._waiting else min(others, key=lambda other: other.load, default=None)
