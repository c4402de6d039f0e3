"""The output head, scored tile by tile: log-probs and entropies of target tokens, without a whole
`[tokens, vocabulary]` tensor.

For hidden states h_n, head weight W (and bias b), temperature T and target t_n, with logits x_nv =
z_nv / T, z_nv = h_n . W_v + b_v, or c tanh(z_nv / c) / T where a model caps them (`LogitRule`):

    logprob_n = x_n,t - log sum_v e^x_nv
    entropy_n = log sum_v e^x_nv - sum_v p_nv x_nv,  p_nv = softmax(x_n)_v

The sums run over tiles of `[chunk of tokens, part of the vocabulary]`, with a running maximum (the
online softmax of arXiv 1805.02867). The backward pass computes each tile of logits again and turns
it in place into the gradient of the logits,

    d logprob_n / d x_nv = 1[v = t_n] - p_nv,    d x_nv / d z_nv = (1 - (T x_nv / c)^2) / T

and adds it up to the gradients of h, W and b. So beyond its inputs and gradients a pass needs only
a few tiles, for any vocabulary. Each logit is computed twice and stays in cache while it is used.
The entropy has no gradient.

Logits are products of the weights as they are, summed and kept in float32 at least: a logit of 30
rounded to bfloat16 is off by up to 0.06 nats. vLLM rounds its logits to the model's dtype before
the softmax, so a bfloat16 model's log-probs differ by the sampler's rounding. vLLM's `head_dtype =
"float32"` avoids that with a slower head.

If the sampler drew from a part of the vocabulary only (top-p, top-k), `kept` lists its tokens. The
other tokens' logits are set below all others, so log-probs, entropies and gradients belong to the
sampled distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

TILE_LOGITS = {"cpu": 1 << 22, "gpu": 1 << 26}
"""Logits of one tile: on a CPU they fit its caches (16 MiB in float32), on a GPU they keep its
matrix units busy (256 MiB)."""

LOWEST = -1e30
"""Below every logit, and finite, so that a difference of two is never NaN."""

CAP = "final_logit_softcapping"

MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Configuration keys with the factor or divisor of logits, or of the head's hidden states."""

MULTIPLIES_BY_DIVISOR = "hyperclovax"
"""The `model_type` that multiplies by a key of `DIVISORS`."""


@dataclass(frozen=True)
class CandidateTokens:
    """The tokens that could be sampled at each place: `ids_K[k]` is a candidate for token
    `tokens_K[k]` (ascending). Where a token is not in `tokens_K`, any of the vocabulary could be
    sampled. Token n's candidates are from `firsts[n]` to before `firsts[n + 1]`; these numbers are
    on the host, so that `chunk` does not wait for a GPU.
    """

    ids_K: Tensor
    tokens_K: Tensor
    firsts: tuple[int, ...]

    @classmethod
    def of(cls, ids: Sequence[int] | NDArray[Any], counts: Sequence[int]) -> CandidateTokens:
        """Returns the candidates: token n has the next `counts[n]` of `ids`; 0: any token."""
        counts_N = torch.tensor(counts, dtype=torch.long)
        return cls(
            ids_K=torch.as_tensor(ids, dtype=torch.long),
            tokens_K=torch.repeat_interleave(torch.arange(len(counts_N)), counts_N),
            firsts=tuple(accumulate(counts, initial=0)),
        )

    def to(self, device: torch.device) -> CandidateTokens:
        return CandidateTokens(
            to_device(self.ids_K, device), to_device(self.tokens_K, device), self.firsts
        )

    def chunk(self, start: int, end: int) -> CandidateTokens:
        """Returns the part of the tokens `start` to before `end`, counted from `start`."""
        first, last = self.firsts[start], self.firsts[min(end, len(self.firsts) - 1)]
        firsts = tuple(each - first for each in self.firsts[start : end + 1])
        return CandidateTokens(self.ids_K[first:last], self.tokens_K[first:last] - start, firsts)

    def apply(self, logits_CV: Tensor, part: slice) -> None:
        """Sets a tile's logits of tokens that could not be sampled to `LOWEST`, in place."""
        restricted_C = torch.zeros(len(logits_CV), dtype=torch.bool, device=logits_CV.device)
        restricted_C[self.tokens_K] = True
        width = logits_CV.shape[1]
        # A candidate outside of this part is written to an extra column, which is dropped below.
        out_CV = restricted_C[:, None].repeat(1, width + 1)
        columns_K = self.ids_K - part.start
        columns_K = torch.where((columns_K >= 0) & (columns_K < width), columns_K, width)
        out_CV[self.tokens_K, columns_K] = False
        logits_CV.masked_fill_(out_CV[:, :width], LOWEST)


