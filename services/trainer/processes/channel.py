"""The ranks' connection: a gloo group for commands and outcomes, and a store for errors of ranks
that failed while others wait for them."""

from __future__ import annotations

import contextlib
import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from services.trainer.processes.together import Ranks
from shared.errors import HoneError, from_problem

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
READ_TIMEOUT = timedelta(seconds=10)


class Notes:
    """Why a rank will not join the collective in which others wait: at most one note per rank, in a
    store that all ranks reach.

    The store has a connection of its own, because notes are read while the process group's
    connection may be waiting.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self._store = store
        self._own = f"note-{rank}"
        self._all = [f"note-{other}" for other in range(num_ranks)]

    def leave(self, error: HoneError) -> None:
        self._store.set(self._own, json.dumps(error.problem()))

    def clear(self) -> None:
        self._store.delete_key(self._own)

    def standing(self) -> HoneError | None:
        """Returns the uncleared note of the lowest rank; None if there is none."""
        for key in self._all:
            if self._store.check([key]):
                with contextlib.suppress(RuntimeError):  # cleared just now
                    problem = json.loads(self._store.get(key))
                    return from_problem(problem["status"], problem, "a rank")
        return None


class Channel(Ranks):
    """The ranks of torch.distributed, which is initialized. Commands go over a gloo `group`, and so
    over the CPU, with any backend of the engine."""

    def __init__(self, notes: Notes, group: Any) -> None:
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self._notes = notes
        self._group = group

    @classmethod
    def open(cls, notes: Notes) -> Channel:
        """Returns the channel, its group made: a collective."""
        return cls(notes, dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT))

    def broadcast(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    def leave_note(self, error: HoneError) -> None:
        self._notes.leave(error)

    def clear_note(self) -> None:
        self._notes.clear()
