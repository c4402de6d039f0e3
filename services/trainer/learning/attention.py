"""Attention over a forest (`forest.py`): a token attends to itself, to the tokens before it in its
node, and to all tokens of the node's ancestors.

It is registered in transformers as the attention function `NAME`, so a model's code does not
change. Keys and values are gathered from the node and its ancestors. On a GPU in 16 bits all nodes
are one call of torch's kernel for sequences of unequal length, without a mask or padding;
everywhere else they are dense batches (`dense_attention.py`).

A packed row is a forest with one node per sequence, so the same function serves it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from services.trainer.learning.dense_attention import DenseAttention
from services.trainer.learning.forest import Forest
from services.trainer.learning.head import to_device

NAME = "hone_forest"

UNSUPPORTED = ("softcap", "s_aux", "position_bias", "indices", "block_indices")
"""Arguments that some models pass to their attention, and that this attention cannot follow."""

LAYER_TYPE_KEYS = ("layer_types", "layers_block_type", "block_types")
"""Keys of transformers' configurations that list the type of each layer."""

LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
"""Types of layers that this attention serves, by their names in transformers' configurations."""


class AttentionUnsupported(Exception):
    """A model needs a kind of attention that cannot be computed over a forest."""


@dataclass(frozen=True)
class RaggedAttention:
    """A row's nodes for torch's kernel for sequences of unequal length. The queries are the row's
    columns in order. `keys_K` are the columns of all nodes' keys: the ancestors' and the node's
    own, node by node. Node i has the queries from `query_offsets[i]` to before
    `query_offsets[i + 1]`, and the keys alike."""

    keys_K: Tensor
    query_offsets: Tensor
    key_offsets: Tensor
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, forest: Forest, device: torch.device) -> RaggedAttention:
        keys = [
            torch.cat(
                [torch.from_numpy(forest.columns_above(node)), torch.from_numpy(node.columns)]
            )
            for node in forest.nodes
        ]
        num_queries = torch.tensor([node.length for node in forest.nodes])
        num_keys = torch.tensor([len(of_node) for of_node in keys])
        query_offsets, key_offsets = (
            to_device(torch.cat([torch.zeros(1, dtype=torch.long), num.cumsum(0)]).int(), device)
            for num in (num_queries, num_keys)
        )
        return cls(
            keys_K=to_device(torch.cat(keys), device),
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
        """Returns the attention `[T, A, D]` of a row's queries to its keys and values."""
        attended = varlen_attn(
            q_TAD,
            k_THD[self.keys_K],
            v_THD[self.keys_K],
            self.query_offsets,
            self.key_offsets,
            self.max_queries,
            self.max_keys,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=q_TAD.shape[1] != k_THD.shape[1],
        )
        assert isinstance(attended, Tensor)
        return attended


@dataclass(frozen=True)
class ForestAttention:
    """A forest, and what attention over it needs on a device, made when a layer first asks for it,
    by sliding window."""

    forest: Forest
    device: torch.device
    _dense: dict[int | None, DenseAttention] = field(
        default_factory=dict[int | None, DenseAttention]
    )
    _ragged: dict[int | None, RaggedAttention] = field(
        default_factory=dict[int | None, RaggedAttention]
    )

    def to(self, device: torch.device) -> ForestAttention:
        """Returns one that has made nothing yet, also for the same device: what is made for a pass
        would be kept for a whole step, as its micro-batch is."""
        return ForestAttention(self.forest, device)

    @property
    def windows(self) -> set[int | None]:
        """The sliding windows that layers asked for; None: a layer without a window."""
        return {*self._dense, *self._ragged}

    def dense(self, window: int | None, dtype: torch.dtype) -> DenseAttention:
        """Returns the row's attention for a window and for queries of a dtype."""
        if window not in self._dense:
            self._dense[window] = DenseAttention.of(self.forest, window, self.device, dtype)
        return self._dense[window]

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
    AttentionUnsupported if a layer needs another kind of attention."""
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
        raise AttentionUnsupported(
            f"{name} calls its attention with {', '.join(unsupported)}; expected causal attention "
            "over a forest, without a mask or dropout"
        )
    q_TAD, k_THD, v_THD = (each[0].transpose(0, 1) for each in (query, key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        ragged = forest.ragged(sliding_window)
        out_TAD = ragged.attend(q_TAD, k_THD, v_THD, scaling, sliding_window)
    else:
        out_TAD = forest.dense(sliding_window, query.dtype).attend(q_TAD, k_THD, v_THD, scaling)
    return out_TAD[None], None


AttentionInterface.register(NAME, attend)


def is_used_by(model: Any) -> bool:
    return getattr(model.config.get_text_config(), "_attn_implementation", None) == NAME


def why_not(config: Any, asked: str = "auto") -> str | None:
    """Returns what a model's configuration asks for that this attention cannot compute; None if
    nothing. `asked` is the job's `memory.attention`."""
    if getattr(config, "attn_logit_softcapping", None):
        return "caps the logits of its attention (attn_logit_softcapping)"
    implementation = getattr(config, "_attn_implementation", None)
    if implementation != "sdpa":
        by = "" if asked == "auto" else " by memory.attention"
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
    """Returns whether the model's layers asked the forest's attention for the sliding windows of
    the model's configuration. The sequences that a model is checked with are shorter than a window,
    so their hidden states do not show it."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"]
    asked = forest.windows if forest else set[int | None]()
    return asked == {window if kind == "sliding_attention" else None for kind in types}


def use(model: Any) -> None:
    """Gives a model this attention. From then on each of its passes needs a forest."""
    model.set_attn_implementation(NAME)


def restore(model: Any) -> None:
    """Gives a model torch's attention back: `why_not` accepts no model that had another."""
    model.set_attn_implementation("sdpa")
