"""A batch as the optimizer takes it: shares of its examples, one for each optimizer step of an
epoch.

    [examples] --deal--> [minibatch][example] --micro_batches_of_rank--> [minibatch][micro-batch]

Pure, and the same on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from services.trainer.learning.batch import MicroBatch
from shared.wire import Example


@dataclass(frozen=True)
class Minibatch:
    """What this rank runs through in one optimizer step, and the totals of that step over all
    ranks."""

    micro_batches: tuple[MicroBatch, ...]
    num_tokens: int
    num_sequences: int


def deal(examples: Sequence[Example], num_minibatches: int, seed: int) -> list[list[Example]]:
    """Returns the examples in `num_minibatches` shares whose sizes differ by at most one; fewer if
    there are fewer examples.

    They are shuffled first, always alike for a seed: a group's examples arrive one after another,
    and each share should be a sample of all.
    """
    num_minibatches = min(num_minibatches, len(examples))
    if num_minibatches == 1:
        return [list(examples)]
    order = list(range(len(examples)))
    random.Random(seed).shuffle(order)
    return [
        [examples[index] for index in order[share::num_minibatches]]
        for share in range(num_minibatches)
    ]
