"""Which sequences go into which micro-batch of which rank. Pure, and computed alike on every rank.

Each backward pass is a collective, so every rank has the same number of micro-batches, and a round
of them lasts as long as the one with the most work. So micro-batches are filled over all sequences
first, sorted by work, and dealt to the ranks: neighbours, which take about as long, are a round.

    share of useful time = work / (ranks x sum over rounds of the most work in it)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

ATTENTION_TOKENS = 16384
"""Length of a sequence at which attention costs as much as the rest of the model: about 12 hidden
sizes of a transformer."""

PARTS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Into how many parts of a micro-batch the sequences with a prefix in common may be cut: small
parts balance the ranks better, and each computes the prefix again."""

NEAR = 1.02
"""How much longer than the quickest way a step may take that computes fewer tokens."""

KEYS = 8
"""Most keys that attention gathers for a micro-batch, as a multiple of its budget: a shared prefix
is computed once, and its keys are gathered for each sequence that follows it."""

TRIES = 64
"""How many micro-batches are tried for the sequences of a prefix, the least work first. Else the
time to plan grows with their number times the number of micro-batches."""

MicroBatches = list[list[list[int]]]
"""`[rank][micro-batch][index of a sequence]`; `[]` where a rank only keeps the others company."""


def cost(length: int, start: int = 0) -> float:
    """Returns the work of a sequence's tokens from `start` on, in tokens: attention compares each
    token with all tokens before it, everything else is done once per token."""
    return (length - start) * (1 + (length + start) / ATTENTION_TOKENS)


def pack_padded(lengths: Sequence[int], num_ranks: int, budget_tokens: int) -> MicroBatches:
    """Returns rows of about the same length together, the longest first. A micro-batch, as many
    rows as long as its longest, stays within `budget_tokens`; a longer sequence has one of its
    own."""
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
    filled.sort(key=lambda batch: -sum(cost(lengths[batch[0]]) for _ in batch))
    return _dealt(filled, num_ranks)


