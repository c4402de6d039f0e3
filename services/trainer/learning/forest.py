"""The sequences of a micro-batch as a forest over their tokens, so that a prefix that several have
in common is computed once. Pure, and a function of the tokens alone.

A causal model's hidden state at a token depends on this token and those before it. So sequences
that begin alike have the same states there: the prompt of a group, the few-shot part of all
prompts, the turns that branches of a conversation share.

    sequences  A B C D x y      nodes  A B C D   at columns 0 to 3
               A B C D z               x y       at 4 and 5, after the first node
               P Q                     z         at 6, after the first node
                                       P Q       at 7 and 8
    row        A B C D x y z P Q
    positions  0 1 2 3 4 5 4 0 1

A token sees its own node up to itself, and the nodes between its own and the root. Every node costs
a call of the attention's own, so a prefix is shared only where that saves `MIN_SAVED` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

MIN_SAVED = 16
"""Fewest tokens for which a prefix is worth a node: (sequences - 1) x tokens of the prefix."""

Ids = NDArray[np.int32]
Columns = NDArray[np.intp]


@dataclass(frozen=True)
class Node:
    """Tokens that stand at the columns `start` to before `start + length` of the row, and follow
    the nodes of `path`, numbered from the root. `depth`: the position of the first token in its
    sequences."""

    start: int
    length: int
    depth: int = 0
    path: tuple[int, ...] = ()

    @property
    def columns(self) -> Columns:
        return np.arange(self.start, self.start + self.length)


@dataclass(frozen=True)
class Forest:
    """`tokens_T` is the row, with each token's position in its sequences in `positions_T`.
    `columns[s]` are the columns of sequence s, one for each of its tokens."""

    nodes: tuple[Node, ...]
    tokens_T: Ids
    positions_T: Columns
    columns: tuple[Columns, ...]

    def columns_before(self, node: Node) -> Columns:
        """Returns the columns of the tokens that `node` follows, from the root on."""
        return _joined([self.nodes[index].columns for index in node.path])


def grow(sequences: Sequence[Ids], *, share: bool = True) -> Forest:
    """Returns the forest of sequences of at least one token each, with nodes in the order of their
    tokens. `share` False: each sequence is a node by itself."""
    everything = range(len(sequences))
    # Each entry: sequences that agree so far, how many of their tokens are in nodes, these nodes.
    whole = [tuple(everything)] if share else [(index,) for index in everything]
    todo: list[tuple[tuple[int, ...], int, tuple[int, ...]]]
    todo = [(group, 0, ()) for group in reversed(whole)]
    nodes: list[Node] = []
    parts: list[Ids] = []
    of_sequence: dict[int, tuple[int, ...]] = {}
    num_tokens = 0
    while todo:
        members, depth, path = todo.pop()
        end = depth + _common([sequences[index][depth:] for index in members])
        if len(members) == 1 or (end - depth) * (len(members) - 1) >= MIN_SAVED:
            path = (*path, len(nodes))
            nodes.append(Node(num_tokens, end - depth, depth, path[:-1]))
            parts.append(sequences[members[0]][depth:end])
            num_tokens += end - depth
            depth = end
            ended = [index for index in members if len(sequences[index]) == end]
            of_sequence |= dict.fromkeys(ended, path)
            members = tuple(index for index in members if len(sequences[index]) > end)
        apart = [*_apart(sequences, members, end)]
        todo.extend((group, depth, path) for group in reversed(apart))
    return Forest(
        nodes=tuple(nodes),
        tokens_T=np.concatenate(parts),
        positions_T=_joined([np.arange(node.depth, node.depth + node.length) for node in nodes]),
        columns=tuple(
            _joined([nodes[node].columns for node in of_sequence[index]])
            for index in range(len(sequences))
        ),
    )


def _common(sequences: Sequence[Ids]) -> int:
    """Returns how many tokens from the first on all sequences have in common."""
    first = sequences[0]
    end = len(first)
    for other in sequences[1:]:
        end = common_prefix(first[:end], other)
    return end


def common_prefix(one: Ids, other: Ids) -> int:
    """Returns how many tokens from the first on two sequences have in common."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def _apart(sequences: Sequence[Ids], members: Sequence[int], at: int) -> Iterator[tuple[int, ...]]:
    """Yields the members in groups that have the same token at a position; a member that ended
    before it is a group by itself."""
    groups: dict[int, list[int]] = {}
    for index in members:
        if len(sequences[index]) == at:
            yield (index,)
        else:
            groups.setdefault(int(sequences[index][at]), []).append(index)
    yield from map(tuple, groups.values())


