"""The sequences of a micro-batch as a forest of prefix trees, so that a prefix that several
sequences share is computed once. Pure, and a function of the token ids alone.

A causal model's hidden state at a token depends only on this token and the tokens before it. So
sequences that begin alike have the same hidden states there: in the prompt of a group, in the
few-shot part of all prompts, in the turns that branches of a conversation share.

    sequences  A B C D x y      nodes  A B C D   at columns 0 to 3
               A B C D z               x y       at 4 and 5, child of the first node
               P Q                     z         at 6, child of the first node
                                       P Q       at 7 and 8
    row        A B C D x y z P Q
    positions  0 1 2 3 4 5 4 0 1

A token attends to itself, to the tokens before it in its node, and to all tokens of the node's
ancestors (`attention.py`). Each node costs attention some time, so a prefix becomes a node only
where that saves `MIN_SAVED` tokens.

The second part packs: it decides which sequences go into which micro-batch of which rank, the same
on every rank. Each backward pass is a collective, so every rank has the same number of
micro-batches. The ranks compute their n-th micro-batches together: a round, which lasts as long as
its costliest micro-batch. So micro-batches are filled from all sequences, sorted by cost, and dealt
to the ranks, and a round has micro-batches of about the same cost.

    useful share of the time = cost of all / (ranks x sum over rounds of the highest cost in it)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import numpy as np
from numpy.typing import NDArray

from shared.plan.memory import KEYS_PER_TOKEN

MIN_SAVED = 16
"""Fewest tokens that a shared node saves: (its sequences - 1) x its tokens."""

Ids = NDArray[np.int32]
Columns = NDArray[np.intp]


@dataclass(frozen=True)
class Node:
    """The tokens at the columns `start` to before `start + length` of the row. `ancestors` are the
    numbers of the nodes above it, from the root on. `depth` is the position of its first token in
    its sequences."""

    start: int
    length: int
    depth: int = 0
    ancestors: tuple[int, ...] = ()

    @property
    def columns(self) -> Columns:
        return np.arange(self.start, self.start + self.length)


@dataclass(frozen=True)
class Forest:
    """`tokens_T` is the row, and `positions_T` each token's position in its sequences. Token t of
    sequence s is at column `columns[s][t]`."""

    nodes: tuple[Node, ...]
    tokens_T: Ids
    positions_T: Columns
    columns: tuple[Columns, ...]

    def columns_above(self, node: Node) -> Columns:
        """Returns the columns of the tokens of a node's ancestors, from the root on."""
        return _joined([self.nodes[index].columns for index in node.ancestors])


def build_forest(sequences: Sequence[Ids], *, share: bool = True) -> Forest:
    """Returns the forest of sequences of at least one token each, with nodes in the order of their
    columns. `share` False: each sequence is a node of its own."""
    indices = range(len(sequences))
    groups = [tuple(indices)] if share else [(index,) for index in indices]
    # Each entry: the sequences of a subtree, how many of their tokens are in nodes, these nodes.
    todo: list[tuple[tuple[int, ...], int, tuple[int, ...]]]
    todo = [(group, 0, ()) for group in reversed(groups)]
    nodes: list[Node] = []
    parts: list[Ids] = []
    paths: dict[int, tuple[int, ...]] = {}
    num_tokens = 0
    while todo:
        members, depth, path = todo.pop()
        end = depth + _common_prefix([sequences[index][depth:] for index in members])
        if len(members) == 1 or (end - depth) * (len(members) - 1) >= MIN_SAVED:
            nodes.append(Node(num_tokens, end - depth, depth, ancestors=path))
            path = (*path, len(nodes) - 1)
            parts.append(sequences[members[0]][depth:end])
            num_tokens += end - depth
            depth = end
            ended = [index for index in members if len(sequences[index]) == end]
            paths |= dict.fromkeys(ended, path)
            members = tuple(index for index in members if len(sequences[index]) > end)
        branches = [*_by_token(sequences, members, end)]
        todo.extend((branch, depth, path) for branch in reversed(branches))
    return Forest(
        nodes=tuple(nodes),
        tokens_T=np.concatenate(parts),
        positions_T=_joined([np.arange(node.depth, node.depth + node.length) for node in nodes]),
        columns=tuple(_joined([nodes[node].columns for node in paths[index]]) for index in indices),
    )


def _common_prefix(sequences: Sequence[Ids]) -> int:
    """Returns the length of the longest common prefix of the sequences."""
    first = sequences[0]
    length = len(first)
    for other in sequences[1:]:
        length = min(length, len(other))
        differing = np.flatnonzero(first[:length] != other[:length])
        length = int(differing[0]) if len(differing) else length
    return length


def _by_token(
    sequences: Sequence[Ids], members: Sequence[int], position: int
) -> Iterator[tuple[int, ...]]:
    """Yields the members in groups with the same token at `position`. A member that ends before it
    is a group of its own."""
    groups: dict[int, list[int]] = {}
    for index in members:
        if len(sequences[index]) == position:
            yield (index,)
        else:
            groups.setdefault(int(sequences[index][position]), []).append(index)
    yield from map(tuple, groups.values())


def sorted_by_tokens(sequences: Sequence[Ids]) -> tuple[list[int], list[int]]:
    """Returns the indices of the sequences in lexicographic order, in which sequences that share a
    prefix are neighbours; and for each, in this order, the length of the prefix that it shares with
    the one before it, 0 if below `MIN_SAVED`.

    The distinct tokens of a run of neighbours are the sum of their lengths less these prefixes,
    except the first one's. The forest computes less than `MIN_SAVED` tokens more per sequence.
    """
    # The bytes of big-endian numbers sort as the numbers do.
    order = sorted(
        range(len(sequences)), key=lambda index: (sequences[index].astype(">u4").tobytes(), index)
    )
    shared = [_common_prefix([sequences[one], sequences[two]]) for one, two in pairwise(order)]
    return order, [0] * bool(order) + [length * (length >= MIN_SAVED) for length in shared]


def _joined(parts: Sequence[Columns]) -> Columns:
    return np.concatenate(parts) if parts else np.zeros(0, np.intp)


# --- packing --------------------------------------------------------------------------------------


ATTENTION_TOKENS = 16384
"""Length of a sequence at which attention costs as much as the rest of the model: about 12 times
a transformer's hidden size."""

RUNS_PER_BUDGET = (1, 2, 3, 4, 6, 8, 12, 16)
"""The lengths of runs that are tried: a run of sequences that share a prefix has at most the budget
of a micro-batch divided by one of these. Short runs balance the ranks better, but each run computes
its prefix again."""

TIME_TOLERANCE = 1.02
"""Longer runs are taken if their step takes at most so many times the shortest time."""

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

    The costliest run goes first. Each run goes to the micro-batch with the lowest cost so far into
    which it fits. If it fits into all, none costs more than 4/3 of the costliest one of the best
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
