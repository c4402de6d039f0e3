"""Group-relative advantages, arXiv 2402.03300 section 4.1.2 and, without the division, arXiv 2503.20783."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

EPSILON = 1e-6

Advantages = list[list[float | None]]
"""`[P][G]`; None: no gradient comes from this rollout, and it is not counted in the loss."""


def group_advantages(rewards_PG: Sequence[Sequence[float | None]], std: Literal["group", "batch", "none"]) -> Advantages:
    """Returns `(r - mean) / (std + 1e-6)` over each group, with the unbiased standard deviation; `std` "none" leaves out the
    division.

    A missing reward (None) gets None, and mean and deviation are over what is there. A group of fewer than two rewards, or
    of equal ones, has no signal: all None.
    """
    return [_group(rewards_G, std) for rewards_G in rewards_PG]


def _group(rewards_G: Sequence[float | None], std: Literal["group", "batch", "none"]) -> list[float | None]:
    present = [reward for reward in rewards_G if reward is not None]
    if len(present) < 2 or not has_signal(present):
        return [None] * len(rewards_G)
    mean = statistics.fmean(present)
    scale = statistics.stdev(present) + EPSILON if std == "group" else 1.0
    return [None if reward is None else (reward - mean) / scale for reward in rewards_G]


def has_signal(rewards: Sequence[float]) -> bool:
    """Returns whether the rewards differ by more than rounding."""
    spread = max(rewards) - min(rewards)
    return spread > 1e-8 * max(1.0, abs(max(rewards)), abs(min(rewards)))
