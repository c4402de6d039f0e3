"""The share of the ranks' time in which they compute, by simulation with the trainer's own packing:
each backward pass waits for all ranks, so a round lasts as long as its slowest micro-batch. Work is
counted as the packing counts it (`services/trainer/learning/packing.py`); useful is the work of
each shared prefix once."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import log

from bench.report import Figure, table
from services.trainer.learning.packing import MicroBatches, cost, pack_shared

RANKS = (1, 2, 4, 8)
BUDGET = 16384
LEAST = 0.93


@dataclass(frozen=True)
class Batch:
    """A step's groups: prompts of about `prompt` tokens, completions log-normal up to
    `completion`."""

    prompt: int
    completion: int
    prompts: int = 32
    group_size: int = 8


BATCHES = {
    "math 128/512 x 16": Batch(128, 512, group_size=16),
    "code 512/256 x 8": Batch(512, 256),
    "few-shot 1,024/128 x 8": Batch(1024, 128),
    "agent 3,072/256 x 8": Batch(3072, 256),
    "long 200/8,000 x 8": Batch(200, 8000),
}


def useful(batch: Batch, num_ranks: int, *, share: bool = True) -> float:
    """Returns the useful share of the ranks' time. Without `share` no prefix is."""
    lengths, common = drawn(batch)
    if not share:
        common = [0] * len(lengths)
    ranks = pack_shared(lengths, common, num_ranks, BUDGET)
    total = sum(cost(length, shared) for length, shared in zip(lengths, common, strict=True))
    return total / (num_ranks * _time(ranks, lengths, common))


def drawn(batch: Batch) -> tuple[list[int], list[int]]:
    """Returns the sequences' tokens, group by group, and how many each has in common with the one
    before it."""
    draw = random.Random(1)
    lengths: list[int] = []
    common: list[int] = []
    for _ in range(batch.prompts):
        prompt = int(batch.prompt * draw.uniform(0.6, 1.4))
        for member in range(batch.group_size):
            completion = int(draw.lognormvariate(log(0.4 * batch.completion), 0.7))
            lengths.append(prompt + min(batch.completion, max(8, completion)))
            common.append(prompt if member else 0)
    return lengths, common


def _time(ranks: MicroBatches, lengths: list[int], common: list[int]) -> float:
    def work(batch: list[int]) -> float:
        return sum(cost(lengths[i], common[i] if i - 1 in batch else 0) for i in batch)

    return sum(max(map(work, each)) for each in zip(*ranks, strict=True))


def figures() -> list[Figure]:
    return [
        Figure(
            f"{name}: useful share of {RANKS[-1]} ranks' time", useful(batch, RANKS[-1]), "", LEAST
        )
        for name, batch in BATCHES.items()
    ]


def shown() -> str:
    """Returns the table over the numbers of ranks, with and without shared prefixes."""
    rows = [
        (
            f"{name}{'' if share else ', off'}",
            *(f"{useful(batch, num, share=share):.3f}" for num in RANKS),
        )
        for name, batch in BATCHES.items()
        for share in (True, False)
    ]
    return table(rows, ("useful share of the ranks' time", *(f"{num} ranks" for num in RANKS)))
