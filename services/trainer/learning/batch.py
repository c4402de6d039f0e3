"""From examples to minibatches, one for each optimizer step of an epoch, and to their
micro-batches. Pure, and computed alike on every rank, so the ranks need no communication.

    [examples] --deal--> [minibatch][example]
               --pack--> [minibatch][rank][micro-batch][example] --collate--> MicroBatch (tensors)

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

A micro-batch is bounded by its tokens, padding included, because memory depends on tokens and not
on rows. Sequences are distributed to the ranks by cost, so that all finish together. Every rank
gets the same number of micro-batches, because each backward pass is a collective.

A micro-batch is either padded, a sequence a row, or packed: one row with all its sequences end to
end, whose positions begin again with each, and no padding at all. Padding is on the right and known
from lengths: a token equal to the padding id, or to the end of the text, is an ordinary token.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from services.trainer.learning.examples import (
    floats,
    integers,
    num_sampled,
    sampled_positions,
    versions,
)
from services.trainer.learning.head import Kept
from services.trainer.learning.loss import Denominators
from shared.errors import BadRequest
from shared.job import Job
from shared.wire import Example, StepTotals
from shared.wire.packed import TokenIds

E = TypeVar("E")

Positions = NDArray[np.intp]
"""Which of a completion's tokens the policy sampled."""


@dataclass(frozen=True)
class MicroBatch:
    """`[B, T]` tokens, and one entry for each of its `[N]` sampled tokens, row by row. Tokens that
    the policy did not sample (prompts, and turns of tools and environments) are context only.

    Token n is `targets_N[n]`; the hidden state that predicts it is at `[rows_N[n], columns_N[n]]`.
    It is in sequence `sequences_N[n]` of the micro-batch's `num_sequences` (never decreasing along
    n), which has `lengths_N[n]` sampled tokens. Among the sampled tokens of all the step's examples
    it is number `places_N[n]`. `sampler_logprobs_N` is valid only where
    `measured_N`. Weights of version `versions_N[n]`, or `UNKNOWN`, sampled the token. `weight` is
    1, or 0 for the dummy that keeps ranks in step. `attention_mask_BT` is 1 at tokens and 0 at
    padding. `position_ids_BT` is set if the micro-batch is packed, and `kept` if not every token of
    the vocabulary could be sampled.
    """

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    rows_N: Tensor
    columns_N: Tensor
    targets_N: Tensor
    sequences_N: Tensor
    num_sequences: int
    sampler_logprobs_N: Tensor
    measured_N: Tensor
    versions_N: Tensor
    advantages_N: Tensor
    lengths_N: Tensor
    places_N: Tensor
    weight: float = 1.0
    position_ids_BT: Tensor | None = None
    kept: Kept | None = None

    def to(self, device: torch.device) -> MicroBatch:
        moved = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor | Kept)
        }
        return dataclasses.replace(self, **moved)


DUMMY = Example(prompt_token_ids=TokenIds([0]), token_ids=TokenIds([0]), advantage=0.0)
"""One token that reaches every parameter, with a gradient of exactly zero."""

ATTENTION_TOKENS = 16384
"""Length of a sequence at which attention costs as much as the rest of the model: about 12 hidden
sizes of a transformer."""


def cost(length: int) -> float:
    """Returns the work of a sequence, in tokens: attention compares each token with all tokens
    before it, everything else is done once per token."""
    return length * (1 + length / ATTENTION_TOKENS)


def pack(
    lengths: Sequence[int], num_ranks: int, budget_tokens: int, *, packed: bool = False
) -> list[list[list[int]]]:
    """Returns `[rank][micro-batch][index into lengths]`, longest first; the empty micro-batch is
    `[]`.

    From the longest on, each sequence goes to the rank with the least work so far. No rank then has
    more than 4/3 of the work in the best distribution (Graham 1969). The ranks fill their
    micro-batches in that order too, so they meet rows of about the same length at the same time. A
    micro-batch stays within `budget_tokens`, except that a longer sequence gets one of its own.
    """
    by_length = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    work = [0.0] * num_ranks
    for index in by_length:
        rank = work.index(min(work))
        hands[rank].append(index)
        work[rank] += cost(lengths[index])
    fill = _fill_packed if packed else _fill_padded
    filled = [fill(hand, lengths, budget_tokens) for hand in hands]
    most = max(len(micro_batches) for micro_batches in filled)
    return [micro_batches + [[]] * (most - len(micro_batches)) for micro_batches in filled]


def _fill_padded(
    by_length: list[int], lengths: Sequence[int], budget_tokens: int
) -> list[list[int]]:
    """Fills one micro-batch after the other: neighbours in length need the least padding."""
    micro_batches: list[list[int]] = []
    for index in by_length:
        if (
            micro_batches
            and (len(micro_batches[-1]) + 1) * lengths[micro_batches[-1][0]] <= budget_tokens
        ):
            micro_batches[-1].append(index)
        else:
            micro_batches.append([index])
    return micro_batches


def _fill_packed(
    by_length: list[int], lengths: Sequence[int], budget_tokens: int
) -> list[list[int]]:
    """Puts each sequence into the first micro-batch that has room for it (first fit decreasing)."""
    micro_batches: list[list[int]] = []
    room: list[int] = []
    for index in by_length:
        place = next(
            (place for place, free in enumerate(room) if lengths[index] <= free), len(room)
        )
        if place == len(room):
            micro_batches.append([])
            room.append(budget_tokens)
        micro_batches[place].append(index)
        room[place] -= lengths[index]
    return micro_batches


