"""The useful share of the ranks' time, by simulation with the trainer's own packing and its `cost`
(`services/trainer/learning/forest.py`). Each backward pass waits for all ranks, so a round lasts
as long as its costliest micro-batch. The useful cost counts each shared prefix once.

    python -m bench.trainer_ranks      (in seconds; it is in `bench.trainer` too)
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from math import log

from bench.report import Figure, finish, options
from services.trainer.learning.forest import MicroBatches, cost, pack_shared

NUM_RANKS = 8
BUDGET_TOKENS = 16384
MIN_USEFUL = 0.93


@dataclass(frozen=True)
class Batch:
    """A step's groups: prompts of about `prompt` tokens, and completions of log-normal lengths, at
    most `completion` tokens."""

    prompt: int
    completion: int
    num_prompts: int = 32
    group_size: int = 8


BATCHES = {
    "math 128/512 x 16": Batch(128, 512, group_size=16),
    "code 512/256 x 8": Batch(512, 256),
    "few-shot 1,024/128 x 8": Batch(1024, 128),
    "agent 3,072/256 x 8": Batch(3072, 256),
    "long 200/8,000 x 8": Batch(200, 8000),
}


def useful_share(batch: Batch, num_ranks: int, *, share: bool = True) -> float:
    """Returns the useful share of the ranks' time. `share` False: no prefix is shared."""
    lengths, shared = draw_lengths(batch)
    if not share:
        shared = [0] * len(lengths)
    ranks = pack_shared(lengths, shared, num_ranks, BUDGET_TOKENS)
    useful = sum(map(cost, lengths, shared))
    return useful / (num_ranks * _time(ranks, lengths, shared))


def draw_lengths(batch: Batch) -> tuple[list[int], list[int]]:
    """Returns the tokens of each sequence, group by group, and how many of them it shares with the
    sequence before it."""
    draw = random.Random(1)
    lengths: list[int] = []
    shared: list[int] = []
    for _ in range(batch.num_prompts):
        prompt = int(batch.prompt * draw.uniform(0.6, 1.4))
        for member in range(batch.group_size):
            completion = int(draw.lognormvariate(log(0.4 * batch.completion), 0.7))
            lengths.append(prompt + min(batch.completion, max(8, completion)))
            shared.append(prompt if member else 0)
    return lengths, shared


def _time(ranks: MicroBatches, lengths: list[int], shared: list[int]) -> float:
    """Returns the sum over rounds of the highest cost in the round."""

    def batch_cost(batch: list[int]) -> float:
        return sum(cost(lengths[i], shared[i] if i - 1 in batch else 0) for i in batch)

    return sum(max(map(batch_cost, batches)) for batches in zip(*ranks, strict=True))


def figures() -> list[Figure]:
    return [
        Figure(
            f"{name}{'' if share else ', off'}: useful share of {NUM_RANKS} ranks' time",
            useful_share(batch, NUM_RANKS, share=share),
            "",
            MIN_USEFUL,
        )
        for name, batch in BATCHES.items()
        for share in (True, False)
    ]


def main() -> int:
    options(__doc__).parse_args()
    return finish("trainer_ranks", figures(), num_ranks=NUM_RANKS, budget_tokens=BUDGET_TOKENS)


if __name__ == "__main__":
    sys.exit(main())