Kept = CandidateTokens
"""The name by which measurement scripts outside the repository import it."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a host tensor on the device. A GPU copies it from pinned memory, so that the host
    does not wait for the copy."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class ScoringHead(nn.Linear):
    """A linear output head. With targets it returns their log-probs and entropies instead of
    logits.

    Scoring is the module's own forward, and not a function that reads its weight, because ZeRO-3
    partitions the weight and gathers it only around the module's forward and backward pass.
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (without targets it is nn.Linear's)
        self,
        input: Tensor,
        targets_N: Tensor | None = None,
        temperature: float = 1.0,
        chunk_tokens: int = 1024,
        kept: CandidateTokens | None = None,
        cap: float | None = None,
    ) -> Any:
        """Returns the head's output `[..., V]`; with targets, for hidden states `[N, H]`, log-probs
        `[N]` and entropies `[N]` in nats."""
        if targets_N is None:
            return super().forward(input)
        return _Score.apply(
            input, self.weight, self.bias, targets_N, temperature, chunk_tokens, kept, cap
        )


def as_scoring_head(head: nn.Module) -> ScoringHead | None:
    """Returns the head itself, turned into a ScoringHead; None if it is not a plain linear layer
    (for example with an adapter)."""
    if type(head) is nn.Linear:
        head.__class__ = ScoringHead
    return head if isinstance(head, ScoringHead) else None


