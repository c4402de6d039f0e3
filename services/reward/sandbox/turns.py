"""Which waiting completion is served next: by the time used so far, so that a slow completion makes
no other job, group or completion wait for more than its own share."""

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
    """A job, a group or a completion, while it waits for a turn or has one."""

    def __init__(self, used_s: float = 0.0) -> None:
        self.used_s = used_s
        self.num_waiting = 0
        self.num_here = 0
        self.children: dict[Hashable, _Node] = {}
        self.waiting: deque[asyncio.Future[None]] = deque()

    def entered(self, key: Hashable) -> _Node:
        """Returns the child with this key. A new child starts with the least time that any other
        child has used: it owes nothing for the time before it came."""
        if key not in self.children:
            self.children[key] = _Node(
                min((child.used_s for child in self.children.values()), default=0.0)
            )
        return self.children[key]

    def next(self) -> _Node:
        """Returns the waiting child that has used the least time; the first of several."""
        waiting = (child for child in self.children.values() if child.num_waiting)
        return min(waiting, key=lambda child: child.used_s)


class Turns:
    """At most `count` turns at once. The next turn goes to the job that has used the least time,
    in it to the group and in the group to the completion that has."""

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
            nodes.append(nodes[-1].entered(key))
        for node in nodes:
            node.num_here += 1
        turn = Turn(self, keys, nodes)
        if self._free and not self._root.num_waiting:
            self._free -= 1
        else:
            await self._waited(turn)
        turn.start = time.monotonic()
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
                self._left(turn)
            else:
                self.ended(turn)
            raise

    def ended(self, turn: Turn) -> None:
        """Takes a turn back, and gives it to the next."""
        self._free += 1
        self._left(turn)
        while self._free and self._root.num_waiting:
            nodes = [self._root]
            while nodes[-1].children:
                nodes.append(nodes[-1].next())
            for node in nodes:
                node.num_waiting -= 1
            granted = nodes[-1].waiting.popleft()
            self._free -= 1
            if not granted.cancelled():  # else its task will be told, and ends this turn
                granted.set_result(None)

    def _left(self, turn: Turn) -> None:
        used_s = time.monotonic() - turn.start if turn.start else 0.0
        for node in turn.nodes:
            node.num_here -= 1
            node.used_s += used_s
        for parent, key in zip(turn.nodes, turn.keys, strict=False):
            if key in parent.children and not parent.children[key].num_here:
                del parent.children[key]


class Turn:
    def __init__(self, turns: Turns, keys: list[Hashable], nodes: list[_Node]) -> None:
        self.keys = keys
        self.nodes = nodes
        self.start = 0.0
        self._turns = turns

    def end(self) -> None:
        self._turns.ended(self)
