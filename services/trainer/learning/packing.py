"""Which sequences go into which micro-batch of which rank. Pure, and the same on every rank.

Each backward pass is a collective, so every rank has the same number of micro-batches. The ranks
compute their n-th micro-batches together: a round, which lasts as long as its costliest
micro-batch. So micro-batches are filled from all sequences, sorted by cost, and dealt to the ranks,
and a round has micro-batches of about the same cost.

    useful share of the time = cost of all / (ranks x sum over rounds of the highest cost in it)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

ATTENTION_TOKENS = 16384
"""Length of a sequence at which attention costs as much as the rest of the model: about 12 times
a transformer's hidden size."""

RUNS_PER_BUDGET = (1, 2, 3, 4, 6, 8, 12, 16)
"""The lengths of runs that are tried: a run of sequences that share a prefix has at most the budget
of a micro-batch divided by one of these. Short runs balance the ranks better, but each run computes
its prefix again."""

TIME_TOLERANCE = 1.02
"""Longer runs are taken if their step takes at most so many times the shortest time."""

KEYS_PER_TOKEN = 8
"""Most keys that attention gathers for a micro-batch, per token of its budget. A shared prefix is
computed once, but its keys are gathered for each sequence that continues it."""

MAX_TRIES = 64
"""Most micro-batches that are tried for a run, the cheapest first. Without a limit, planning takes
time in proportion to runs times micro-batches."""

MicroBatches = list[list[list[int]]]
"""`[rank][micro-batch][index of a sequence]`. A micro-batch is empty where a rank has nothing to
compute in a round."""


def cost(length: int, start: int = 0) -> float:
    """Returns the cost of a sequence's tokens from `start` on; 1 is a token's cost without
    attention. Attention compares each token with all tokens before it, and everything else is done
    once per token."""
    return (length - start) * (1 + (length + start) / ATTENTION_TOKENS)


def pack_padded(lengths: Sequence[int], num_ranks: int, budget_tokens: int) -> MicroBatches:
    """Returns micro-batches of rows of about the same length, the costliest first. A micro-batch
    has at most `budget_tokens`, padding included: rows x the longest row. A longer sequence is a
    micro-batch of its own."""
    by_length = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))

    def fill(budget: int) -> list[list[int]]:
        filled: list[list[int]] = []
        for index in by_length:
            if filled and (len(filled[-1]) + 1) * lengths[filled[-1][0]] <= budget:
                filled[-1].append(index)
            else:
                filled.append([index])
        return filled

    filled = _evenly(fill, num_ranks, budget_tokens)
    filled.sort(key=lambda batch: -len(batch) * cost(lengths[batch[0]]))
    return _dealt(filled, num_ranks)