def micro_batches_of_rank(
    examples: Sequence[Example],
    rank: int,
    num_ranks: int,
    budget_tokens: int,
    *,
    packed: bool = False,
    starts: Sequence[int] | None = None,
) -> list[MicroBatch]:
    """Returns the micro-batches of `rank`, in order; every rank has as many. `starts` are as in
    `collate`."""
    starts = starts or _starts(examples)
    lengths = [len(example.prompt_token_ids) + len(example.token_ids) for example in examples]
    hand = pack(lengths, num_ranks, budget_tokens, packed=packed)[rank]
    return [
        collate([examples[i] for i in indices], packed=packed, starts=[starts[i] for i in indices])
        if indices
        else collate([DUMMY], weight=0.0, packed=packed)
        for indices in hand
    ]


def collate(
    examples: Sequence[Example],
    weight: float = 1.0,
    *,
    packed: bool = False,
    starts: Sequence[int] | None = None,
) -> MicroBatch:
    """Returns the examples as one micro-batch: right-padded rows, or one packed row. `starts` are
    the places of the examples' first sampled tokens among those of the whole step; None: these
    examples are the whole step."""
    sequences = [
        np.concatenate([integers(example.prompt_token_ids), integers(example.token_ids)])
        for example in examples
    ]
    lengths = [len(ids) for ids in sequences]
    # Where each sequence begins in its row.
    begins = list(accumulate(lengths[:-1], initial=0)) if packed else [0] * len(sequences)
    positions = [sampled_positions(example) for example in examples]
    lengths_S = torch.tensor([len(positions_t) for positions_t in positions])
    sequences_N = torch.repeat_interleave(torch.arange(len(examples)), lengths_S)
    places = [
        np.arange(len(positions_t)) + start
        for positions_t, start in zip(positions, starts or _starts(examples), strict=True)
    ]
    # A token is predicted by the hidden state of the token before it.
    columns = [
        positions_t + begin + len(example.prompt_token_ids) - 1
        for example, begin, positions_t in zip(examples, begins, positions, strict=True)
    ]
    each = list(zip(examples, positions, strict=True))
    rows = [
        torch.from_numpy(row.astype(np.int64))
        for row in ([np.concatenate(sequences)] if packed else sequences)
    ]
    return MicroBatch(
        input_ids_BT=pad_sequence(rows, batch_first=True),
        attention_mask_BT=pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        rows_N=torch.zeros_like(sequences_N) if packed else sequences_N,
        columns_N=_joined(columns, np.int64),
        targets_N=_joined([integers(example.token_ids)[at] for example, at in each], np.int64),
        sequences_N=sequences_N,
        num_sequences=len(examples),
        sampler_logprobs_N=_joined([_sampler_logprobs(*one) for one in each], np.float32),
        measured_N=torch.tensor([bool(example.old_logprobs) for example in examples])[sequences_N],
        versions_N=_joined([versions(example)[at] for example, at in each], np.int64),
        advantages_N=_joined([_advantages(*one) for one in each], np.float32),
        lengths_N=lengths_S[sequences_N],
        places_N=_joined(places, np.int64),
        weight=weight,
        position_ids_BT=torch.cat([torch.arange(length) for length in lengths])[None]
        if packed
        else None,
        kept=_kept(each),
    )


def _starts(examples: Sequence[Example]) -> list[int]:
    """Returns how many sampled tokens stand before each example."""
    return list(accumulate(map(num_sampled, examples[:-1]), initial=0))


def _sampler_logprobs(example: Example, positions: Positions) -> NDArray[np.float32]:
    if not example.old_logprobs:
        return np.zeros(len(positions), np.float32)
    return floats(example.old_logprobs)[positions]


def _advantages(example: Example, positions: Positions) -> NDArray[np.float32]:
    if not example.advantages:
        return np.full(len(positions), example.advantage, np.float32)
    return floats(example.advantages)[positions]


def _kept(each: Sequence[tuple[Example, Positions]]) -> Kept | None:
    """Returns the tokens that could be sampled; None if no example lists them."""
    if not any(example.kept_counts for example, _ in each):
        return None
    ids: list[NDArray[Any]] = []
    counts: list[NDArray[Any]] = []
    for example, positions in each:
        if not example.kept_counts:
            counts.append(np.zeros(len(positions), np.int32))
            continue
        of_token = integers(example.kept_counts)
        is_target = np.zeros(len(of_token), dtype=bool)
        is_target[positions] = True
        ids.append(integers(example.kept_ids)[np.repeat(is_target, of_token)])
        counts.append(of_token[positions])
    counts_N = _joined(counts, np.int64)
    tokens_K = torch.repeat_interleave(torch.arange(len(counts_N)), counts_N)
    return Kept(ids_K=_joined(ids, np.int64), tokens_K=tokens_K)


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(dtype))


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
    starts = _starts(examples)
    minibatches: list[Minibatch] = []
    for indices in deal(range(len(examples)), num_minibatches, job.seed):
        share = [examples[index] for index in indices]
        micro_batches = micro_batches_of_rank(
            share,
            rank,
            num_ranks,
            job.memory.micro_batch_tokens,
            packed=packed,
            starts=[starts[index] for index in indices],
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


def deal(examples: Sequence[E], num_minibatches: int, seed: int) -> list[list[E]]:
    """Returns the examples, or their indices, in `num_minibatches` shares whose sizes differ by at
    most one; fewer if there are fewer examples.

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