def _evenly(
    fill: Callable[[int], list[list[int]]], num_ranks: int, budget_tokens: int
) -> list[list[int]]:
    """Returns the micro-batches by the smallest budget that needs no more rounds."""
    most = -(-len(fill(budget_tokens)) // num_ranks) * num_ranks
    low, high = 1, budget_tokens
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(fill(middle)) <= most else (middle + 1, high)
    return fill(high)


def _dealt(by_cost: list[list[int]], num_ranks: int) -> MicroBatches:
    """Deals neighbours to the ranks; the last round is filled up with empty micro-batches."""
    missing = -len(by_cost) % num_ranks
    by_cost = by_cost + [[]] * missing
    return [by_cost[rank::num_ranks] for rank in range(num_ranks)]


@dataclass
class _Load:
    """Sequences that are computed together, by their order, with their distinct tokens, the keys
    that their attention gathers, and their work."""

    sequences: list[int]
    tokens: int = 0
    keys: int = 0
    work: float = 0.0

    def fits(self, other: _Load, budget_tokens: int) -> bool:
        """Whether there is room for the other too; an empty one has room for any."""
        return not self.tokens or (
            self.tokens + other.tokens <= budget_tokens
            and self.keys + other.keys <= KEYS * budget_tokens
        )

    def add(self, other: _Load) -> None:
        self.sequences += other.sequences
        self.tokens += other.tokens
        self.keys += other.keys
        self.work += other.work


def pack_shared(
    lengths: Sequence[int], common: Sequence[int], num_ranks: int, budget_tokens: int
) -> MicroBatches:
    """Returns sequences with a prefix in common together, as far as the ranks stay balanced.

    The sequences are in the order of their tokens: number i has `lengths[i]` tokens, of which the
    first `common[i]` are those of the one before it, and computed with them. A micro-batch stays
    within `budget_tokens` distinct tokens and `KEYS` times as many keys; a longer sequence has one
    of its own.

    Each way to cut what is shared into parts is weighed with its work, the prefixes that are
    computed again included. The largest parts are taken whose time is within `NEAR` of the least.
    """
    if not lengths:
        return [[] for _ in range(num_ranks)]
    cut: list[list[_Load]] = []
    for parts in PARTS:
        runs = _runs(lengths, common, max(1, budget_tokens // parts))
        if not cut or len(runs) > len(cut[-1]):
            cut.append(runs)
    ways = [_spread(runs, num_ranks, budget_tokens) for runs in cut]
    times = [_time(loads, num_ranks) for loads in ways]
    loads = next(way for way, time in zip(ways, times, strict=True) if time <= NEAR * min(times))
    return _dealt([sorted(load.sequences) for load in loads], num_ranks)


def _time(by_work: list[_Load], num_ranks: int) -> float:
    return sum(load.work for load in by_work[::num_ranks])


def _runs(lengths: Sequence[int], common: Sequence[int], most_tokens: int) -> list[_Load]:
    """Returns neighbours that share as loads of at most `most_tokens`, or of one sequence."""
    runs: list[_Load] = []
    for index, (length, shared) in enumerate(zip(lengths, common, strict=True)):
        after = _Load([index], length - shared, length, cost(length, shared))
        if runs and shared and runs[-1].fits(after, most_tokens):
            runs[-1].add(after)
        else:
            runs.append(_Load([index], length, length, cost(length)))
    return runs


def _spread(runs: list[_Load], num_ranks: int, budget_tokens: int) -> list[_Load]:
    """Returns the runs in micro-batches, the most work first, in as few rounds as they fit in.

    From the run with the most work on, each goes to the micro-batch with the least work so far that
    has room for it. None then has more than 4/3 of the work in the best distribution (Graham
    1969), where there is room in all.
    """
    runs = sorted(runs, key=lambda run: (-run.work, run.sequences[0]))

    def fitted(rounds: int) -> list[_Load] | None:
        return _fitted(runs, min(rounds * num_ranks, len(runs)), budget_tokens)

    rounds = _least_rounds(runs, num_ranks, budget_tokens)
    low, loads = rounds, fitted(rounds)
    while loads is None:
        low, rounds = rounds + 1, rounds + max(1, rounds // 8)
        loads = fitted(rounds)
    while low < rounds:
        middle = (low + rounds) // 2
        fewer = fitted(middle)
        if fewer is None:
            low = middle + 1
        else:
            rounds, loads = middle, fewer
    return sorted(loads, key=lambda load: (-load.work, load.sequences[0]))


def _least_rounds(runs: list[_Load], num_ranks: int, budget_tokens: int) -> int:
    """Returns a number of rounds below which the runs cannot fit: by all their tokens and keys, and
    by those of which no two fit together."""
    tokens = sum(min(run.tokens, budget_tokens) for run in runs) / budget_tokens
    keys = sum(min(run.keys, KEYS * budget_tokens) for run in runs) / (KEYS * budget_tokens)
    alone = sum(2 * run.tokens > budget_tokens for run in runs)
    return max(1, ceil(max(tokens, keys, alone) / num_ranks))


def _fitted(runs: list[_Load], num_loads: int, budget_tokens: int) -> list[_Load] | None:
    """Returns the runs in so many micro-batches; None if they do not fit in `TRIES` tries each."""
    loads = [_Load([]) for _ in range(num_loads)]
    by_work = [(0.0, index) for index in range(num_loads)]
    for run in runs:
        full: list[tuple[float, int]] = []
        while by_work and not loads[by_work[0][1]].fits(run, budget_tokens):
            full.append(heapq.heappop(by_work))
            if len(full) == TRIES:
                return None
        if not by_work:
            return None
        load = loads[by_work[0][1]]
        load.add(run)
        heapq.heapreplace(by_work, (load.work, by_work[0][1]))
        for entry in full:
            heapq.heappush(by_work, entry)
    return loads
