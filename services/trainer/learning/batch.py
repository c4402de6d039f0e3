"""Examples to micro-batches: pure, and the same on every rank, so no rank needs to ask another what
it got.

    [examples] --pack--> [rank][micro-batch][example] --collate--> MicroBatch (tensors)

A micro-batch is bounded by its tokens, padding included, because that is what memory follows; a
count of rows says nothing. Sequences are dealt to the ranks by cost, so that all finish together.
Every rank gets the same number of micro-batches, because each backward pass is a collective.

A micro-batch is either padded, a sequence a row, or packed: one row with all its sequences end to
end, whose positions begin again with each, and no padding at all. Padding is on the right and known
from lengths: a token equal to the padding id, or to the end of the text, is an ordinary token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shared.errors import BadRequest
from shared.packed import Logprobs, Packed, TokenIds
from shared.wire import Example


@dataclass(frozen=True)
class MicroBatch:
    """`[B, T]` tokens, and one entry for each of its `[N]` completion tokens, row by row.

    Token n is `targets_N[n]`; the hidden state that predicts it is at `[rows_N[n], columns_N[n]]`.
    It is in sequence `sequences_N[n]` of the micro-batch's `num_sequences` (never decreasing along
    n), whose completion is `lengths_N[n]` long. `weight` is 1, or 0 for the dummy that keeps ranks
    in step. `attention_mask_BT` is 1 at tokens and 0 at padding; `position_ids_BT` is there if the
    micro-batch is packed.
    """

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    rows_N: Tensor
    columns_N: Tensor
    targets_N: Tensor
    sequences_N: Tensor
    num_sequences: int
    sampler_logprobs_N: Tensor
    advantages_N: Tensor
    lengths_N: Tensor
    weight: float = 1.0
    position_ids_BT: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, **tensors)


DUMMY = Example(
    prompt_token_ids=TokenIds([0]),
    token_ids=TokenIds([0]),
    old_logprobs=Logprobs([0.0]),
    advantage=0.0,
)
"""One token that reaches every parameter, with a gradient of exactly zero."""

DTYPES = {"i": "<i4", "f": "<f4", "B": "u1"}

ATTENTION_TOKENS = 16384
"""Length of a sequence whose attention costs as much as all the rest of the model: about 12 hidden
sizes of a transformer."""


def check(examples: Sequence[Example], vocab_size: int) -> None:
    """Raises BadRequest, naming the example, if the trainer could not compute its log-probs."""
    for index, example in enumerate(examples):
        where = f"example {index} of {len(examples)}"
        if not example.prompt_token_ids or not example.token_ids:
            raise BadRequest(
                f"{where} has {len(example.prompt_token_ids)} prompt tokens and "
                f"{len(example.token_ids)} completion tokens; "
                "expected at least 1 of each"
            )
        if len(example.old_logprobs) != len(example.token_ids):
            raise BadRequest(
                f"{where} has {len(example.old_logprobs)} old_logprobs, expected "
                f"{len(example.token_ids)}, one a completion token"
            )
        for ids in (example.prompt_token_ids, example.token_ids):
            low, high = min(ids), max(ids)
            if low < 0 or high >= vocab_size:
                bad = low if low < 0 else high
                raise BadRequest(
                    f"{where} has token id {bad}, expected 0 to {vocab_size - 1} (the model's "
                    "vocabulary)"
                )


def cost(length: int) -> float:
    """Returns the work of a sequence, in tokens: attention compares each token with those before
    it, all else is done once a token."""
    return length * (1 + length / ATTENTION_TOKENS)


def pack(
    lengths: Sequence[int], num_ranks: int, budget_tokens: int, *, packed: bool = False
) -> list[list[list[int]]]:
    """Returns `[rank][micro-batch][index into lengths]`, longest first; the empty micro-batch is
    `[]`.

    From the longest on, each sequence goes to the rank with the least work so far (no rank then has
    more than 4/3 of the work of the best deal: Graham 1969). The ranks fill their micro-batches in
    that order too, so they meet rows of about the same length at the same time. A micro-batch stays
    within `budget_tokens`, except that a longer sequence gets one of its own.
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
) -> list[MicroBatch]:
    """Returns what `rank` runs through, in order; as many as every other rank."""
    lengths = [len(example.prompt_token_ids) + len(example.token_ids) for example in examples]
    hand = pack(lengths, num_ranks, budget_tokens, packed=packed)[rank]
    return [
        collate([examples[i] for i in indices], packed=packed)
        if indices
        else collate([DUMMY], weight=0.0, packed=packed)
        for indices in hand
    ]


def collate(
    examples: Sequence[Example], weight: float = 1.0, *, packed: bool = False
) -> MicroBatch:
    """Returns the examples as one micro-batch: right-padded rows, or one packed row."""
    sequences = [
        torch.cat([_tensor(example.prompt_token_ids), _tensor(example.token_ids)]).long()
        for example in examples
    ]
    lengths_S = torch.tensor([len(example.token_ids) for example in examples])
    sequences_N = torch.repeat_interleave(torch.arange(len(examples)), lengths_S)
    # Where each sequence begins in its row, and in it the token that predicts the completion's
    # first.
    begins = (
        list(accumulate((len(ids) for ids in sequences[:-1]), initial=0))
        if packed
        else [0] * len(sequences)
    )
    columns = [
        torch.arange(len(example.token_ids)) + begin + len(example.prompt_token_ids) - 1
        for begin, example in zip(begins, examples, strict=True)
    ]
    rows = [torch.cat(sequences)] if packed else sequences
    return MicroBatch(
        input_ids_BT=pad_sequence(rows, batch_first=True),
        attention_mask_BT=pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        rows_N=torch.zeros_like(sequences_N) if packed else sequences_N,
        columns_N=torch.cat(columns),
        targets_N=torch.cat([_tensor(example.token_ids) for example in examples]).long(),
        sequences_N=sequences_N,
        num_sequences=len(examples),
        sampler_logprobs_N=torch.cat([_tensor(example.old_logprobs) for example in examples]),
        advantages_N=torch.tensor([example.advantage for example in examples], dtype=torch.float32)[
            sequences_N
        ],
        lengths_N=lengths_S[sequences_N],
        weight=weight,
        position_ids_BT=torch.cat([torch.arange(len(ids)) for ids in sequences])[None]
        if packed
        else None,
    )


def _tensor(packed: Packed[Any]) -> Tensor:
    """Returns the numbers `[T]` as int32 or float32."""
    return torch.from_numpy(np.frombuffer(packed.data, DTYPES[packed.code]).copy())
