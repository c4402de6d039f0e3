"""The losses: pure functions of log-probs. Each returns one micro-batch's share of the loss of an
optimizer step.

The importance ratio of token t in sequence i, to the log-probs before the first update of the
batch, is (`importance`)

    token       r_t = exp(logprob_t - old_logprob_t)                               PPO, arXiv 1707.06347
    sequence    r_t = exp(mean over i's tokens of (logprob - old_logprob))         GSPO, arXiv 2507.18071, equation 7

with the exponent clamped to +-max_log_ratio. With A_t the advantage of the sequence that token t is
in, a token's loss l_t is one of three (`clipped_losses`, `cispo_losses`, `sapo_losses`), times its
correction weight (correction.py). The losses differ in that, and in how tokens are averaged:

    loss        l_t        average over                                            source
    grpo        clipped    each sequence's tokens, then the sequences              arXiv 2402.03300, equation 3
    gspo        clipped    each sequence's tokens, then the sequences              arXiv 2507.18071, equation 5
    sapo        gated      each sequence's tokens, then the sequences              arXiv 2511.20347
    dapo        clipped    tokens of the batch                                     arXiv 2503.14476, equation 12
    cispo       weighted   tokens of the batch                                     arXiv 2506.13585, equation 4
    bnpo        clipped    tokens of the optimizer step                            TRL's loss of that name
    dr_grpo     clipped    sequences * max_tokens                                  arXiv 2503.20783

Denominators are totals over all micro-batches and ranks, counted before any correction rejects a
token, so shares add up to the same loss however the step was split. They are those of the optimizer
step, with one exception: where a batch is trained on in several minibatches, "tokens of the batch"
is their number divided by that of minibatches. So a token weighs the same in whichever minibatch it
is ("dapo", "cispo"; so does TRL), or more in one with few tokens ("bnpo").

Not finite: a log-prob of -inf, of the trainer or of what it is compared with, gives the clamped
ratio and no gradient; only "cispo", whose loss is proportional to the trainer's, has an infinite
one. NaN, also from -inf on both sides, stays NaN. The engine refuses a step whose loss is not
finite.

A new loss is a function here with an entry in `LOSSES` and `AVERAGES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.learning.kl import KL
from shared.job import TrainingSpec


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch's `[N]` completion tokens, and the totals of the optimizer step. Log-probs in
    nats.

    `logprobs_N` are the trainer's, with gradient. `old_logprobs_N` is what the ratio is taken to:
    the sampler's, or the trainer's before the first update of the batch. `reference_logprobs_N` is
    needed only if `training.beta` > 0. `weights_N` are those of correction.py, ones without; they
    carry no gradient.

    Token n is in sequence `sequences_N[n]` (int64, 0 to S-1, never decreasing), whose completion is
    `lengths_N[n]` tokens long and wholly in this micro-batch. `num_tokens` and `num_sequences`
    count the optimizer step's, over all micro-batches and ranks; `mean_tokens` is the whole batch's
    tokens divided by its number of minibatches, so `num_tokens` if it has one. `max_tokens` is the
    job's `sampling.max_tokens`.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    reference_logprobs_N: Tensor | None
    advantages_N: Tensor
    weights_N: Tensor
    sequences_N: Tensor
    lengths_N: Tensor
    num_tokens: int
    num_sequences: int
    mean_tokens: float
    max_tokens: int
    training: TrainingSpec


def total_loss(x: LossInputs) -> Tensor:
    """Returns the job's loss, plus `beta` times the KL divergence to the reference, averaged over
    tokens as that loss is."""
    training = x.training
    loss = LOSSES[training.loss](x)
    if training.beta == 0:
        return loss
    if x.reference_logprobs_N is None:
        raise ValueError(
            f"beta is {training.beta:g} and there are no reference log-probs; expected them for "
            "every token"
        )
    kl_N = KL[training.kl](x.logprobs_N, x.reference_logprobs_N, training.max_log_ratio)
    return loss + training.beta * AVERAGES[training.loss](x, kl_N)


def grpo(x: LossInputs) -> Tensor:
    """sum_i 1/|o_i| sum_t w_t l_t / num_sequences. arXiv 2402.03300, equation 3."""
    return mean_of_sequence_means(x, weighted(x, clipped_losses(x)))


def gspo(x: LossInputs) -> Tensor:
    """`grpo` with the ratio of the sequence, whatever `importance` says. arXiv 2507.18071, equation
    5."""
    return mean_of_sequence_means(x, weighted(x, clipped_losses(x)))


def sapo(x: LossInputs) -> Tensor:
    """`grpo` with a smooth gate in place of the bounds. arXiv 2511.20347."""
    return mean_of_sequence_means(x, weighted(x, sapo_losses(x)))


def dapo(x: LossInputs) -> Tensor:
    """sum_t w_t l_t / tokens of the batch. arXiv 2503.14476, equation 12."""
    return mean_over_batch_tokens(x, weighted(x, clipped_losses(x)))


def cispo(x: LossInputs) -> Tensor:
    """`dapo` with a bounded ratio that only weighs the policy gradient. arXiv 2506.13585, equation
    4."""
    return mean_over_batch_tokens(x, weighted(x, cispo_losses(x)))


def bnpo(x: LossInputs) -> Tensor:
    """sum_t w_t l_t / num_tokens. TRL's is over the tokens of one micro-batch of one rank, so it
    depends on the split."""
    return mean_over_step_tokens(x, weighted(x, clipped_losses(x)))


def dr_grpo(x: LossInputs) -> Tensor:
    """sum_t w_t l_t / (num_sequences * max_tokens): a constant, so length does not weigh. arXiv
    2503.20783."""
    return mean_over_length_limit(x, weighted(x, clipped_losses(x)))


# --- a token's loss ------------------------------------------------------------------------------


def clipped_losses(x: LossInputs) -> Tensor:
    """Returns l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) `[N]`, and with `dual_clip` c
    at most -c A where A < 0.

    arXiv 1707.06347, equation 7; two bounds apart: arXiv 2503.14476; dual clip: arXiv 1912.09729.
    """
    training, ratio_N = x.training, importance_ratios(x)
    bounded_N = ratio_N.clamp(1 - training.clip_low, 1 + training.clip_high)
    losses_N = -torch.minimum(ratio_N * x.advantages_N, bounded_N * x.advantages_N)
    if training.dual_clip is None:
        return losses_N
    return torch.where(
        x.advantages_N < 0, torch.minimum(losses_N, -training.dual_clip * x.advantages_N), losses_N
    )


def cispo_losses(x: LossInputs) -> Tensor:
    """Returns l = -sg(min(r, 1 + clip_high)) A logprob `[N]`, sg being "no gradient": no token
    loses its gradient.

    arXiv 2506.13585, equations 4 and 5. Its lower bound is left out, as in the authors' own runs;
    so is `clip_low` here.
    """
    ratio_N = importance_ratios(x).detach().clamp(max=1 + x.training.clip_high)
    return -ratio_N * x.advantages_N * x.logprobs_N


def sapo_losses(x: LossInputs) -> Tensor:
    """Returns l = -(4 / tau) sigmoid(tau (r - 1)) A `[N]`, tau being tau_positive where A > 0, else
    tau_negative.

    arXiv 2511.20347. At r = 1 its gradient is that of r A; away from it, it fades.
    """
    tau_N = torch.where(x.advantages_N > 0, x.training.tau_positive, x.training.tau_negative)
    return -(4 / tau_N) * torch.sigmoid(tau_N * (importance_ratios(x) - 1)) * x.advantages_N


def importance_ratios(x: LossInputs) -> Tensor:
    """Returns r `[N]`, of the token or of its sequence. Without the clamp, e^89 is infinite in
    float32, and no bound holds where A < 0."""
    log_ratio_N = x.logprobs_N - x.old_logprobs_N
    if x.training.importance == "sequence" or x.training.loss == "gspo":
        log_ratio_N = (
            sequence_sums(log_ratio_N, x.sequences_N, num_sequences=len(log_ratio_N)) / x.lengths_N
        )
    return log_ratio_N.clamp(-x.training.max_log_ratio, x.training.max_log_ratio).exp()


def sequence_sums(values_N: Tensor, sequences_N: Tensor, num_sequences: int) -> Tensor:
    """Returns, for each token, the sum of the values of its sequence `[N]`. `num_sequences` may be
    any upper bound."""
    return values_N.new_zeros(num_sequences).index_add(0, sequences_N, values_N)[sequences_N]


def weighted(x: LossInputs, losses_N: Tensor) -> Tensor:
    """Returns w l `[N]`, and 0 where w is 0, also if l is infinite there: a rejected token has no
    say."""
    return torch.where(x.weights_N == 0, 0.0, x.weights_N * losses_N)


# --- averages over tokens, as shares of the optimizer step's -------------------------------------


def mean_of_sequence_means(x: LossInputs, values_N: Tensor) -> Tensor:
    return (values_N / x.lengths_N).sum() / x.num_sequences


def mean_over_batch_tokens(x: LossInputs, values_N: Tensor) -> Tensor:
    return values_N.sum() / x.mean_tokens


def mean_over_step_tokens(x: LossInputs, values_N: Tensor) -> Tensor:
    return values_N.sum() / x.num_tokens


def mean_over_length_limit(x: LossInputs, values_N: Tensor) -> Tensor:
    return values_N.sum() / (x.num_sequences * x.max_tokens)


LOSSES: dict[str, Callable[[LossInputs], Tensor]] = {
    "dapo": dapo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "bnpo": bnpo,
    "cispo": cispo,
    "sapo": sapo,
    "gspo": gspo,
}

AVERAGES: dict[str, Callable[[LossInputs, Tensor], Tensor]] = {
    "dapo": mean_over_batch_tokens,
    "grpo": mean_of_sequence_means,
    "dr_grpo": mean_over_length_limit,
    "bnpo": mean_over_step_tokens,
    "cispo": mean_over_batch_tokens,
    "sapo": mean_of_sequence_means,
    "gspo": mean_of_sequence_means,
}