def sorted_by_tokens(sequences: Sequence[Ids]) -> tuple[list[int], list[int]]:
    """Returns the indices of the sequences in lexicographic order, so that those with a prefix in
    common are neighbours; and for each in this order how many tokens it has in common with the one
    before it, 0 where that is not worth a node.

    A run of them has as many distinct tokens as the sum of their lengths less these prefixes, the
    first's apart. The forest shares no fewer, but for `MIN_SAVED` tokens of each sequence."""
    order = sorted(
        range(len(sequences)), key=lambda index: (sequences[index].astype(">u4").tobytes(), index)
    )
    common = [common_prefix(sequences[one], sequences[other]) for one, other in pairwise(order)]
    return order, [0] * bool(order) + [length * (length >= MIN_SAVED) for length in common]


# --- what attention has to compute ---------------------------------------------------------------

LIKE = 0.75
"""Nodes are computed together if the shortest has at least this part of the longest's length."""

BLOCK = 512
"""Most queries of a call that needs a mask, so that no mask has the size of the whole row."""


@dataclass(frozen=True)
class Call:
    """Some nodes' attention, computed together: node n has its queries at the columns
    `queries_NQ[n]`, of which the first `lengths_N[n]` are real, and its keys at `keys_NK[n]`.

    The last query is at the last key's position, in all nodes, and no query sees a later position.
    A padded query or key repeats a column; no real query sees a padded key.
    """

    queries_NQ: Columns
    keys_NK: Columns
    lengths_N: tuple[int, ...]


def calls(forest: Forest, window: int | None = None) -> list[Call]:
    """Returns the attention of all the forest's tokens. `window`: how many positions a token sees,
    its own included; None: all before it."""
    return [
        call
        for siblings in _like_siblings(forest)
        for call in _of_siblings(forest, siblings, window)
    ]


def _like_siblings(forest: Forest) -> Iterator[list[Node]]:
    """Yields nodes that follow the same tokens, or none, and are about as long, the longest
    first."""
    by_length = sorted(forest.nodes, key=lambda node: (node.path, -node.length, node.start))
    for _, family in groupby(by_length, key=lambda node: node.path):
        together: list[Node] = []
        for node in family:
            if together and node.length < LIKE * together[0].length:
                yield together
                together = []
            together.append(node)
        yield together


def _of_siblings(forest: Forest, siblings: list[Node], window: int | None) -> Iterator[Call]:
    before = forest.columns_before(siblings[0])
    longest = siblings[0].length
    masked = len(before) > 0 or (window is not None and window < longest)
    size = BLOCK if masked else longest
    for first in range(0, longest, size):
        end = min(first + size, longest)
        nodes = [node for node in siblings if node.length > first]
        own_NK = _padded(nodes, 0, end)
        keys_NK = np.concatenate([np.tile(before, (len(nodes), 1)), own_NK], axis=1)
        if window is not None:
            keys_NK = keys_NK[:, max(0, len(before) + first + 1 - window) :]
        yield Call(
            queries_NQ=_padded(nodes, first, end),
            keys_NK=keys_NK,
            lengths_N=tuple(min(node.length, end) - first for node in nodes),
        )


def _padded(nodes: Sequence[Node], first: int, end: int) -> Columns:
    """Returns the columns of each node's tokens `first` to before `end`, its last one repeated
    where it is shorter."""
    starts_N1 = np.array([[node.start] for node in nodes])
    lengths_N1 = np.array([[node.length] for node in nodes])
    return starts_N1 + np.minimum(np.arange(first, end), lengths_N1 - 1)


def _joined(parts: Sequence[Columns]) -> Columns:
    return np.concatenate(parts) if parts else np.zeros(0, np.intp)
