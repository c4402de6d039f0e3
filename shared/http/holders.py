"""Which attempts may use a trainer or a sampler: the newest one that came, and the attempts that it
named beside itself.

Attempts come from one counter, so an older one that no one named has been superseded: its lease has
expired, or its job has left. A job that shares the service names the attempts that had leases when
it got its own, and so no one needs to tell the service who has gone.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.wire import Fence


class Holders:
    """The attempts that may use one service, each with its newest epoch."""

    def __init__(self) -> None:
        self._newest = 0
        self._epochs: dict[int, int] = {}

    def __contains__(self, attempt: int) -> bool:
        return attempt in self._epochs

    @property
    def newest(self) -> Fence:
        return self._newest, self._epochs.get(self._newest, 0)

    def is_stale(self, fence: Fence) -> bool:
        """Returns whether a newer attempt, or a newer epoch of this one, has superseded the
        caller."""
        attempt, epoch = fence
        if attempt in self._epochs:
            return epoch < self._epochs[attempt]
        return attempt < self._newest

    def take(self, fence: Fence, beside: Iterable[int] = ()) -> None:
        """Lets a caller in that is not stale, and those that it names `beside` itself. A new
        attempt supersedes all others."""
        attempt, epoch = fence
        if attempt not in self._epochs:
            self._newest, known = attempt, self._epochs
            self._epochs = {other: known.get(other, 0) for other in beside}
        elif attempt == self._newest:  # it may have come before without a word of the others
            self._epochs |= {other: 0 for other in beside if other not in self._epochs}
        self._epochs[attempt] = epoch
