"""Attention over a forest (`forest.py`): a token attends to itself, to the tokens before it in its
node, and to all tokens of the node's ancestors.

It is registered in transformers as the attention function `NAME`, so a model's code does not
change. On a GPU in 16 bits keys and values are gathered from each node and its ancestors, and all
nodes are one call of torch's kernel for sequences of unequal length, without a mask or padding.
Everywhere else it is `scaled_dot_product_attention` over dense batches: of whole trees of similar
length, each with a mask of its own, where a tree is small; else of sibling nodes of similar length,
whose keys are gathered and which have one mask (`batches_of`). On a CPU, without a sliding window,
nothing is gathered for larger trees: all tokens below a node attend to the node's tokens in one
call, and the results are added up (`CascadeAttention`).

A packed row is a forest with one node per sequence, so the same function serves it.

Axes: T tokens of a row, B nodes of a batch, Q queries and K keys of a node, A heads of queries, H
heads of keys and values, D size of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import deterministic
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from services.trainer.learning.forest import Columns, Forest, Node
from services.trainer.learning.head import to_device
from shared.plan.memory import KERNEL_KEYS, KERNEL_PADDING, KERNEL_TOKENS

MIN_LENGTH_RATIO = 0.75
"""Least length of a batch's shortest node, relative to its longest node."""

MAX_MASKED_QUERIES = 512
"""Most queries per node of a batch that needs a mask, so that no mask has the size of the row."""

PAIRS_PER_KEY = 12
"""Number of pairs of a query and a key that take as long as gathering a key and its value and
adding up their gradients, measured on a CPU. The cheaper way is chosen for each tree."""

MAX_TREE_PAIRS = 1 << 22
"""Most elements of the masks of a batch of trees: 16 MiB in float32."""

MAX_KEPT_KEYS = 2
"""Gathered keys per token of a row that a layer keeps for its backward pass; `hone plan` counts
one. Where a row has more, as with long conversations that branch, its attention is computed again
in the backward pass, so that only one layer at a time holds them."""


@dataclass(frozen=True)
class NodeBatch:
    """Nodes whose attention is computed together. Node b has its queries at the columns
    `queries_BQ[b]` of the row, of which the first `lengths_B[b]` are real, and its keys at
    `keys_BK[b]`.

    In each node the last query and the last key are the same position, and a query sees no later
    position than its own. Padding repeats a node's last column, and no real query sees a padded
    key.

    In a batch of whole trees `queries_BQ` and `keys_BK` are the same columns, and `seen_BQK` says
    which keys each query sees.
    """

    queries_BQ: Columns
    keys_BK: Columns
    lengths_B: tuple[int, ...]
    is_masked: bool
    """False: plain causal attention, with as many queries as keys."""
    seen_BQK: NDArray[np.bool_] | None = None


def batches_of(
    forest: Forest, window: int | None = None, *, own_only: bool = False
) -> list[NodeBatch]:
    """Returns the batches that hold each of the forest's tokens as a query once. `window`: how many
    positions a token sees, its own included; None: its own and all before it. `own_only`: without
    the keys of a node's ancestors, where a tree is not computed as a whole."""
    whole, apart = _whole_and_apart(forest)
    nodes = [node for tree in apart for node in tree.nodes]
    if own_only:
        nodes = [replace(node, ancestors=()) for node in nodes]
    return [*_tree_batches(forest, whole, window), *node_batches(forest, window, nodes)]


def _whole_and_apart(forest: Forest) -> tuple[list[Tree], list[Tree]]:
    """Returns the trees that are cheaper as a whole, and the others."""
    roots = [number for number, node in enumerate(forest.nodes) if not node.ancestors]
    bounds = pairwise([*roots, len(forest.nodes)])
    trees = [Tree(forest.nodes[first:end]) for first, end in bounds]
    return (
        [tree for tree in trees if tree.is_cheaper_whole],
        [tree for tree in trees if not tree.is_cheaper_whole],
    )


def parents_of(forest: Forest) -> list[tuple[slice, slice]]:
    """Returns, for each node with children in a tree that is not computed as a whole, the columns
    of its tokens and of all tokens below it, which follow them."""
    ends_T = _last_columns(forest)
    _, apart = _whole_and_apart(forest)
    ends = [(node.start, node.start + node.length) for tree in apart for node in tree.nodes]
    return [
        (slice(start, end), slice(end, int(ends_T[start]) + 1))
        for start, end in ends
        if end <= ends_T[start]
    ]


