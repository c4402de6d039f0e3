"""Attention over a forest (`forest.py`) by `scaled_dot_product_attention`: sibling nodes of similar
length are one dense batch, whose rows attend with one mask.

Axes: B nodes of a batch, Q queries and K keys of a node, A heads of queries, H heads of keys and
values, D size of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.trainer.learning.forest import Columns, Forest, Node
from services.trainer.learning.head import to_device

MIN_LENGTH_RATIO = 0.75
"""Least length of a batch's shortest node, relative to its longest node."""

MAX_MASKED_QUERIES = 512
"""Most queries per node of a batch that needs a mask, so that no mask has the size of the row."""


@dataclass(frozen=True)
class NodeBatch:
    """Nodes whose attention is computed together. Node b has its queries at the columns
    `queries_BQ[b]` of the row, of which the first `lengths_B[b]` are real, and its keys at
    `keys_BK[b]`.

    In each node the last query and the last key are the same position, and a query sees no later
    position than its own. Padding repeats a node's last column, and no real query sees a padded
    key.
    """

    queries_BQ: Columns
    keys_BK: Columns
    lengths_B: tuple[int, ...]
    is_masked: bool
    """False: plain causal attention, with as many queries as keys."""


def node_batches(forest: Forest, window: int | None = None) -> list[NodeBatch]:
    """Returns the batches that hold each of the forest's tokens as a query once. `window`: how many
    positions a token sees, its own included; None: its own and all before it."""
    return [
        batch
        for siblings in _similar_siblings(forest)
        for batch in _batches_of(forest, siblings, window)
    ]


def _similar_siblings(forest: Forest) -> Iterator[list[Node]]:
    """Yields nodes with the same ancestors and about the same length, the longest first."""
    by_length = sorted(forest.nodes, key=lambda node: (node.ancestors, -node.length, node.start))
    for _, siblings in groupby(by_length, key=lambda node: node.ancestors):
        similar: list[Node] = []
        for node in siblings:
            if similar and node.length < MIN_LENGTH_RATIO * similar[0].length:
                yield similar
                similar = []
            similar.append(node)
        yield similar


def _batches_of(forest: Forest, siblings: list[Node], window: int | None) -> Iterator[NodeBatch]:
    above = forest.columns_above(siblings[0])
    longest = siblings[0].length
    masked = len(above) > 0 or (window is not None and window < longest)
    size = MAX_MASKED_QUERIES if masked else longest
    for first in range(0, longest, size):
        end = min(first + size, longest)
        nodes = [node for node in siblings if node.length > first]
        own_BK = _padded(nodes, 0, end)
        keys_BK = np.concatenate([np.tile(above, (len(nodes), 1)), own_BK], axis=1)
        if window is not None:
            keys_BK = keys_BK[:, max(0, len(above) + first + 1 - window) :]
        num_queries = end - first
        yield NodeBatch(
            queries_BQ=_padded(nodes, first, end),
            keys_BK=keys_BK,
            lengths_B=tuple(min(node.length, end) - first for node in nodes),
            is_masked=num_queries < keys_BK.shape[1]
            or (window is not None and window < num_queries),
        )


def _padded(nodes: Sequence[Node], first: int, end: int) -> Columns:
    """Returns the columns `[B, end - first]` of each node's tokens `first` to before `end`; its
    last column is repeated where the node is shorter."""
    starts_B1 = np.array([[node.start] for node in nodes])
    lengths_B1 = np.array([[node.length] for node in nodes])
    return starts_B1 + np.minimum(np.arange(first, end), lengths_B1 - 1)


@dataclass(frozen=True)
class _Batch:
    """A NodeBatch's columns as tensors, and its mask."""

    queries_BQ: Tensor
    keys_BK: Tensor
    mask_QK: Tensor | None


