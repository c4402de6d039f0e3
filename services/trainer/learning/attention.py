"""Attention over a forest (`forest.py`): each token sees its own node up to itself, and the nodes
between its own and the root.

It is an attention function of transformers, under the name `NAME`, so that a model needs no change.
Keys and values are gathered along the path to the root. On a CPU like siblings are a batch of
scaled dot products with a mask that they share. On a GPU all nodes are one call of torch's own
kernel for sequences of unequal length, without a mask and without padding.

Every token also sees all positions before its own where the forest is one node for each sequence:
the same function serves packed rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from services.trainer.learning.forest import Call, Forest, calls
from services.trainer.learning.head import sent

NAME = "hone_forest"

OF_OTHERS = ("softcap", "s_aux", "position_bias", "indices", "block_indices")
"""What some models give their attention, which this one does not know."""

LISTS_OF_LAYERS = ("layer_types", "layers_block_type", "block_types")
LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
"""Layers that this attention serves, by their names in transformers' configurations."""


class CannotShare(Exception):
    """A model asked for attention of a kind that is not computed over a forest."""


@dataclass(frozen=True)
class _Batch:
    """A call's columns as tensors. `mask_QK` is None where queries see keys as in a sequence by
    itself: causally, as many of the one as of the other."""

    queries_NQ: Tensor
    keys_NK: Tensor
    mask_QK: Tensor | None


@dataclass(frozen=True)
class _Dense:
    """The attention of a row as dense batches. Column t of the row is number `outputs_T[t]` of
    their queries, one batch after the other."""

    batches: tuple[_Batch, ...]
    outputs_T: Tensor


@dataclass(frozen=True)
class _Ragged:
    """The attention of a row as pairs of queries and keys of unequal length. Queries are the row's
    columns in order; `keys_K` are the columns of all pairs' keys."""

    keys_K: Tensor
    query_bounds: Tensor
    key_bounds: Tensor
    longest: tuple[int, int]


@dataclass(frozen=True)
class ForestAttention:
    """What attention over one forest needs, made when a layer first asks, once for each sliding
    window."""

    forest: Forest
    device: torch.device
    _made: dict[int | None, Any] = field(default_factory=dict[int | None, Any])

    def to(self, device: torch.device) -> ForestAttention:
        """Returns one that has made nothing yet, also for the same device: what is made for a pass
        would be kept for a whole step, as its micro-batch is."""
        return ForestAttention(self.forest, device)

    @property
    def windows(self) -> set[int | None]:
        """The windows that layers asked for."""
        return set(self._made)

    def dense(self, window: int | None, dtype: torch.dtype) -> _Dense:
        """Returns the row's attention for a window, and for queries of a dtype."""
        if window not in self._made:
            of_row = calls(self.forest, window)
            self._made[window] = _dense(of_row, window, self.device, dtype)
        return self._made[window]

    def ragged(self, window: int | None) -> _Ragged:
        if window not in self._made:
            self._made[window] = _ragged(self.forest, self.device)
        return self._made[window]


def _dense(
    of_row: list[Call], window: int | None, device: torch.device, dtype: torch.dtype
) -> _Dense:
    batches: list[_Batch] = []
    columns, outputs, num_queries = [], [], 0
    mask_QK = _mask([call for call in of_row if not _is_plain(call, window)], window, device, dtype)
    for call in of_row:
        (num_nodes, length), num_keys = call.queries_NQ.shape, call.keys_NK.shape[1]
        real_NQ = np.arange(length) < np.array(call.lengths_N)[:, None]
        columns.append(call.queries_NQ[real_NQ])
        outputs.append(num_queries + np.flatnonzero(real_NQ))
        num_queries += num_nodes * length
        batches.append(
            _Batch(
                queries_NQ=sent(torch.from_numpy(call.queries_NQ), device),
                keys_NK=sent(torch.from_numpy(call.keys_NK), device),
                mask_QK=None if _is_plain(call, window) else mask_QK[-length:, -num_keys:],
            )
        )
    outputs_T = np.concatenate(outputs)[np.concatenate(columns).argsort()]
    return _Dense(tuple(batches), sent(torch.from_numpy(outputs_T), device))


def _is_plain(call: Call, window: int | None) -> bool:
    """Whether queries see keys as in a sequence by itself."""
    length = call.queries_NQ.shape[1]
    return length == call.keys_NK.shape[1] and (window is None or window >= length)


def _mask(
    of_row: list[Call], window: int | None, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Returns which keys the queries of the largest call see `[Q, K]`. The last query is at the
    last key, so each call's mask is the lower right part of it, and all take no more memory."""
    num_queries = max((call.queries_NQ.shape[1] for call in of_row), default=0)
    num_keys = max((call.keys_NK.shape[1] for call in of_row), default=0)
    behind_QK = (
        torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)[None]
    )
    seen_QK = (behind_QK >= 0) if window is None else (behind_QK >= 0) & (behind_QK < window)
    if device.type != "cpu":
        return sent(seen_QK, device)
    # In the queries' dtype: else torch makes one of each part, and keeps it for the backward pass.
    return torch.zeros(seen_QK.shape, dtype=dtype).masked_fill_(~seen_QK, -torch.inf)


