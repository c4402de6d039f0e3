"""Converts examples to minibatches, one for each optimizer step of an epoch, and these to
micro-batches. Pure, and the same on every rank, so the ranks need no communication.

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
on rows (`forest.py`). Every rank gets the same number of micro-batches, because each backward pass
is a collective.

A micro-batch has one of three layouts:

    "shared"   one row, a forest: a prefix that sequences share is in it once, and a token that is
               only a target of the loss is not in it (`forest.py`)
    "packed"   one row with all sequences end to end; positions begin again with each sequence
    "padded"   one row per sequence. Padding is on the right and known from lengths: a token equal
               to the padding id, or to the end of the text, is an ordinary token

In each layout log-probs, weights and losses are per sequence: a token that two sequences share and
train is in the row once, and has both losses.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from services.trainer.learning.attention import ForestAttention
from services.trainer.learning.examples import (
    floats,
    integers,
    num_sampled,
    read_ids,
    sampled_positions,
    versions,
)
from services.trainer.learning.forest import (
    MicroBatches,
    build_forest,
    pack_padded,
    pack_shared,
    sorted_by_tokens,
)
from services.trainer.learning.head import CandidateTokens, to_device
from services.trainer.learning.loss import Denominators
from shared.errors import BadRequest
from shared.job import Job
from shared.wire import Example, Logprobs, StepTotals, TokenIds

E = TypeVar("E")

Layout = Literal["padded", "packed", "shared"]

CPU = torch.device("cpu")

Positions = NDArray[np.intp]
"""Positions, in a completion, of the tokens that the policy sampled."""


@dataclass(frozen=True)
class MicroBatch:
    """`[B, T]` tokens, and one entry for each of its `[N]` sampled tokens, sequence by sequence.
    Tokens that the policy did not sample (prompts, and turns of tools and environments) are context
    only.

    Token n is `targets_N[n]`; the hidden state that predicts it is at `[rows_N[n], columns_N[n]]`.
    It is in sequence `sequences_N[n]` of `num_sequences` (never decreasing along n), which has
    `lengths_N[n]` sampled tokens. Among the sampled tokens of all the step's examples it is number
    `places_N[n]`. `sampler_logprobs_N` is valid only where `measured_N`. Weights of version
    `versions_N[n]`, or `UNKNOWN`, sampled the token. `in_ratio_N` says which tokens count in the
    ratio of their sequence.

    `attention_mask_BT` is 1 at tokens and 0 at padding. `position_ids_BT` and `forest` are set in
    the layouts of one row, and `kept` if not every token of the vocabulary could be sampled.
    `num_sequence_tokens` counts the tokens of all sequences, a shared prefix once per sequence.
    `weight` is 1, or 0 for a dummy, which a rank without examples computes in a round.
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
    in_ratio_N: Tensor
    lengths_N: Tensor
    places_N: Tensor
    num_sequence_tokens: int
    weight: float = 1.0
    position_ids_BT: Tensor | None = None
    forest: ForestAttention | None = None
    kept: CandidateTokens | None = None

    def to(self, device: torch.device) -> MicroBatch:
        moved = {
            name: to_device(value, device) if isinstance(value, Tensor) else value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor | CandidateTokens | ForestAttention)
        }
        return dataclasses.replace(self, **moved)


DUMMY = Example(prompt_token_ids=TokenIds([0]), token_ids=TokenIds([0]), advantage=0.0)
"""An example of one sampled token. Its backward pass gives every parameter a gradient, of exactly
zero."""


def dummy(layout: Layout) -> MicroBatch:
    """Returns a micro-batch whose gradient is 0."""
    return collate([DUMMY], weight=0.0, layout=layout)


def _collated(
    examples: Sequence[Example],
    batches: Sequence[Sequence[int]],
    layout: Layout,
    starts: Sequence[int],
) -> list[MicroBatch]:
    """Returns a rank's micro-batches, in order; a dummy for an empty one."""
    return [
        collate([examples[i] for i in indices], layout=layout, starts=[starts[i] for i in indices])
        if indices
        else dummy(layout)
        for indices in batches
    ]


def _pack(
    examples: Sequence[Example], num_ranks: int, budget_tokens: int, layout: Layout
) -> MicroBatches:
    """Returns the indices of the examples of each micro-batch of each rank."""
    sequences = _sequences(examples, layout)
    lengths = [len(ids) for ids in sequences]
    if layout == "padded":
        return pack_padded(lengths, num_ranks, budget_tokens)
    if layout == "packed":
        return pack_shared(lengths, [0] * len(lengths), num_ranks, budget_tokens)
    order, shared = sorted_by_tokens(sequences)
    ranks = pack_shared([lengths[i] for i in order], shared, num_ranks, budget_tokens)
    return [[[order[place] for place in batch] for batch in batches] for batches in ranks]


def _sequences(examples: Sequence[Example], layout: Layout) -> list[NDArray[np.int32]]:
    """Returns the tokens of each example that the model computes: all of them, or in the layout
    "shared" all before the last sampled token, which is only a target."""
    sequences = [read_ids(example) for example in examples]
    if layout != "shared":
        return sequences
    ends = [
        len(example.prompt_token_ids) + int(sampled_positions(example)[-1]) for example in examples
    ]
    return [ids[:end] for ids, end in zip(sequences, ends, strict=True)]


