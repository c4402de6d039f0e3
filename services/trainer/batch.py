"""Examples to micro-batches: pure, and the same on every rank, so no rank needs to ask another what it got.

    [examples] --pack--> [rank][micro-batch][example] --collate--> MicroBatch (tensors)

A micro-batch is bounded by its padded tokens, `rows * longest row`, because that is what memory follows; a count of rows says
nothing. Every rank gets the same number of micro-batches, because each backward pass of ZeRO-2 is a collective. Padding is on
the right and known from lengths: a token equal to the padding id is an ordinary token.

Left out: packing several examples into one row. It needs block-diagonal attention, which not every model here has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import BadRequest
from shared.wire import Example


@dataclass(frozen=True)
class MicroBatch:
    """`[B, T]` tokens, and one entry for each of its `[N]` completion tokens, row by row.

    Token n is `targets_N[n]`; the hidden state that predicts it is at `[rows_N[n], columns_N[n]]`. It is in sequence
    `sequences_N[n]` of the micro-batch's `num_sequences` (never decreasing along n), whose completion is `lengths_N[n]` long.
    `weight` is 1, or 0 for the dummy that keeps ranks in step.
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

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **tensors)


DUMMY = Example(prompt_token_ids=(0,), token_ids=(0,), old_logprobs=(0.0,), advantage=0.0)
"""One token that reaches every parameter, with a gradient of exactly zero."""


def check(examples: Sequence[Example], vocab_size: int) -> None:
    """Raises BadRequest, naming the example, if the trainer could not compute its log-probs."""
    for index, example in enumerate(examples):
        where = f"example {index} of {len(examples)}"
        if not example.prompt_token_ids or not example.token_ids:
            raise BadRequest(
                f"{where} has {len(example.prompt_token_ids)} prompt tokens and {len(example.token_ids)} completion tokens; "
                "expected at least 1 of each"
            )
        if len(example.old_logprobs) != len(example.token_ids):
            raise BadRequest(
                f"{where} has {len(example.old_logprobs)} old_logprobs, expected {len(example.token_ids)}, one a completion token"
            )
        for ids in (example.prompt_token_ids, example.token_ids):
            low, high = min(ids), max(ids)
            if low < 0 or high >= vocab_size:
                bad = low if low < 0 else high
                raise BadRequest(f"{where} has token id {bad}, expected 0 to {vocab_size - 1} (the model's vocabulary)")


def pack(lengths: Sequence[int], num_ranks: int, budget_tokens: int) -> list[list[list[int]]]:
    """Returns `[rank][micro-batch][index into lengths]`, longest first; the empty micro-batch is `[]`.

    Sorted rows are dealt to the ranks back and forth, so that all have about the same work and meet rows of about the same
    length. `rows * longest row` stays within `budget_tokens`, except that a longer row gets a micro-batch of its own.
    """
    by_length = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    for position, index in enumerate(by_length):
        turn, seat = divmod(position, num_ranks)
        hands[seat if turn % 2 == 0 else num_ranks - 1 - seat].append(index)
    packed = [_fill(hand, lengths, budget_tokens) for hand in hands]
    most = max(len(micro_batches) for micro_batches in packed)
    return [micro_batches + [[]] * (most - len(micro_batches)) for micro_batches in packed]


def _fill(by_length: list[int], lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    micro_batches: list[list[int]] = []
    for index in by_length:
        if micro_batches and (len(micro_batches[-1]) + 1) * lengths[micro_batches[-1][0]] <= budget_tokens:
            micro_batches[-1].append(index)
        else:
            micro_batches.append([index])
    return micro_batches


def micro_batches_of_rank(examples: Sequence[Example], rank: int, num_ranks: int, budget_tokens: int) -> list[MicroBatch]:
    """Returns what `rank` runs through, in order; as many as every other rank."""
    lengths = [len(example.prompt_token_ids) + len(example.token_ids) for example in examples]
    packed = pack(lengths, num_ranks, budget_tokens)[rank]
    return [collate([examples[i] for i in indices]) if indices else collate([DUMMY], weight=0.0) for indices in packed]


def collate(examples: Sequence[Example], weight: float = 1.0) -> MicroBatch:
    """Returns the examples as one right-padded micro-batch."""
    rows = [example.prompt_token_ids + example.token_ids for example in examples]
    longest = max(map(len, rows))
    input_ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
    attention_mask_BT = torch.zeros(len(rows), longest, dtype=torch.long)
    for row, ids in enumerate(rows):
        input_ids_BT[row, : len(ids)] = torch.tensor(ids)
        attention_mask_BT[row, : len(ids)] = 1
    starts = [len(example.prompt_token_ids) - 1 for example in examples]
    lengths_B = torch.tensor([len(example.token_ids) for example in examples])
    return MicroBatch(
        input_ids_BT=input_ids_BT,
        attention_mask_BT=attention_mask_BT,
        rows_N=torch.repeat_interleave(torch.arange(len(rows)), lengths_B),
        columns_N=torch.cat([torch.arange(start, start + len(e.token_ids)) for start, e in zip(starts, examples, strict=True)]),
        targets_N=torch.cat([torch.tensor(example.token_ids) for example in examples]),
        sequences_N=torch.repeat_interleave(torch.arange(len(rows)), lengths_B),
        num_sequences=len(rows),
        sampler_logprobs_N=torch.cat([torch.tensor(example.old_logprobs, dtype=torch.float32) for example in examples]),
        advantages_N=torch.repeat_interleave(torch.tensor([e.advantage for e in examples], dtype=torch.float32), lengths_B),
        lengths_N=torch.repeat_interleave(lengths_B, lengths_B),
        weight=weight,
    )
