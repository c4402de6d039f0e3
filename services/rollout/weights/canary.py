"""Whether a load changed what the engine computes, by what it gives the trainer's canary."""

from __future__ import annotations

from dataclasses import dataclass

from shared.wire import Canary
from shared.wire.packed import Logprobs

MOVED_NATS = {"float32": 1e-5}
"""Nats by which the trainer's log-probs of a canary must differ, by its dtype, for the engine's not
to stay the same to the bit."""

MOVED_ELSEWHERE_NATS = 5e-3
"""The same for other dtypes, which round more."""


@dataclass(frozen=True)
class Seen:
    """A canary, and what this engine gave it."""

    canary: Canary
    logprobs: Logprobs

    def stands_still(self, before: Seen) -> bool:
        """Returns whether the engine gives what it gave before, to the bit, though the trainer does
        not: the load did nothing, however small the difference would have been."""
        ours, theirs = self.canary, before.canary
        if (ours.token_ids, ours.dtype) != (theirs.token_ids, theirs.dtype):
            return False
        gaps = (abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True))
        floor_nats = MOVED_NATS.get(ours.dtype, MOVED_ELSEWHERE_NATS)
        return self.logprobs == before.logprobs and max(gaps, default=0.0) > floor_nats
