"""How the ranks speak with each other: a gloo group for commands and outcomes, and a store for the
notes of those who failed."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from services.trainer.processes.together import Ranks

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
READ_TIMEOUT = timedelta(seconds=10)


class Notes:
    """Why a rank will not come to the collective that others wait in: one note a rank, in a store
    that all of them reach.

    The store is a connection of its own, because notes are read while the process group's may be
    waiting.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        store.set_timeout(READ_TIMEOUT)
        self._store = store
        self._own = f"note-{rank}"
        self._all = [f"note-{other}" for other in range(num_ranks)]

    def leave(self, sentence: str) -> None:
        self._store.set(self._own, sentence)

    def clear(self) -> None:
        self._store.delete_key(self._own)

    def standing(self) -> str | None:
        """Returns a note that stands now, of the lowest rank that left one."""
        for key in self._all:
            if self._store.check([key]):
                with contextlib.suppress(RuntimeError):  # cleared just now
                    return self._store.get(key).decode()
        return None


class Channel(Ranks):
    """The ranks' control channel, on CPU whatever the engine's backend is. torch.distributed is
    initialized before."""

    def __init__(self, notes: Notes) -> None:
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self.notes = notes
        self._group: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    def broadcast(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    def leave_note(self, sentence: str) -> None:
        self.notes.leave(sentence)

    def clear_note(self) -> None:
        self.notes.clear()