def collate(
    examples: Sequence[Example],
    weight: float = 1.0,
    *,
    layout: Layout = "padded",
    starts: Sequence[int] | None = None,
) -> MicroBatch:
    """Returns the examples as one micro-batch. `starts` are the places of each example's first
    sampled token among the sampled tokens of the step; None: these are the step's examples."""
    sequences = _sequences(examples, layout)
    forest = None if layout == "padded" else build_forest(sequences, share=layout == "shared")
    positions = [sampled_positions(example) for example in examples]
    lengths_S = torch.tensor([len(positions_t) for positions_t in positions])
    sequences_N = torch.repeat_interleave(torch.arange(len(examples)), lengths_S)
    places = [
        np.arange(len(positions_t)) + start
        for positions_t, start in zip(positions, starts or _starts(examples), strict=True)
    ]
    # The hidden state of the token before a sampled token predicts it.
    predicting = [
        positions_t + len(example.prompt_token_ids) - 1
        for example, positions_t in zip(examples, positions, strict=True)
    ]
    if forest is None:
        rows = [torch.from_numpy(row.astype(np.int64)) for row in sequences]
    else:
        rows = [torch.from_numpy(forest.tokens_T.astype(np.int64))]
        predicting = [columns[at] for columns, at in zip(forest.columns, predicting, strict=True)]
    each = list(zip(examples, positions, strict=True))
    return MicroBatch(
        input_ids_BT=pad_sequence(rows, batch_first=True),
        attention_mask_BT=pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        rows_N=sequences_N if forest is None else torch.zeros_like(sequences_N),
        columns_N=_joined(predicting, np.int64),
        targets_N=_joined([integers(example.token_ids)[at] for example, at in each], np.int64),
        sequences_N=sequences_N,
        num_sequences=len(examples),
        sampler_logprobs_N=_joined(
            [_floats_at(at, one.old_logprobs, 0.0) for one, at in each], np.float32
        ),
        measured_N=torch.tensor([bool(example.old_logprobs) for example in examples])[sequences_N],
        versions_N=_joined([versions(example)[at] for example, at in each], np.int64),
        advantages_N=_joined(
            [_floats_at(at, one.advantages, one.advantage) for one, at in each], np.float32
        ),
        in_ratio_N=_joined([_in_ratio(*one) for one in each], np.bool_),
        lengths_N=lengths_S[sequences_N],
        places_N=_joined(places, np.int64),
        num_sequence_tokens=sum(map(len, sequences)),
        weight=weight,
        position_ids_BT=None if forest is None else torch.from_numpy(forest.positions_T)[None],
        forest=None if forest is None else ForestAttention(forest, CPU),
        kept=_kept(each),
    )


def _starts(examples: Sequence[Example]) -> list[int]:
    """Returns how many sampled tokens the examples before each example have."""
    return list(accumulate(map(num_sampled, examples[:-1]), initial=0))


def _floats_at(positions: Positions, packed: Logprobs, missing: float) -> NDArray[np.float32]:
    """Returns the packed values at the positions; `missing` for each if there are none."""
    if not packed:
        return np.full(len(positions), missing, np.float32)
    return floats(packed)[positions]


def _in_ratio(example: Example, positions: Positions) -> NDArray[np.bool_]:
    if not example.ratio_mask:
        return np.ones(len(positions), np.bool_)
    return np.frombuffer(example.ratio_mask.data, np.uint8)[positions] != 0


def _kept(each: Sequence[tuple[Example, Positions]]) -> CandidateTokens | None:
    """Returns the tokens that could be sampled; None if no example lists them."""
    if not any(example.kept_counts for example, _ in each):
        return None
    ids: list[NDArray[Any]] = []
    counts: list[NDArray[Any]] = []
    for example, positions in each:
        if not example.kept_counts:
            counts.append(np.zeros(len(positions), np.int32))
            continue
        counts_T = integers(example.kept_counts)
        is_target_T = np.zeros(len(counts_T), dtype=bool)
        is_target_T[positions] = True
        ids.append(integers(example.kept_ids)[np.repeat(is_target_T, counts_T)])
        counts.append(counts_T[positions])
    return CandidateTokens.of(np.concatenate(ids), np.concatenate(counts).tolist())


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
    layout: Layout,
) -> list[Minibatch]:
    """Returns the minibatches of an epoch for `rank`. `totals` None: the examples are the whole
    batch as sampled."""
    totals = check_totals(examples, totals)
    num_minibatches = job.training.minibatches
    num_without_signal = totals.num_tokens - sum(map(num_sampled, examples))
    starts = _starts(examples)
    minibatches: list[Minibatch] = []
    for indices in deal(range(len(examples)), num_minibatches, job.seed):
        chosen = [examples[index] for index in indices]
        batches = _pack(chosen, num_ranks, job.memory.micro_batch_tokens, layout)[rank]
        micro_batches = _collated(chosen, batches, layout, [starts[index] for index in indices])
        denominators = Denominators(
            num_sequences=totals.num_sequences / num_minibatches,
            num_tokens=totals.num_tokens / num_minibatches,
            step_tokens=sum(map(num_sampled, chosen)) + num_without_signal / num_minibatches,
            max_tokens=job.sampling.max_tokens,
        )
        minibatches.append(Minibatch(tuple(micro_batches), denominators))
    return minibatches


def check_totals(examples: Sequence[Example], totals: StepTotals | None) -> StepTotals:
    """Returns `totals`; if None, the totals of the examples. Raises BadRequest if `totals` has
    fewer sequences or tokens than the examples."""
    own = StepTotals(num_sequences=len(examples), num_tokens=sum(map(num_sampled, examples)))
    if totals is None:
        return own
    for name in ("num_sequences", "num_tokens"):
        total, least = getattr(totals, name), getattr(own, name)
        if total < least:
            raise BadRequest(
                f"totals.{name} is {total}, expected at least {least}, as many as the examples have"
            )
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
