"""Decides which waiting completion is served next, by the time used so far, so that a slow
completion does not make other jobs, groups or completions wait for more than its share."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Hashable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar

Path = Sequence[Hashable]
"""Names a job, a group of the job and a completion of the group."""

DEPTH = 3

asking: ContextVar[Path] = ContextVar("asking", default=())
"""The job, group and completion that the running code works for."""


class _Node:
    """A job, a group or a completion. Jobs and groups are kept while they wait for a turn or have
    one. A completion comes again for each of its tests, so it is kept as long as its group."""

    def __init__(self, used_s: float = 0.0) -> None:
        self._ended_s = used_s
        self._num_running = 0
        self.num_waiting = 0
        self.num_here = 0
        self.children: dict[Hashable, _Node] = {}
        self.waiting: deque[asyncio.Future[None]] = deque()

    def used_s(self) -> float:
        """Returns the time of all turns, up to now where they have not ended."""
        return self._ended_s + (self._num_running * time.monotonic() if self._num_running else 0.0)

    def began(self) -> None:
        self._ended_s -= time.monotonic()
        self._num_running += 1

    def ended(self) -> None:
        self._ended_s += time.monotonic()
        self._num_running -= 1

    def entered(self, key: Hashable, *, is_completion: bool) -> _Node:
        """Returns the child with this key. A new job or group starts with the least time that any
        other has used: it owes nothing for the time before it came. A new completion has used
        nothing, so it comes before all that have run."""
        if key not in self.children:
            others = [] if is_completion else [one.used_s() for one in self.children.values()]
            self.children[key] = _Node(min(others, default=0.0))
        return self.children[key]

    def next(self) -> _Node:
        """Returns the waiting child that has used the least time; the first of several."""
        waiting = (child for child in self.children.values() if child.num_waiting)
        return min(waiting, key=_Node.used_s)


class Turns:
    """At most `count` turns at once. The next turn goes to the job that has used the least time, in
    it to the group and in the group to the completion that has."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._root = _Node()

    @asynccontextmanager
    async def one(self, path: Path) -> AsyncGenerator[None]:
        turn = await self.take(path)
        try:
            yield
        finally:
            turn.end()

    async def take(self, path: Path) -> Turn:
        """Returns once it is the turn of `path`. The caller ends it."""
        keys = [*path, *(None for _ in range(DEPTH - len(path)))]
        nodes = [self._root]
        for key in keys:
            nodes.append(nodes[-1].entered(key, is_completion=len(nodes) == DEPTH))
        for node in nodes:
            node.num_here += 1
        turn = Turn(self, keys, nodes)
        if self._free and not self._root.num_waiting:
            self._free -= 1
        else:
            await self._waited(turn)
        turn.begin()
        return turn

    async def _waited(self, turn: Turn) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        leaf = turn.nodes[-1]
        leaf.waiting.append(granted)
        for node in turn.nodes:
            node.num_waiting += 1
        try:
            await granted
        except asyncio.CancelledError:
            if granted in leaf.waiting:
                leaf.waiting.remove(granted)
                for node in turn.nodes:
                    node.num_waiting -= 1
                _left(turn)
            else:
                self.ended(turn)
            raise

    def ended(self, turn: Turn) -> None:
        """Takes a turn back, and gives it to the next."""
        self._free += 1
        _left(turn)
        while self._free and self._root.num_waiting:
            nodes = [self._root]
            while nodes[-1].children:
                nodes.append(nodes[-1].next())
            for node in nodes:
                node.num_waiting -= 1
            granted = nodes[-1].waiting.popleft()
            self._free -= 1
            if not granted.cancelled():  # else its task is cancelled, and ends this turn
                granted.set_result(None)


class Turn:
    def __init__(self, turns: Turns, keys: list[Hashable], nodes: list[_Node]) -> None:
        self.keys = keys
        self.nodes = nodes
        self.has_begun = False
        self._turns = turns

    def begin(self) -> None:
        self.has_begun = True
        for node in self.nodes:
            node.began()

    def end(self) -> None:
        self._turns.ended(self)


def _left(turn: Turn) -> None:
    for node in turn.nodes:
        node.num_here -= 1
        if turn.has_begun:
            node.ended()
    *above, _, _ = turn.nodes
    for parent, key in zip(above, turn.keys, strict=False):
        if key in parent.children and not parent.children[key].num_here:
            del parent.children[key]