@dataclass(frozen=True)
class Tree:
    """A root and all nodes below it: neighbours in the row."""

    nodes: tuple[Node, ...]

    @property
    def start(self) -> int:
        return self.nodes[0].start

    @property
    def length(self) -> int:
        return self.nodes[-1].start + self.nodes[-1].length - self.start

    @property
    def is_cheaper_whole(self) -> bool:
        """Whether attention of all its tokens to all others costs less than gathering the keys of
        each of its nodes."""
        root, *others = self.nodes
        keys = root.length + sum(node.depth + node.length for node in others)
        pairs = sum(node.length * (node.depth + node.length) for node in others)
        pairs += root.length**2 // 2  # without a mask the kernel leaves out later keys
        is_small = self.length**2 <= min(pairs + PAIRS_PER_KEY * keys, MAX_TREE_PAIRS)
        return len(self.nodes) > 1 and is_small


def _tree_batches(forest: Forest, trees: Sequence[Tree], window: int | None) -> Iterator[NodeBatch]:
    """Yields batches of trees of similar length, the longest first."""
    ends_T = _last_columns(forest)
    batch: list[Tree] = []
    for tree in sorted(trees, key=lambda tree: (-tree.length, tree.start)):
        is_full = (len(batch) + 1) * (batch or [tree])[0].length ** 2 > MAX_TREE_PAIRS
        if batch and (is_full or tree.length < MIN_LENGTH_RATIO * batch[0].length):
            yield _tree_batch(forest, batch, ends_T, window)
            batch = []
        batch.append(tree)
    if batch:
        yield _tree_batch(forest, batch, ends_T, window)


def _tree_batch(
    forest: Forest, trees: Sequence[Tree], ends_T: Columns, window: int | None
) -> NodeBatch:
    columns_BQ = _padded(trees, 0, trees[0].length)
    queries_BQ1, keys_B1K = columns_BQ[:, :, None], columns_BQ[:, None, :]
    seen_BQK = (keys_B1K <= queries_BQ1) & (queries_BQ1 <= ends_T[keys_B1K])
    if window is not None:
        positions_T = forest.positions_T
        seen_BQK &= positions_T[queries_BQ1] - positions_T[keys_B1K] < window
    lengths_B = tuple(tree.length for tree in trees)
    for row, length in enumerate(lengths_B):
        seen_BQK[row, :, length:] = False  # padding repeats the last column
    return NodeBatch(columns_BQ, columns_BQ, lengths_B, is_masked=True, seen_BQK=seen_BQK)


def _last_columns(forest: Forest) -> Columns:
    """Returns, for each token, the last column of the nodes below its own, which see it `[T]`."""
    ends = [node.start + node.length - 1 for node in forest.nodes]
    for number, node in enumerate(forest.nodes):
        for ancestor in node.ancestors:
            ends[ancestor] = max(ends[ancestor], ends[number])
    return np.repeat(ends, [node.length for node in forest.nodes])


def node_batches(
    forest: Forest, window: int | None = None, nodes: Sequence[Node] | None = None
) -> list[NodeBatch]:
    """Returns batches of sibling nodes, which hold each token of the nodes as a query once."""
    return [
        batch
        for siblings in _similar_siblings(forest.nodes if nodes is None else nodes)
        for batch in _batches_of(forest, siblings, window)
    ]


