"""Estimates how much longer a job takes."""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress:
    """Measures the steps since the last replayed step: a replay samples nothing, so its time says
    little."""

    def __init__(
        self, last_step: int, num_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_steps = num_steps
        self._clock = clock
        self._since = last_step, clock()

    def eta_s(self, step: int, *, replayed: bool) -> float | None:
        """Returns the seconds left once `step` is done; None while nothing was measured."""
        now = self._clock()
        if replayed:
            self._since = step, now
            return None
        first, since = self._since
        return (now - since) / (step - first) * (self._num_steps - step)
