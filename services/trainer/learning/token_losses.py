"""Losses of programs that drive the trainer (`POST /forward_backward`): sums over tokens, so calls
add up to one batch, however it is split.

With r_t = exp(logprob_t - old_logprob_t), A_t the token's advantage and sg "no gradient":

    cross_entropy         -sum A_t logprob_t                              A is the token's weight
    importance_sampling   -sum r_t A_t
    ppo                   -sum min(r_t A_t, clip(r_t, low, high) A_t)     arXiv 1707.06347
    cispo                 -sum sg(clip(r_t, low, high)) A_t logprob_t     arXiv 2506.13585
    dro                   -sum (A_t logprob_t - beta/2 (logprob_t - old_logprob_t)^2)
                                                                          arXiv 2405.19107
    gspo                  -sum min(s_t A_t, clip(s_t, low, high) A_t)     arXiv 2507.18071

s_t has the value of the sequence's ratio, exp of the mean of logprob - old_logprob over the tokens
that count in it, and the gradient of the token's own log-prob (GSPO-token).

Names and defaults are Tinker's. The bounds low and high are of the ratio itself
(`TokenLoss.bounds`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.trainer.learning.batch import MicroBatch
from shared.wire import TokenLoss

MAX_LOG_RATIO = 20.0
"""The ratio's logarithm is clamped to this on both sides, so that no ratio is infinite."""


def token_loss(
    loss: TokenLoss, logprobs_N: Tensor, old_logprobs_N: Tensor, batch: MicroBatch
) -> Tensor:
    """Returns the loss of a micro-batch's tokens, a scalar. `logprobs_N` have the gradient."""
    advantages_N = batch.advantages_N
    if loss.name == "cross_entropy":
        return -(advantages_N * logprobs_N).sum()
    log_ratios_N = logprobs_N - old_logprobs_N
    if loss.name == "dro":
        return -(advantages_N * logprobs_N - loss.beta / 2 * log_ratios_N.square()).sum()
    if loss.name == "gspo":
        own_N = logprobs_N - logprobs_N.detach()  # exactly 0, with the gradient
        log_ratios_N = _of_sequences(log_ratios_N.detach(), batch) + own_N
    ratios_N = log_ratios_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if loss.name == "importance_sampling":
        return -(ratios_N * advantages_N).sum()
    clipped_N = ratios_N.clamp(*loss.bounds)
    if loss.name == "cispo":
        return -(clipped_N.detach() * advantages_N * logprobs_N).sum()
    return -torch.minimum(ratios_N * advantages_N, clipped_N * advantages_N).sum()


def _of_sequences(log_ratios_N: Tensor, batch: MicroBatch) -> Tensor:
    """Returns for each token the mean over the tokens of its sequence that count, `[N]`."""
    counts_N = batch.in_ratio_N.to(log_ratios_N.dtype)
    sums_S, counts_S = (
        torch.zeros(batch.num_sequences, dtype=values_N.dtype, device=values_N.device).index_add(
            0, batch.sequences_N, values_N
        )
        for values_N in (log_ratios_N * counts_N, counts_N)
    )
    return (sums_S / counts_S)[batch.sequences_N]
