"""Splits a batch for the optimizer: a share of the examples for each optimizer step of an epoch,
with the denominators of each step's loss.

    [examples] --deal--> [minibatch][example] --micro_batches_of_rank--> [minibatch][micro-batch]

The batch as sampled has S sequences and T tokens. Only sequences with signal are examples, with n
tokens in all and n_m in minibatch m of M (`training.minibatches`). The denominators of optimizer
step m are its share of the whole batch's:

    sequences         S / M
    tokens            T / M
    tokens of step m  T_m = n_m + (T - n) / M      for the loss "bnpo" only

Each sums to the whole batch's over the M minibatches of an epoch. So the mean of the minibatches'
losses is the loss of one big batch (for "bnpo" if they are equally long), a token's gradient does
not depend on how many other rollouts have signal, and with M = 1 the denominators are S and T. TRL
has the same denominators, counted over every rollout because it trains on all of them. If there are
fewer examples than M, empty minibatches have a loss of 0 and no optimizer step.

Pure, and the same on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from services.trainer.learning.batch import MicroBatch, micro_batches_of_rank
from services.trainer.learning.examples import num_sampled
from services.trainer.learning.loss import Denominators
from shared.errors import BadRequest
from shared.job import Job
from shared.wire import Example, StepTotals


@dataclass(frozen=True)
class Minibatch:
    """This rank's micro-batches in one optimizer step, and the denominators of the step's loss,
    which are the same on all ranks."""

    micro_batches: tuple[MicroBatch, ...]
    denominators: Denominators


def plan(
    examples: Sequence[Example],
    totals: StepTotals | None,
    job: Job,
    *,
    rank: int,
    num_ranks: int,
    packed: bool,
) -> list[Minibatch]:
    """Returns the minibatches of an epoch for `rank`. `totals` None: the examples are the whole
    batch as sampled."""
    totals = check_totals(examples, totals)
    num_minibatches = job.training.minibatches
    num_without_signal = totals.num_tokens - sum(map(num_sampled, examples))
    minibatches: list[Minibatch] = []
    for share in deal(examples, num_minibatches, job.seed):
        micro_batches = micro_batches_of_rank(
            share, rank, num_ranks, job.memory.micro_batch_tokens, packed=packed
        )
        denominators = Denominators(
            num_sequences=totals.num_sequences / num_minibatches,
            num_tokens=totals.num_tokens / num_minibatches,
            step_tokens=sum(map(num_sampled, share)) + num_without_signal / num_minibatches,
            max_tokens=job.sampling.max_tokens,
        )
        minibatches.append(Minibatch(tuple(micro_batches), denominators))
    return minibatches


def check_totals(examples: Sequence[Example], totals: StepTotals | None) -> StepTotals:
    """Returns the totals of the batch as sampled; if None, the totals of the examples. Raises
    BadRequest if they count less than the examples."""
    own = StepTotals(num_sequences=len(examples), num_tokens=sum(map(num_sampled, examples)))
    if totals is None:
        return own
    for name in ("num_sequences", "num_tokens"):
        given, least = getattr(totals, name), getattr(own, name)
        if given < least:
            raise BadRequest(f"totals.{name} is {given}, expected at least {least}, the examples'")
    return totals


def deal(examples: Sequence[Example], num_minibatches: int, seed: int) -> list[list[Example]]:
    """Returns the examples in `num_minibatches` shares whose sizes differ by at most one; fewer if
    there are fewer examples.

    They are shuffled first, alike for the same seed, because a group's examples arrive one after
    another and each share should be a sample of all.
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