def _ragged(forest: Forest, device: torch.device) -> _Ragged:
    keys = [
        torch.cat([torch.from_numpy(forest.columns_before(node)), torch.from_numpy(node.columns)])
        for node in forest.nodes
    ]
    lengths = (
        torch.tensor([node.length for node in forest.nodes]),
        torch.tensor([len(of_node) for of_node in keys]),
    )
    query_bounds, key_bounds = (
        sent(torch.cat([torch.zeros(1, dtype=torch.long), each.cumsum(0)]).int(), device)
        for each in lengths
    )
    longest = (int(lengths[0].max()), int(lengths[1].max()))
    return _Ragged(sent(torch.cat(keys), device), query_bounds, key_bounds, longest)


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
    `[1, H, T, D]`, H dividing A, as transformers asks for it. Raises CannotShare for attention of
    another kind."""
    unknown = [repr(name) for name in OF_OTHERS if others.get(name) is not None]
    if attention_mask is not None:
        unknown.append("a mask")
    if dropout:
        unknown.append("a dropout")
    if not (getattr(module, "is_causal", True) and others.get("is_causal") in (None, True)):
        unknown.append("both directions")
    if forest is None:
        unknown.append("no forest")
    if unknown or forest is None:
        raise CannotShare(f"{type(module).__name__} gives its attention {', '.join(unknown)}")
    q_TAD, k_THD, v_THD = (each[0].transpose(0, 1) for each in (query, key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        out_TAD = _attend_ragged(
            q_TAD, k_THD, v_THD, forest.ragged(sliding_window), scaling, sliding_window
        )
    else:
        out_TAD = _attend_dense(
            q_TAD, k_THD, v_THD, forest.dense(sliding_window, query.dtype), scaling
        )
    return out_TAD[None], None


def _attend_dense(
    q_TAD: Tensor, k_THD: Tensor, v_THD: Tensor, row: _Dense, scaling: float | None
) -> Tensor:
    done: list[Tensor] = []
    for batch in row.batches:
        q_NAQD = _at(q_TAD, batch.queries_NQ)
        k_NHKD, v_NHKD = _at(k_THD, batch.keys_NK), _at(v_THD, batch.keys_NK)
        if q_TAD.is_cuda:  # the kernels there that take a mask want as many keys as queries
            repeats = q_TAD.shape[1] // k_THD.shape[1]
            k_NHKD, v_NHKD = (each.repeat_interleave(repeats, 1) for each in (k_NHKD, v_NHKD))
        out_NAQD = scaled_dot_product_attention(
            q_NAQD,
            k_NHKD,
            v_NHKD,
            attn_mask=batch.mask_QK,
            is_causal=batch.mask_QK is None,
            scale=scaling,
            enable_gqa=not q_TAD.is_cuda,
        )
        done.append(out_NAQD.transpose(1, 2).flatten(0, 1))
    return torch.cat(done).index_select(0, row.outputs_T)


def _at(each_THD: Tensor, columns_NQ: Tensor) -> Tensor:
    """Returns the row's heads at the columns, `[N, H, Q, D]`. On a GPU the gradient of
    `index_select` is added up in another order each time; on a CPU the gradient of an index is
    slow."""
    flat = columns_NQ.flatten()
    chosen = each_THD[flat] if each_THD.is_cuda else each_THD.index_select(0, flat)
    return chosen.unflatten(0, columns_NQ.shape).transpose(1, 2)


def _attend_ragged(
    q_TAD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    row: _Ragged,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    attended = varlen_attn(
        q_TAD,
        k_THD[row.keys_K],
        v_THD[row.keys_K],
        row.query_bounds,
        row.key_bounds,
        *row.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q_TAD.shape[1] != k_THD.shape[1],
    )
    assert isinstance(attended, Tensor)
    return attended


AttentionInterface.register(NAME, attend)


def is_used_by(model: Any) -> bool:
    return getattr(model.config.get_text_config(), "_attn_implementation", None) == NAME


def why_not(config: Any) -> str | None:
    """Returns what in a model's configuration this attention cannot serve; None if nothing is."""
    implementation = getattr(config, "_attn_implementation", None)
    if implementation != "sdpa":
        return f'has the attention {implementation!r}, and only "sdpa" is computed over a forest'
    listed = (getattr(config, key, None) or () for key in LISTS_OF_LAYERS)
    others = {kind for kinds in listed for kind in kinds if isinstance(kind, str)} - LAYER_TYPES
    if others:
        return f"has layers of another kind: {', '.join(map(repr, sorted(others)))}"
    if getattr(config, "attention_chunk_size", None):
        return "attends within chunks (attention_chunk_size)"
    return None


def has_its_windows(model: Any, forest: ForestAttention | None) -> bool:
    """Whether the model's layers asked the forest's attention for the windows that its
    configuration says. A window is longer than what a model is tried with, so no state shows it."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"]
    asked = forest.windows if forest else set[int | None]()
    return asked == {window if kind == "sliding_attention" else None for kind in types}


def use(model: Any) -> None:
    """Gives a model this attention, which needs a forest from then on."""
    model.set_attn_implementation(NAME)


def leave(model: Any) -> None:
    """Gives a model torch's attention again, the only one that it can have had."""
    model.set_attn_implementation("sdpa")