@dataclass(frozen=True)
class _Chunk:
    """Hidden states `[C, H]` of all tokens or a chunk of them, and the head that scores them tile
    by tile. `kept` belongs to the same tokens."""

    hidden_CH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    temperature: float
    kept: CandidateTokens | None
    cap: float | None

    def chunk(self, at: slice) -> _Chunk:
        kept = None if self.kept is None else self.kept.chunk(at.start, at.stop)
        return replace(self, hidden_CH=self.hidden_CH[at], kept=kept)

    def parts_of_vocabulary(self) -> list[slice]:
        """Returns the tiles' columns. A tile has at most `TILE_LOGITS` logits, and its copy of the
        weights, if needed (`_product`), at most as many numbers."""
        device = "gpu" if self.weight_VH.is_cuda else "cpu"
        rows = len(self.hidden_CH)
        if not self.weight_VH.is_cuda and _wide(self.weight_VH.dtype) != self.weight_VH.dtype:
            rows = max(rows, self.weight_VH.shape[1])
        vocab_size, width = len(self.weight_VH), max(1, TILE_LOGITS[device] // rows)
        return [
            slice(start, min(start + width, vocab_size)) for start in range(0, vocab_size, width)
        ]

    def logits(self, part: slice) -> Tensor:
        """Returns a tile of scaled logits in float32 (float64 for a float64 model), which the
        caller may overwrite."""
        logits_CV = _product(self.hidden_CH, self.weight_VH[part].t())
        if self.bias_V is not None:
            logits_CV.add_(self.bias_V[part])
        if self.cap is not None:
            logits_CV.div_(self.cap).tanh_().mul_(self.cap)
        if self.temperature != 1:
            logits_CV.div_(self.temperature)
        if self.kept is not None:
            self.kept.apply(logits_CV, part)
        return logits_CV

    def slopes(self, logits_CV: Tensor) -> Tensor | None:
        """Returns T d x / d z of a tile of logits x; None if it is 1. It is 0 for a token that
        could not be sampled."""
        if self.cap is None:
            return None
        return (logits_CV * (self.temperature / self.cap)).square_().neg_().add_(1).clamp_(min=0)


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float,
        chunk_tokens: int,
        kept: CandidateTokens | None,
        cap: float | None,
    ):
        whole = _Chunk(hidden_NH, weight_VH, bias_V, temperature, kept, cap)
        scores = [
            _score_chunk(whole.chunk(at), targets_N[at])
            for at in _slices(len(hidden_NH), chunk_tokens)
        ]
        logprobs_N, entropies_N, log_totals_N = (
            torch.cat(parts) for parts in zip(*scores, strict=True)
        )
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, log_totals_N)
        ctx.temperature, ctx.chunk_tokens, ctx.kept, ctx.cap = temperature, chunk_tokens, kept, cap
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_N: Tensor, _grad_entropies_N: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, log_totals_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = log_totals_N.dtype
        grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=wide) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=wide) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=wide) if needs_bias else None
        whole = _Chunk(hidden_NH, weight_VH, bias_V, ctx.temperature, ctx.kept, ctx.cap)
        scale_N1 = (grad_logprobs_N / -ctx.temperature)[:, None]
        for at in _slices(len(hidden_NH), ctx.chunk_tokens):
            chunk = whole.chunk(at)
            scale_C1 = scale_N1[at]
            scaled_CH = (chunk.hidden_CH * scale_C1).to(hidden_NH.dtype)
            for part in chunk.parts_of_vocabulary():
                # grad_CV is p - 1[v = t]. Its factor, -gradient / T, multiplies the small matrices
                # and not the tile.
                logits_CV = chunk.logits(part)
                slopes_CV = chunk.slopes(logits_CV)
                grad_CV = logits_CV.sub_(log_totals_N[at, None]).exp_()
                here_C, columns_C1 = _targets_in(part, targets_N[at])
                grad_CV.scatter_add_(1, columns_C1, -here_C[:, None].to(wide))
                if slopes_CV is not None:
                    grad_CV.mul_(slopes_CV)
                if grad_bias_V is not None:
                    grad_bias_V[part] += (grad_CV * scale_C1).sum(0)
                grad_CV = grad_CV.to(weight_VH.dtype)
                if grad_hidden_NH is not None:
                    _add_product(grad_hidden_NH[at], grad_CV, weight_VH[part])
                if grad_weight_VH is not None:
                    _add_product(grad_weight_VH[part], grad_CV.t(), scaled_CH)
        return (
            None if grad_hidden_NH is None else grad_hidden_NH.mul_(scale_N1).to(hidden_NH.dtype),
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            *[None] * 5,
        )


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _score_chunk(chunk: _Chunk, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probs, entropies and log sum_v e^x_v of a chunk's tokens, each `[C]`.

    Running over the tiles, relative to the maximum m so far: total = sum e^(x - m), weighted = sum
    e^(x - m) (x - m).
    """
    highest_C = chunk.hidden_CH.new_full(
        (len(targets_C),), LOWEST, dtype=_wide(chunk.hidden_CH.dtype)
    )
    total_C, weighted_C, target_C = (torch.zeros_like(highest_C) for _ in range(3))
    for part in chunk.parts_of_vocabulary():
        logits_CV = chunk.logits(part)
        here_C, columns_C1 = _targets_in(part, targets_C)
        target_C = torch.where(here_C, logits_CV.gather(1, columns_C1)[:, 0], target_C)
        before_C, highest_C = highest_C, torch.maximum(highest_C, logits_CV.amax(1))
        drop_C = before_C - highest_C
        shrink_C = drop_C.exp()
        logits_CV.sub_(highest_C[:, None])
        probs_CV = logits_CV.exp()
        weighted_C = shrink_C * (weighted_C + total_C * drop_C)
        total_C = shrink_C * total_C + probs_CV.sum(1)
        weighted_C += probs_CV.mul_(logits_CV).sum(1)
    log_total_C = total_C.log()
    return (
        target_C - highest_C - log_total_C,
        log_total_C - weighted_C / total_C,
        highest_C + log_total_C,
    )


def _targets_in(part: slice, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Returns which targets are in this part of the vocabulary, and each target's column `[C, 1]`
    there (any column if it is not)."""
    columns_C = targets_C - part.start
    here_C = (columns_C >= 0) & (columns_C < part.stop - part.start)
    return here_C, torch.where(here_C, columns_C, 0)[:, None]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype for sums of such numbers: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Returns `left @ right`, summed and kept in float32 at least."""
    wide = _wide(left.dtype)
    if left.dtype is wide:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=wide)
    return left.to(wide) @ right.to(wide)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left @ right` to a total of a wider dtype. The product is not rounded to bfloat16
    first, because hundreds of tiles are summed."""
    if left.dtype is total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


@dataclass(frozen=True)
class LogitRule:
    """How a model turns its head's products z into logits before the softmax. At most one is set:

        logits = scale * z        logits = cap * tanh(z / cap)

    Cohere and Granite scale; Gemma 2, 3n and 4 cap (arXiv 2408.00118, section 2). A scale is a
    temperature of 1 / scale. vLLM does the same before it divides by the temperature."""

    scale: float = 1.0
    cap: float | None = None

    def logits(self, output: Tensor) -> Tensor:
        """Returns the logits, in float32."""
        logits = output.float()
        if self.cap is not None:
            logits = self.cap * (logits / self.cap).tanh()
        return logits * self.scale


PLAIN_LOGITS = LogitRule()
"""Logits are the head's products: no scale, no cap."""


def rule_of(config: Any) -> LogitRule:
    """Returns the rule in a model's configuration. `check_head` compares it with the model
    itself."""
    text = config.get_text_config()
    multiplies = getattr(text, "model_type", None) == MULTIPLIES_BY_DIVISOR
    scale = 1.0
    for key in MULTIPLIERS:
        scale *= getattr(text, key, None) or 1.0
    for key in DIVISORS:
        divisor = getattr(text, key, None) or 1.0
        scale *= divisor if multiplies else 1 / divisor
    return LogitRule(scale, getattr(text, CAP, None))
