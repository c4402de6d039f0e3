"""Turns on what only so many can use at a time, such as sandboxes and threads. The next turn goes
to the user that has used the least time, so a slow or frequent user makes the others wait for no
more than its share.

Users are levels of names: a job, a group of the job, a completion of the group; or an API key.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence

Path = Sequence[Hashable]
"""Names a user from the top: up to `DEPTH` levels."""

DEPTH = 3


class _User:
    """A user at some level, kept while it or one of its `parts` waits or has a turn. A part of the
    lowest level comes again and again (a completion for each of its tests), so it is kept as long
    as the level above."""

    def __init__(self, used_s: float = 0.0) -> None:
        self._ended_s = used_s
        self.num_running = 0
        self.num_waiting = 0
        self.parts: dict[Hashable, _User] = {}
        self.waiting: deque[Turn] = deque()

    def used_s(self, now: float) -> float:
        """Returns the time of all turns, up to now where they have not ended."""
        return self._ended_s + self.num_running * now

    def change(self, now: float, *, waiting: int = 0, running: int = 0) -> None:
        """Counts turns that begin or cease to wait or run."""
        self.num_waiting += waiting
        self.num_running += running
        self._ended_s -= running * now

    def part(self, name: Hashable, now: float, *, is_lowest: bool) -> _User:
        """Returns the part of this name. A new one starts with the least time that any other has
        used: it owes nothing for the time before it came. A new one of the lowest level has used
        nothing, so it comes before all that have run."""
        if name not in self.parts:
            others = [] if is_lowest else [one.used_s(now) for one in self.parts.values()]
            self.parts[name] = _User(min(others, default=0.0))
        return self.parts[name]


class Turns:
    """At most `count` turns at once. The next one goes to the user that has used the least time, in
    it to the part that has, and so on. A user of the top level has at most `most_of_one` of the
    turns."""

    def __init__(
        self,
        count: int,
        *,
        most_of_one: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = count
        self._most_of_one = most_of_one or count
        self._all = _User()
        self._clock = clock

    @property
    def num_waiting(self) -> int:
        return self._all.num_waiting

    async def take(self, path: Path) -> Turn:
        """Returns once it is the turn of `path`. The caller ends it."""
        names, users, now = [*path, *[None] * (DEPTH - len(path))], [self._all], self._clock()
        for name in names:
            users.append(users[-1].part(name, now, is_lowest=len(users) == DEPTH))
        for user in users:
            user.change(now, waiting=1)
        turn = Turn(self, names, users)
        users[-1].waiting.append(turn)
        self._give()
        try:
            await turn.given
        except asyncio.CancelledError:
            turn.end()
            raise
        return turn

    def _give(self) -> None:
        while self._all.num_running < self._count and (turn := self._next()):
            turn.users[-1].waiting.popleft()
            turn.began = self._clock()
            for user in turn.users:
                user.change(turn.began, waiting=-1, running=1)
            if not turn.given.cancelled():  # else its task is cancelled, and ends this turn
                turn.given.set_result(None)

    def _next(self) -> Turn | None:
        user, most, now = self._all, self._most_of_one, self._clock()
        while user.parts:
            waiting = [
                each for each in user.parts.values() if each.num_waiting and each.num_running < most
            ]
            if not waiting:
                return None
            user, most = min(waiting, key=lambda each: each.used_s(now)), self._count
        return user.waiting[0] if user.waiting else None

    def end(self, turn: Turn) -> float:
        """Takes a turn back, whether it has begun or not, and gives it to the next. Returns how
        many seconds it had."""
        began, now = turn.began, self._clock()
        if began is None:
            turn.users[-1].waiting.remove(turn)
        for user in turn.users:
            user.change(now, waiting=-(began is None), running=-(began is not None))
        for above, name, user in zip(turn.users[:-2], turn.names, turn.users[1:], strict=False):
            if not (user.num_waiting or user.num_running):
                above.parts.pop(name, None)
        self._give()
        return 0.0 if began is None else now - began


class Turn:
    """A turn that a user waits for or has. A context that it ends with."""

    def __init__(self, turns: Turns, names: Path, users: list[_User]) -> None:
        self.names = names
        self.users = users
        self.given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.began: float | None = None
        self._turns = turns

    def end(self) -> float:
        return self._turns.end(self)

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