def _similar_siblings(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """Yields nodes with the same ancestors and about the same length, the longest first."""
    by_length = sorted(nodes, key=lambda node: (node.ancestors, -node.length, node.start))
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


def _padded(nodes: Sequence[Node] | Sequence[Tree], first: int, end: int) -> Columns:
    """Returns the columns `[B, end - first]` of the tokens `first` to before `end` of each node or
    tree; its last column is repeated where it is shorter."""
    starts_B1 = np.array([[node.start] for node in nodes])
    lengths_B1 = np.array([[node.length] for node in nodes])
    return starts_B1 + np.minimum(np.arange(first, end), lengths_B1 - 1)


@dataclass(frozen=True)
class _Batch:
    """A NodeBatch's number of nodes, queries and keys, and its mask `[Q, K]` or `[B, 1, Q, K]`."""

    num_nodes: int
    num_queries: int
    num_keys: int
    mask: Tensor | None


@dataclass(frozen=True)
class DenseAttention:
    """The batches of a row. `queries_M` and `keys_M` are the columns of all their queries and keys,
    one batch after the other, and the query of column t is number `queries_T[t]` of all. `lengths`:
    each batch's `lengths_B`."""

    batches: tuple[_Batch, ...]
    lengths: tuple[tuple[int, ...], ...]
    queries_M: Tensor
    keys_M: Tensor
    queries_T: Tensor

    @classmethod
    def of(
        cls,
        of_row: Sequence[NodeBatch],
        window: int | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> DenseAttention:
        of_nodes = [batch for batch in of_row if batch.is_masked and batch.seen_BQK is None]
        mask_QK = _mask(of_nodes, window, device, dtype)
        batches: list[_Batch] = []
        columns, numbers, num_before = [], [], 0
        for batch in of_row:
            (num_nodes, num_queries), num_keys = batch.queries_BQ.shape, batch.keys_BK.shape[1]
            real_BQ = np.arange(num_queries) < np.array(batch.lengths_B)[:, None]
            columns.append(batch.queries_BQ[real_BQ])
            numbers.append(num_before + np.flatnonzero(real_BQ))
            num_before += num_nodes * num_queries
            mask = None
            if batch.seen_BQK is not None:
                mask = _as_mask(torch.from_numpy(batch.seen_BQK)[:, None], device, dtype)
            elif batch.is_masked:
                mask = mask_QK[-num_queries:, -num_keys:]
            batches.append(_Batch(num_nodes, num_queries, num_keys, mask))
        queries_T = np.concatenate(numbers)[np.concatenate(columns).argsort()]
        queries_M, keys_M = (
            np.concatenate([each.ravel() for each in columns_of_row])
            for columns_of_row in (
                [batch.queries_BQ for batch in of_row],
                [batch.keys_BK for batch in of_row],
            )
        )
        on_device = (
            to_device(torch.from_numpy(each), device) for each in (queries_M, keys_M, queries_T)
        )
        return cls(tuple(batches), tuple(one.lengths_B for one in of_row), *on_device)

    def attend(self, q_TAD: Tensor, k_THD: Tensor, v_THD: Tensor, scaling: float | None) -> Tensor:
        """Returns the attention `[T, A, D]` of a row's queries to its keys and values."""
        # All batches are gathered at once: the gradient of each gathering has the size of the row.
        queries = self.by_query(q_TAD)
        keys, values = (
            self._gathered(row_THD, self.keys_M, [one.num_keys for one in self.batches])
            for row_THD in (k_THD, v_THD)
        )
        done: list[Tensor] = []
        for batch, q_BAQD, k_BHKD, v_BHKD in zip(self.batches, queries, keys, values, strict=True):
            if q_TAD.is_cuda:  # torch's CUDA kernels with a mask need A heads of keys and values
                repeats = q_TAD.shape[1] // k_THD.shape[1]
                k_BHKD, v_BHKD = (each.repeat_interleave(repeats, 1) for each in (k_BHKD, v_BHKD))
            out_BAQD = scaled_dot_product_attention(
                q_BAQD,
                k_BHKD,
                v_BHKD,
                attn_mask=batch.mask,
                is_causal=batch.mask is None,
                scale=scaling,
                enable_gqa=not q_TAD.is_cuda,
            )
            done.append(out_BAQD)
        return self.in_order(done)

    def by_query(self, row_TAD: Tensor) -> list[Tensor]:
        """Returns what a row has for each query of each batch `[B, A, Q, D]`."""
        return self._gathered(row_TAD, self.queries_M, [one.num_queries for one in self.batches])

    def in_order(self, of_batches: Sequence[Tensor]) -> Tensor:
        """Returns what batches have for each query `[B, A, Q, D]` in the order of the row."""
        parts = [part.transpose(1, 2).flatten(0, 1) for part in of_batches]
        return torch.cat(parts).index_select(0, self.queries_T)

    def _gathered(self, row_THD: Tensor, columns_M: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Returns each batch's `[B, H, length, D]` of the row's columns.

        On a GPU the gradient of `index_select` adds up in another order each time, so indexing is
        used there; on a CPU the gradient of indexing is slow.
        """
        chosen = row_THD[columns_M] if row_THD.is_cuda else row_THD.index_select(0, columns_M)
        sizes = [
            batch.num_nodes * length for batch, length in zip(self.batches, lengths, strict=True)
        ]
        return [
            part.unflatten(0, (-1, length)).transpose(1, 2)
            for part, length in zip(chosen.split(sizes), lengths, strict=True)
        ]


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True)
class CascadeAttention:
    """Attention on a CPU in which each node's keys are read where they are: the tokens of a node
    attend to the node by `own`, and all tokens below it attend to it in one call, without a mask.
    What a token gets from its node and from each ancestor is added up by the softmaxes' sums
    (Hydragen, arXiv:2402.05099). The kernel's backward pass gives the gradients of each part if it
    gets the result and the sum of all parts. `parents`: see `parents_of`."""

    own: DenseAttention
    parents: tuple[tuple[slice, slice], ...]

    @property
    def keys_M(self) -> Tensor:
        return self.own.keys_M

    def attend(self, q_TAD: Tensor, k_THD: Tensor, v_THD: Tensor, scaling: float | None) -> Tensor:
        """As `DenseAttention.attend`."""
        # The kernel takes the elements of a head as neighbours in memory, without a check.
        qkv = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_TAD, k_THD, v_THD))
        return cast(Tensor, _Cascade.apply(self, scaling, *qkv))

    def parts(
        self, below: Sequence[Tensor], keys: Sequence[Tensor]
    ) -> Iterator[tuple[slice, slice, list[Tensor]]]:
        """Yields the two slices of each of `parents`, with the parts `[1, A, N, D]` of the rows of
        queries `below` it and of its own rows of `keys`."""
        for own, after in self.parents:
            cut = [row[after] for row in below] + [row[own] for row in keys]
            yield own, after, [part.transpose(0, 1)[None] for part in cut]


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        cascade: CascadeAttention,
        scaling: float | None,
        q_TAD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
    ) -> Tensor:
        own = cascade.own
        outs, sums = zip(
            *(
                _flash(*qkv, 0.0, batch.mask is None, attn_mask=batch.mask, scale=scaling)
                for batch, *qkv in zip(
                    own.batches, *map(own.by_query, (q_TAD, k_THD, v_THD)), strict=True
                )
            ),
            strict=True,
        )
        out_TAD, sum_TA = own.in_order(outs), own.in_order(sums)
        for _, below, qkv in cascade.parts([q_TAD], [k_THD, v_THD]):
            out, log_sum = (part[0].transpose(0, 1) for part in _flash(*qkv, scale=scaling))
            total = torch.logaddexp(sum_TA[below], log_sum)
            out_TAD[below] *= (sum_TA[below] - total).exp_()[..., None]
            out_TAD[below] += out * (log_sum - total).exp_()[..., None]
            sum_TA[below] = total
        ctx.cascade, ctx.scaling = cascade, scaling
        ctx.save_for_backward(q_TAD, k_THD, v_THD, out_TAD, sum_TA)
        return out_TAD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TAD: Tensor) -> tuple[Any, ...]:  # pyright: ignore
        cascade, scale, saved = ctx.cascade, ctx.scaling, ctx.saved_tensors
        q_TAD, k_THD, v_THD, out_TAD, sum_TA = saved
        dq_TAD, dk_THD, dv_THD = _own_gradients(cascade.own, scale, gradient_TAD, *saved)
        queries = [gradient_TAD, q_TAD, out_TAD, sum_TA]
        for node, below, parts in cascade.parts(queries, [k_THD, v_THD]):
            gradient, q, out, log_sum, k, v = parts
            of_part = _flash_backward(
                gradient, q, k, v, out, log_sum, 0.0, False, attn_mask=None, scale=scale
            )
            dq, dk, dv = (one[0].transpose(0, 1) for one in of_part)
            dq_TAD[below] += dq
            dk_THD[node] += dk
            dv_THD[node] += dv
        return None, None, dq_TAD, dk_THD, dv_THD


def _own_gradients(
    own: DenseAttention, scale: float | None, gradient_TAD: Tensor, *saved: Tensor
) -> Iterator[Tensor]:
    """Returns the gradients of the row's queries, keys and values by what each token gets from its
    own node."""
    found: list[Any] = []
    rows = [own.by_query(row) for row in (gradient_TAD, *saved)]
    for batch, lengths, gradient, *of_batch in zip(own.batches, own.lengths, *rows, strict=True):
        for number, length in enumerate(lengths):
            gradient[number, :, length:] = 0.0  # padding repeats the last query
        causal, mask = batch.mask is None, batch.mask
        found.append(_flash_backward(gradient, *of_batch, 0.0, causal, attn_mask=mask, scale=scale))
    return map(own.in_order, zip(*found, strict=True))


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
    return _as_mask(seen_QK, device, dtype)


def _as_mask(seen: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if device.type != "cpu":
        return to_device(seen, device)
    # In the queries' dtype: torch makes a copy of a boolean part, and keeps it for backward.
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)


# --- the attention function -----------------------------------------------------------------------


NAME = "hone_forest"

UNSUPPORTED = ("softcap", "s_aux", "position_bias", "indices", "block_indices")
"""Arguments that some models pass to their attention, and that this attention cannot follow."""

LAYER_TYPE_KEYS = ("layer_types", "layers_block_type", "block_types")
"""Keys of transformers' configurations that list the type of each layer."""

LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
"""Types of layers that this attention serves, by their names in transformers' configurations."""


@dataclass(frozen=True)
class RaggedPart:
    """Neighbouring nodes of a row, with the columns from `start` to before `end`, for one call of
    torch's kernel for sequences of unequal length. `keys_K` are the columns of their keys: the
    ancestors' and the node's own, node by node. Node i has the queries from `query_offsets[i]` to
    before `query_offsets[i + 1]` of the part, and the keys alike."""

    start: int
    end: int
    keys_K: Tensor
    query_offsets: Tensor
    key_offsets: Tensor
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, forest: Forest, nodes: Sequence[Node], device: torch.device) -> RaggedPart:
        keys = [np.concatenate([forest.columns_above(node), node.columns]) for node in nodes]
        num_queries = torch.tensor([node.length for node in nodes])
        num_keys = torch.tensor([len(of_node) for of_node in keys])
        query_offsets, key_offsets = (
            to_device(torch.cat([torch.zeros(1, dtype=torch.long), num.cumsum(0)]).int(), device)
            for num in (num_queries, num_keys)
        )
        return cls(
            start=nodes[0].start,
            end=nodes[-1].start + nodes[-1].length,
            keys_K=to_device(torch.from_numpy(np.concatenate(keys)), device),
            query_offsets=query_offsets,
            key_offsets=key_offsets,
            max_queries=int(num_queries.max()),
            max_keys=int(num_keys.max()),
        )

    def attend(
        self,
        q_TAD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        """Returns the attention `[end - start, A, D]` of the part's queries, given the row's
        queries, keys and values. Its gradient has the same bits each time."""
        options: dict[str, Any] = {"scale": scaling}
        options["window_size"] = (-1 if window is None else window - 1, 0)
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 lacks it
            options["enable_gqa"] = q_TAD.shape[1] != k_THD.shape[1]
        q_QAD, k_KHD, v_KHD = _OrderedGradients.inputs(
            q_TAD[self.start : self.end], k_THD[self.keys_K], v_THD[self.keys_K]
        )
        attended = varlen_attn(
            q_QAD,
            k_KHD,
            v_KHD,
            self.query_offsets,
            self.key_offsets,
            self.max_queries,
            self.max_keys,
            **options,
        )
        assert isinstance(attended, Tensor)
        return _OrderedGradients.output(attended)


@dataclass(frozen=True)
class RaggedAttention:
    """A row's attention on a GPU in 16 bits, one part after the other, so that the kernel's
    backward pass takes the memory of one part at a time."""

    parts: tuple[RaggedPart, ...]

    @classmethod
    def of(cls, forest: Forest, device: torch.device) -> RaggedAttention:
        return cls(tuple(RaggedPart.of(forest, nodes, device) for nodes in ragged_parts(forest)))

    @property
    def num_keys(self) -> int:
        return sum(len(part.keys_K) for part in self.parts)


def ragged_parts(forest: Forest) -> list[list[Node]]:
    """Returns the nodes in order, in parts for one call of the kernel each. A part has at most
    `KERNEL_KEYS` keys, and `KERNEL_TOKENS` tokens of queries with `KERNEL_PADDING` more for each
    node, unless it is a single node."""
    parts: list[list[Node]] = []
    tokens = keys = 0
    for node in forest.nodes:
        tokens += node.length + KERNEL_PADDING
        keys += node.depth + node.length
        if not parts or tokens > KERNEL_TOKENS or keys > KERNEL_KEYS:
            parts.append([])
            tokens, keys = node.length + KERNEL_PADDING, node.depth + node.length
        parts[-1].append(node)
    return parts


class _OrderedGradients(torch.autograd.Function):
    """Turns torch's deterministic algorithms on for the backward pass of the function between
    `inputs` and `output`: the kernel for sequences of unequal length otherwise adds the gradients
    of queries with atomics, in another order each time. The setting is global and makes other
    functions fail or slower, so it is turned off again before they run: autograd runs the ready
    node that was made last, so no other node runs between the two."""

    @staticmethod
    def inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
        return cast(tuple[Tensor, ...], _OrderedGradients.apply(False, *tensors))

    @staticmethod
    def output(tensor: Tensor) -> Tensor:
        (same,) = cast(tuple[Tensor], _OrderedGradients.apply(True, tensor))
        return same

    @staticmethod
    def forward(ctx: Any, begins: bool, *tensors: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        ctx.begins = begins
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:  # pyright: ignore
        _add_in_order(on=ctx.begins)
        return None, *gradients


def _add_in_order(*, on: bool) -> None:
    torch.use_deterministic_algorithms(on)
    filling: Any = deterministic
    filling.fill_uninitialized_memory = not on  # it would fill the kernel's buffers with NaN


@dataclass(frozen=True)
class ForestAttention:
    """A forest, and the data that attention over it needs on a device, computed when a layer first
    needs it, by sliding window."""

    forest: Forest
    device: torch.device
    is_recomputed: bool = False
    """The model computes each whole layer again in the backward pass."""
    _dense: dict[tuple[int | None, bool], DenseAttention | CascadeAttention] = field(
        default_factory=dict[tuple[int | None, bool], DenseAttention | CascadeAttention]
    )
    _ragged: dict[int | None, RaggedAttention] = field(
        default_factory=dict[int | None, RaggedAttention]
    )

    def to(self, device: torch.device) -> ForestAttention:
        """Returns a copy without cached data, also for the same device: otherwise the data of a
        pass would be kept for a whole step, with its micro-batch."""
        return ForestAttention(self.forest, device, self.is_recomputed)

    @property
    def windows(self) -> set[int | None]:
        """The sliding windows that layers used; None: a layer without a window."""
        return {*(window for window, _ in self._dense), *self._ragged}

    def attended(
        self,
        compute: Callable[..., Tensor],
        num_keys: int,
        q_TAD: Tensor,
        *others: Any,
        is_part: bool = False,
    ) -> Tensor:
        """Returns `compute(q_TAD, *others)`, of a row for which `num_keys` keys are gathered, at
        once or in parts."""
        kept = num_keys <= MAX_KEPT_KEYS * len(q_TAD) or (self.is_recomputed and not is_part)
        if kept or not torch.is_grad_enabled():
            return compute(q_TAD, *others)
        return checkpoint(compute, q_TAD, *others, use_reentrant=False, preserve_rng_state=False)

    def dense(
        self, window: int | None, dtype: torch.dtype, *, same_sizes: bool = True
    ) -> DenseAttention | CascadeAttention:
        """Returns the row's attention for a window and for queries of a dtype. `same_sizes`: heads
        of values have the size of heads of keys, as the kernel for CPUs needs."""
        key = window, same_sizes
        if key not in self._dense:
            may_cascade = window is None and self.device.type == "cpu" and same_sizes
            parents = parents_of(self.forest) if may_cascade else []
            batches = batches_of(self.forest, window, own_only=bool(parents))
            dense = DenseAttention.of(batches, window, self.device, dtype)
            self._dense[key] = CascadeAttention(dense, tuple(parents)) if parents else dense
        return self._dense[key]

    def ragged(self, window: int | None) -> RaggedAttention:
        if window not in self._ragged:
            self._ragged[window] = RaggedAttention.of(self.forest, self.device)
        return self._ragged[window]


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    forest: ForestAttention | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Returns the attention `[1, T, A, D]` of queries `[1, A, T, D]` to keys and values
    `[1, H, T, D]`, where H divides A, as transformers calls an attention function. Raises
    ValueError if a layer needs another kind of attention."""
    unsupported = [repr(name) for name in UNSUPPORTED if others.get(name) is not None]
    if attention_mask is not None:
        unsupported.append("a mask")
    if dropout:
        unsupported.append("dropout")
    if not (getattr(module, "is_causal", True) and others.get("is_causal") in (None, True)):
        unsupported.append("no causal order")
    if forest is None:
        unsupported.append("no forest")
    if unsupported or forest is None:
        name = type(module).__name__
        raise ValueError(
            f"{name} calls its attention with {', '.join(unsupported)}; expected causal attention "
            "over a forest, without a mask or dropout"
        )
    q_TAD, k_THD, v_THD = (each[0].transpose(0, 1) for each in (query, key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        _add_in_order(on=False)  # a backward pass that ran out of memory may have left it on
        ragged = forest.ragged(sliding_window)
        arguments = ragged.num_keys, q_TAD, k_THD, v_THD, scaling, sliding_window
        is_part = len(ragged.parts) > 1
        outs = [forest.attended(part.attend, *arguments, is_part=is_part) for part in ragged.parts]
        out_TAD = torch.cat(outs) if is_part else outs[0]  # `cat` copies a single one too
    else:
        dtype = query.dtype
        if dtype.itemsize == 2 and query.device.type == "cpu":
            # the kernel's backward pass in 16 bits would take 2 to 10 times as long
            dtype = torch.float32
        same_sizes = query.shape[-1] == value.shape[-1]
        dense = forest.dense(sliding_window, dtype, same_sizes=same_sizes)
        in_dtype = (each.to(dtype) for each in (q_TAD, k_THD, v_THD))
        out_TAD = forest.attended(dense.attend, len(dense.keys_M), *in_dtype, scaling)
    return out_TAD.to(query.dtype)[None], None


AttentionInterface.register(NAME, attend)


def is_used_by(model: Any) -> bool:
    return getattr(model.config.get_text_config(), "_attn_implementation", None) == NAME


def why_not(config: Any, setting: str = "auto") -> str | None:
    """Returns the property of a model's configuration that this attention cannot compute; None if
    there is none. `setting` is the job's `memory.attention`."""
    if getattr(config, "attn_logit_softcapping", None):
        return "caps the logits of its attention (attn_logit_softcapping)"
    implementation = getattr(config, "_attn_implementation", None)
    if implementation != "sdpa":
        by = "" if setting == "auto" else " by memory.attention"
        return (
            f'has the attention {implementation!r}{by}, and only "sdpa" is computed over a forest'
        )
    lists = (getattr(config, key, None) or () for key in LAYER_TYPE_KEYS)
    listed = {layer_type for types in lists for layer_type in types if isinstance(layer_type, str)}
    if others := listed - LAYER_TYPES:
        return f"has layers of another kind: {', '.join(map(repr, sorted(others)))}"
    if getattr(config, "attention_chunk_size", None):
        return "attends within chunks (attention_chunk_size)"
    return None


def passes_its_windows(model: Any, forest: ForestAttention | None) -> bool:
    """Returns whether the model's layers used the forest's attention with the sliding windows of
    the model's configuration. The sequences that a model is checked with are shorter than a window,
    so their hidden states do not show it."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"]
    used = forest.windows if forest else set[int | None]()
    return used == {window if kind == "sliding_attention" else None for kind in types}


def use(model: Any) -> None:
    """Gives a model this attention. From then on each of its passes needs a forest."""
    model.set_attn_implementation(NAME)


def restore(model: Any) -> None:
    """Gives a model torch's attention back: `why_not` accepts no model that had another."""
    model.set_attn_implementation("sdpa")