@dataclass(frozen=True)
class DenseAttention:
    """The batches of a row. The query of column t is number `queries_T[t]` of all their queries,
    one batch after the other."""

    batches: tuple[_Batch, ...]
    queries_T: Tensor

    @classmethod
    def of(
        cls, forest: Forest, window: int | None, device: torch.device, dtype: torch.dtype
    ) -> DenseAttention:
        of_row = node_batches(forest, window)
        mask_QK = _mask([batch for batch in of_row if batch.is_masked], window, device, dtype)
        batches: list[_Batch] = []
        columns, numbers, num_queries = [], [], 0
        for batch in of_row:
            (num_nodes, length), num_keys = batch.queries_BQ.shape, batch.keys_BK.shape[1]
            real_BQ = np.arange(length) < np.array(batch.lengths_B)[:, None]
            columns.append(batch.queries_BQ[real_BQ])
            numbers.append(num_queries + np.flatnonzero(real_BQ))
            num_queries += num_nodes * length
            batches.append(
                _Batch(
                    queries_BQ=to_device(torch.from_numpy(batch.queries_BQ), device),
                    keys_BK=to_device(torch.from_numpy(batch.keys_BK), device),
                    mask_QK=mask_QK[-length:, -num_keys:] if batch.is_masked else None,
                )
            )
        queries_T = np.concatenate(numbers)[np.concatenate(columns).argsort()]
        return cls(tuple(batches), to_device(torch.from_numpy(queries_T), device))

    def attend(self, q_TAD: Tensor, k_THD: Tensor, v_THD: Tensor, scaling: float | None) -> Tensor:
        """Returns the attention `[T, A, D]` of a row's queries to its keys and values."""
        done: list[Tensor] = []
        for batch in self.batches:
            q_BAQD = _gathered(q_TAD, batch.queries_BQ)
            k_BHKD, v_BHKD = _gathered(k_THD, batch.keys_BK), _gathered(v_THD, batch.keys_BK)
            if q_TAD.is_cuda:  # torch's CUDA kernels with a mask need A heads of keys and values
                repeats = q_TAD.shape[1] // k_THD.shape[1]
                k_BHKD, v_BHKD = (each.repeat_interleave(repeats, 1) for each in (k_BHKD, v_BHKD))
            out_BAQD = scaled_dot_product_attention(
                q_BAQD,
                k_BHKD,
                v_BHKD,
                attn_mask=batch.mask_QK,
                is_causal=batch.mask_QK is None,
                scale=scaling,
                enable_gqa=not q_TAD.is_cuda,
            )
            done.append(out_BAQD.transpose(1, 2).flatten(0, 1))
        return torch.cat(done).index_select(0, self.queries_T)


def _mask(
    batches: list[NodeBatch], window: int | None, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Returns which keys the queries of the largest batch see `[Q, K]`. The last query is at the
    last key, so the mask of each batch is the lower right part of this one, without a copy."""
    num_queries = max((batch.queries_BQ.shape[1] for batch in batches), default=0)
    num_keys = max((batch.keys_BK.shape[1] for batch in batches), default=0)
    behind_QK = (
        torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)[None]
    )
    seen_QK = (behind_QK >= 0) if window is None else (behind_QK >= 0) & (behind_QK < window)
    if device.type != "cpu":
        return to_device(seen_QK, device)
    # In the queries' dtype: torch makes a copy of a boolean part, and keeps it for backward.
    return torch.zeros(seen_QK.shape, dtype=dtype).masked_fill_(~seen_QK, -torch.inf)


def _gathered(row_THD: Tensor, columns_BQ: Tensor) -> Tensor:
    """Returns the row's heads at the columns `[B, H, Q, D]`.

    On a GPU the gradient of `index_select` adds up in another order each time, so indexing is used
    there; on a CPU the gradient of indexing is slow.
    """
    flat = columns_BQ.flatten()
    chosen = row_THD[flat] if row_THD.is_cuda else row_THD.index_select(0, flat)
    return chosen.unflatten(0, columns_BQ.shape).transpose(1, 2)