def _evenly(
    fill: Callable[[int], list[list[int]]], num_ranks: int, budget_tokens: int
) -> list[list[int]]:
    """Returns the micro-batches of the smallest budget that needs no more rounds than
    `budget_tokens`, so that they are about as long as one another."""
    most = -(-len(fill(budget_tokens)) // num_ranks) * num_ranks
    low, high = 1, budget_tokens
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(fill(middle)) <= most else (middle + 1, high)
    return fill(high)


def _dealt(by_cost: list[list[int]], num_ranks: int) -> MicroBatches:
    """Returns the micro-batches by rank: neighbours are a round. The last round is filled up with
    empty micro-batches."""
    missing = -len(by_cost) % num_ranks
    by_cost = by_cost + [[]] * missing
    return [by_cost[rank::num_ranks] for rank in range(num_ranks)]


@dataclass
class _Load:
    """Sequences that are computed together, by index: a run, or a micro-batch of runs. `num_tokens`
    are distinct tokens, `num_keys` the keys that attention gathers for them."""

    sequences: list[int]
    num_tokens: int = 0
    num_keys: int = 0
    cost: float = 0.0

    def fits(self, other: _Load, budget_tokens: int) -> bool:
        """Returns whether `other` can be added within the budget. An empty load takes any other."""
        return not self.num_tokens or (
            self.num_tokens + other.num_tokens <= budget_tokens
            and self.num_keys + other.num_keys <= KEYS_PER_TOKEN * budget_tokens
        )

    def add(self, other: _Load) -> None:
        self.sequences += other.sequences
        self.num_tokens += other.num_tokens
        self.num_keys += other.num_keys
        self.cost += other.cost


def pack_shared(
    lengths: Sequence[int], shared: Sequence[int], num_ranks: int, budget_tokens: int
) -> MicroBatches:
    """Returns sequences that share a prefix together, as far as the ranks stay balanced.

    Sequence i has `lengths[i]` tokens, and shares the first `shared[i]` of them with the sequence
    before it (`forest.sorted_by_tokens`): where both are in one micro-batch, they are computed
    once. A micro-batch has at most `budget_tokens` distinct tokens, and `KEYS_PER_TOKEN` times as
    many keys. A longer sequence is a micro-batch of its own.

    For each of `RUNS_PER_BUDGET` the runs are distributed, and the time of the step is estimated.
    The longest runs are taken whose time is within `TIME_TOLERANCE` of the shortest time.
    """
    if not lengths:
        return [[] for _ in range(num_ranks)]
    cuts: list[list[_Load]] = []
    for parts in RUNS_PER_BUDGET:
        runs = _runs(lengths, shared, max(1, budget_tokens // parts))
        if not cuts or len(runs) > len(cuts[-1]):
            cuts.append(runs)
    ways = [_distributed(runs, num_ranks, budget_tokens) for runs in cuts]
    times = [_time(batches, num_ranks) for batches in ways]
    longest_time = TIME_TOLERANCE * min(times)
    batches = next(way for way, time in zip(ways, times, strict=True) if time <= longest_time)
    return _dealt([sorted(batch.sequences) for batch in batches], num_ranks)


def _time(by_cost: list[_Load], num_ranks: int) -> float:
    """Returns the sum over rounds of the highest cost: the first micro-batch's of each round."""
    return sum(batch.cost for batch in by_cost[::num_ranks])


def _runs(lengths: Sequence[int], shared: Sequence[int], budget_tokens: int) -> list[_Load]:
    """Returns the sequences in runs. Each sequence of a run shares a prefix with the one before it,
    and a run stays within the budget, or has one sequence."""
    runs: list[_Load] = []
    for index, (length, num_shared) in enumerate(zip(lengths, shared, strict=True)):
        rest = _Load([index], length - num_shared, length, cost(length, num_shared))
        if runs and num_shared and runs[-1].fits(rest, budget_tokens):
            runs[-1].add(rest)
        else:
            runs.append(_Load([index], length, length, cost(length)))
    return runs


def _distributed(runs: list[_Load], num_ranks: int, budget_tokens: int) -> list[_Load]:
    """Returns the runs in micro-batches, the costliest first, in few rounds.

    The costliest run goes first. Each run goes to the micro-batch with the lowest cost so far that
    has room for it. If all have room, none costs more than 4/3 of the costliest one of the best
    distribution (Graham 1969).
    """
    runs = sorted(runs, key=lambda run: (-run.cost, run.sequences[0]))

    def fitted(rounds: int) -> list[_Load] | None:
        return _fitted(runs, min(rounds * num_ranks, len(runs)), budget_tokens)

    rounds = _least_rounds(runs, num_ranks, budget_tokens)
    low, batches = rounds, fitted(rounds)
    while batches is None:
        low, rounds = rounds + 1, rounds + max(1, rounds // 8)
        batches = fitted(rounds)
    while low < rounds:
        middle = (low + rounds) // 2
        fewer = fitted(middle)
        if fewer is None:
            low = middle + 1
        else:
            rounds, batches = middle, fewer
    return sorted(batches, key=lambda batch: (-batch.cost, batch.sequences[0]))


def _least_rounds(runs: list[_Load], num_ranks: int, budget_tokens: int) -> int:
    """Returns a lower bound of the rounds that the runs need: by the sum of their tokens, by the
    sum of their keys, and by the number of runs of which no two fit into one micro-batch."""
    budget_keys = KEYS_PER_TOKEN * budget_tokens
    by_tokens = sum(min(run.num_tokens, budget_tokens) for run in runs) / budget_tokens
    by_keys = sum(min(run.num_keys, budget_keys) for run in runs) / budget_keys
    alone = sum(2 * run.num_tokens > budget_tokens for run in runs)
    return max(1, ceil(max(by_tokens, by_keys, alone) / num_ranks))


def _fitted(runs: list[_Load], num_batches: int, budget_tokens: int) -> list[_Load] | None:
    """Returns the runs in `num_batches` micro-batches; None if they do not fit in `MAX_TRIES`
    tries per run."""
    batches = [_Load([]) for _ in range(num_batches)]
    by_cost = [(0.0, index) for index in range(num_batches)]
    for run in runs:
        full: list[tuple[float, int]] = []
        while by_cost and not batches[by_cost[0][1]].fits(run, budget_tokens):
            full.append(heapq.heappop(by_cost))
            if len(full) == MAX_TRIES:
                return None
        if not by_cost:
            return None
        batch = batches[by_cost[0][1]]
        batch.add(run)
        heapq.heapreplace(by_cost, (batch.cost, by_cost[0][1]))
        for entry in full:
            heapq.heappush(by_cost, entry)
    return batches
