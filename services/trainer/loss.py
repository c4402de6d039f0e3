"""The losses: pure functions of log-probs. Each returns one micro-batch's share of the loss of the whole step.

With r_t = exp(logprob_t - old_logprob_t), A_t the advantage of the sequence that token t is in, all of them share (PPO,
arXiv 1707.06347; its two bounds apart: DAPO, arXiv 2503.14476)

    l_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

and differ in how tokens are averaged. The denominator is that of the whole step, over all micro-batches and ranks, so shares
add up to the same loss however the step was split.

Left out for now: KL to a reference, sequence-level ratios, truncated importance sampling. A new loss is a function here with
an entry in `LOSSES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Beyond this a ratio says only that something is broken; e^20 keeps it finite in float32."""


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch's `[N]` completion tokens, and the totals of the whole step. Log-probs in nats.

    `lengths_N` is the number of tokens of the sequence that token n is in.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    lengths_N: Tensor
    num_tokens: int
    num_sequences: int
    clip_low: float
    clip_high: float


def dapo(x: LossInputs) -> Tensor:
    """Mean over all tokens of the step: sum_t l_t / num_tokens. arXiv 2503.14476, equation 12."""
    return token_losses(x).sum() / x.num_tokens


def grpo(x: LossInputs) -> Tensor:
    """Mean over sequences of each one's token mean: sum_i (1/|o_i|) sum_t l_t / num_sequences. arXiv 2402.03300, equation 3."""
    return (token_losses(x) / x.lengths_N).sum() / x.num_sequences


LOSSES: dict[str, Callable[[LossInputs], Tensor]] = {"dapo": dapo, "grpo": grpo}


def token_losses(x: LossInputs) -> Tensor:
    """Returns l_t `[N]`: the clipped surrogate, negated."""
    ratio_N = importance_ratios(x.logprobs_N, x.old_logprobs_N)
    clipped_N = ratio_N.clamp(1 - x.clip_low, 1 + x.clip_high)
    return -torch.minimum(ratio_N * x.advantages_N, clipped_N * x.advantages_N)


def importance_ratios(logprobs_N: Tensor, old_logprobs_N: Tensor) -> Tensor:
    """Returns exp(logprob - old_logprob) `[N]`, the exponent clamped to +-20."""
    return (logprobs_N - old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
