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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

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
