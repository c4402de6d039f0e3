"""The losses: pure functions of log-probs. READ FIRST. Each returns one micro-batch's share of the
loss of an optimizer step.

The importance ratio of token t in sequence i is, by the job's `importance` or the loss's own,

    token       r_t = exp(logprob_t - old_logprob_t)              PPO, arXiv 1707.06347
    sequence    r_t = exp(mean over i of (logprob - old_logprob)) GSPO, arXiv 2507.18071, equation 7
    gspo_token  that value, with the gradient of exp(logprob_t)   GSPO-token, the same, equation 14

with the exponent clamped to +-max_log_ratio, and the mean over the tokens that count in it. The
old log-probs are the trainer's own before the first update of the batch, so the ratio of the first
update is exactly 1; or the sampler's, if the job asks for that (`correction.ratio_base`). With A_t
the advantage of token t, the token's loss l_t is one of the functions below, times its correction
weight (correction.py). The losses differ in that function and in the average, `LOSSES`:

    loss        l_t        average                            source
    grpo        clipped    sum_i 1/|o_i| sum_t l_t / S        arXiv 2402.03300, equation 3
    gspo        clipped    the same, r of the sequence        arXiv 2507.18071, equation 5
    sapo        gated      the same                           arXiv 2511.20347
    dapo        clipped    sum_t l_t / T                      arXiv 2503.14476, equation 12
    cispo       weighted   the same                           arXiv 2506.13585, equation 4
    bnpo        clipped    sum_t l_t / T_m                    TRL's loss of that name
    dr_grpo     clipped    sum_t l_t / (S * max_tokens)       arXiv 2503.20783

    sft         -A_t logprob_t            the same, A = 1     mean negative log-likelihood
    dpo         -A_t logprob_t            sum_t l_t / (S / 2) `correction.py`, S / 2 pairs

A program's calls (`POST /forward_backward`) have losses with Tinker's names and defaults. All are
sums, so calls add up to one batch, however it is split. Their old log-probs are the sampler's.

    cross_entropy         -A_t logprob_t, A being the token's weight
    importance_sampling   -r_t A_t
    ppo                   clipped
    cispo                 weighted
    dro                   -A_t logprob_t + beta/2 (logprob_t - old_logprob_t)^2   arXiv 2405.19107
    gspo                  clipped, r of "gspo_token"

The denominators S, T and T_m are an optimizer step's share of the sequences and tokens of the whole
batch as sampled, rollouts without signal included (`Denominators` and, with its equation,
batch.py). They are counted before any correction rejects a token and are the same for every
micro-batch and rank, so shares add up to the same loss however the step is split.

Not finite: a trainer's log-prob of -inf gives the clamped ratio and no gradient; only losses with
the log-prob itself as a factor, such as "cispo" and "sft", are infinite. NaN stays NaN. The engine
refuses a step whose loss is not finite.

To add a loss, write a function here and its entry in `LOSSES` or `SUMS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.job import TrainingSpec
from shared.wire import TokenLoss


@dataclass(frozen=True)
class Denominators:
    """The denominators of the sums over one optimizer step's tokens.

    `num_sequences` (S) and `num_tokens` (T) are the whole batch's divided by its number of
    minibatches, `step_tokens` (T_m) is the minibatch's own count, `max_tokens` the job's
    `sampling.max_tokens`.
    """

    num_sequences: float
    num_tokens: float
    step_tokens: float
    max_tokens: int


Spec = TrainingSpec | TokenLoss
"""The name of a loss and its constants, from a job or from a program's call."""


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch's `[N]` sampled tokens. Log-probs in nats.

    `logprobs_N` are the trainer's, with gradient; `old_logprobs_N` are the denominators of the
    ratio. `reference_logprobs_N` is needed only if `training.beta` > 0. `weights_N` come from
    correction.py, and are 1 without a correction; they carry no gradient.

    Token n is in sequence `sequences_N[n]` (int64, 0 to S-1, never decreasing), which has
    `lengths_N[n]` sampled tokens, all in this micro-batch; in the mean of its sequence's ratio it
    counts if `in_ratio_N[n]`. `spec` has the loss and its constants.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    reference_logprobs_N: Tensor | None
    advantages_N: Tensor
    weights_N: Tensor
    sequences_N: Tensor
    lengths_N: Tensor
    in_ratio_N: Tensor
    denominators: Denominators
    spec: Spec

    @property
    def training(self) -> TrainingSpec:
        """The job's constants, for losses that programs' calls do not have."""
        assert isinstance(self.spec, TrainingSpec)
        return self.spec


TokenBound = Callable[[LossInputs, Tensor], Tensor]
"""Returns, from inputs and ratios `[N]`, whether a bound of the ratio holds each token `[N]`."""


@dataclass(frozen=True)
class Loss:
    """One loss. `terms` returns l `[N]` from the inputs and the ratios `[N]`, `average` a
    micro-batch's share of the step's mean of values `[N]`. `bounds` maps a metric's name to a
    bound: the metric is the share of tokens that the bound holds."""

    terms: Callable[[LossInputs, Tensor], Tensor]
    average: Callable[[LossInputs, Tensor], Tensor]
    bounds: Mapping[str, TokenBound] = field(default_factory=dict[str, TokenBound])


def total_loss(x: LossInputs) -> Tensor:
    """Returns the loss; a job's plus `beta` times the KL divergence to the reference, averaged over
    tokens like the loss."""
    loss, beta = loss_of(x.spec), kl_weight(x.spec)
    losses_N = weighted(x, loss.terms(x, importance_ratios(x)))
    return loss.average(x, losses_N + beta * kl(x) if beta else losses_N)


def kl(x: LossInputs) -> Tensor:
    """Returns the job's estimate of KL(policy || reference) of each token `[N]`."""
    if x.reference_logprobs_N is None:
        raise ValueError(
            f"beta is {x.training.beta:g} and there are no reference log-probs; expected them for "
            "every token"
        )
    return KL[x.training.kl](x.logprobs_N, x.reference_logprobs_N, x.training.max_log_ratio)


def kl_weight(spec: Spec) -> float:
    """Returns the weight of the KL term in a loss; no program's call has one."""
    return spec.beta if isinstance(spec, TrainingSpec) else 0.0


def importance_ratios(x: LossInputs) -> Tensor:
    """Returns r `[N]`, of the token or of its sequence. Without the clamp, e^89 is infinite in
    float32, and no bound holds where A < 0."""
    log_ratio_N = x.logprobs_N - x.old_logprobs_N
    if x.spec.ratio_of == "sequence":
        log_ratio_N = _sequence_means(x, log_ratio_N)
    elif x.spec.ratio_of == "gspo_token":
        own_N = x.logprobs_N - x.logprobs_N.detach()  # exactly 0, with the gradient
        log_ratio_N = _sequence_means(x, log_ratio_N.detach()) + own_N
    return log_ratio_N.clamp(-x.spec.max_log_ratio, x.spec.max_log_ratio).exp()


def _sequence_means(x: LossInputs, values_N: Tensor) -> Tensor:
    """Returns, for each token, the mean over the tokens that count of its sequence `[N]`."""
    counted_N = x.in_ratio_N.to(values_N.dtype)
    sums_N, counts_N = (
        sequence_sums(each_N, x.sequences_N, num_sequences=len(each_N))
        for each_N in (values_N * counted_N, counted_N)
    )
    return sums_N / counts_N


def sequence_sums(values_N: Tensor, sequences_N: Tensor, num_sequences: int) -> Tensor:
    """Returns, for each token, the sum of the values of its sequence `[N]`. `num_sequences` may be
    any upper bound. Sums, also of the gradient, are in float64: in float32, one by one, a sequence
    of 10,000 tokens would lose two digits."""
    zeros = values_N.new_zeros(num_sequences, dtype=torch.float64)
    sums_N = zeros.index_add(0, sequences_N, values_N.double())[sequences_N]
    return sums_N.to(values_N.dtype)


def weighted(x: LossInputs, losses_N: Tensor) -> Tensor:
    """Returns w l `[N]`, and 0 where w is 0, even if l is infinite there: a rejected token must not
    count."""
    return torch.where(x.weights_N == 0, 0.0, x.weights_N * losses_N)


# --- a token's loss -----------------------------------------------------------------------------


def unclipped(x: LossInputs, ratio_N: Tensor) -> Tensor:
    """Returns l = -r A `[N]`."""
    return -ratio_N * x.advantages_N


def clipped(x: LossInputs, ratio_N: Tensor) -> Tensor:
    """Returns l = -min(r A, clip(r, low, high) A) `[N]`.

    arXiv 1707.06347, equation 7; two bounds apart: arXiv 2503.14476.
    """
    bounded_N = ratio_N.clamp(*x.spec.bounds)
    return -torch.minimum(ratio_N * x.advantages_N, bounded_N * x.advantages_N)


def dual_clipped(x: LossInputs, ratio_N: Tensor) -> Tensor:
    """Returns `clipped`, and with `dual_clip` c at most -c A where A < 0 (arXiv 1912.09729)."""
    losses_N, dual_clip = clipped(x, ratio_N), x.training.dual_clip
    if dual_clip is None:
        return losses_N
    return torch.where(
        x.advantages_N < 0, torch.minimum(losses_N, -dual_clip * x.advantages_N), losses_N
    )


def cispo(x: LossInputs, ratio_N: Tensor) -> Tensor:
    """Returns l = -sg(clip(r, low, high)) A logprob `[N]`, sg being "no gradient": no token loses
    its gradient.

    arXiv 2506.13585, equations 4 and 5. A job has no lower bound, as in the authors' own runs.
    """
    return -ratio_N.detach().clamp(*x.spec.bounds) * x.advantages_N * x.logprobs_N


def sapo(x: LossInputs, ratio_N: Tensor) -> Tensor:
    """Returns l = -(4 / tau) sigmoid(tau (r - 1)) A `[N]`, tau being tau_positive where A > 0, else
    tau_negative.

    arXiv 2511.20347. At r = 1 its gradient equals the gradient of r A; away from 1 it fades.
    """
    tau_N = torch.where(x.advantages_N > 0, x.training.tau_positive, x.training.tau_negative)
    return -(4 / tau_N) * torch.sigmoid(tau_N * (ratio_N - 1)) * x.advantages_N


def negative_log_likelihood(x: LossInputs, _ratio_N: Tensor) -> Tensor:
    """Returns l = -A logprob `[N]`."""
    return -x.advantages_N * x.logprobs_N


def dro(x: LossInputs, _ratio_N: Tensor) -> Tensor:
    """Returns l = -A logprob + beta/2 (logprob - old_logprob)^2 `[N]`."""
    assert isinstance(x.spec, TokenLoss)
    pull_N = x.spec.beta / 2 * (x.logprobs_N - x.old_logprobs_N).square()
    return -(x.advantages_N * x.logprobs_N - pull_N)


# --- averages, as shares of the optimizer step's ------------------------------------------------


def mean_of_sequence_means(x: LossInputs, values_N: Tensor) -> Tensor:
    return (values_N / x.lengths_N).sum() / x.denominators.num_sequences


def mean_over_batch_tokens(x: LossInputs, values_N: Tensor) -> Tensor:
    return values_N.sum() / x.denominators.num_tokens


def mean_over_step_tokens(x: LossInputs, values_N: Tensor) -> Tensor:
    return values_N.sum() / x.denominators.step_tokens


def mean_over_length_limit(x: LossInputs, values_N: Tensor) -> Tensor:
    return values_N.sum() / (x.denominators.num_sequences * x.denominators.max_tokens)


def mean_over_pairs(x: LossInputs, values_N: Tensor) -> Tensor:
    return values_N.sum() / (x.denominators.num_sequences / 2)


def total(_x: LossInputs, values_N: Tensor) -> Tensor:
    return values_N.sum()


# --- tokens held by a bound, by TRL's names of the metrics --------------------------------------


def held_low(x: LossInputs, ratio_N: Tensor) -> Tensor:
    return (ratio_N < x.spec.bounds[0]) & (x.advantages_N < 0)


def held_high(x: LossInputs, ratio_N: Tensor) -> Tensor:
    return (ratio_N > x.spec.bounds[1]) & (x.advantages_N > 0)


def held_either(x: LossInputs, ratio_N: Tensor) -> Tensor:
    return held_low(x, ratio_N) | held_high(x, ratio_N)


def held_dual(x: LossInputs, ratio_N: Tensor) -> Tensor:
    return (ratio_N > (x.training.dual_clip or math.inf)) & (x.advantages_N < 0)


CLIPS: dict[str, TokenBound] = {
    "clip_ratio/low_mean": held_low,
    "clip_ratio/high_mean": held_high,
    "clip_ratio/region_mean": held_either,
    "clip_ratio/dual_mean": held_dual,
}


def bounds_of(spec: Spec) -> dict[str, TokenBound]:
    """Returns the loss's bounds by metric name, without `clip_ratio/dual_mean` if the job sets no
    `dual_clip`."""
    bounds = dict(loss_of(spec).bounds)
    if not (isinstance(spec, TrainingSpec) and spec.dual_clip is not None):
        bounds.pop("clip_ratio/dual_mean", None)
    return bounds


LOSSES: dict[str, Loss] = {
    "dapo": Loss(dual_clipped, mean_over_batch_tokens, CLIPS),
    "grpo": Loss(dual_clipped, mean_of_sequence_means, CLIPS),
    "dr_grpo": Loss(dual_clipped, mean_over_length_limit, CLIPS),
    "bnpo": Loss(dual_clipped, mean_over_step_tokens, CLIPS),
    "cispo": Loss(cispo, mean_over_batch_tokens, {"cispo_clip_ratio": held_high}),
    "sapo": Loss(sapo, mean_of_sequence_means),
    "gspo": Loss(dual_clipped, mean_of_sequence_means, CLIPS),
}

GIVEN: dict[str, Loss] = {
    "sft": Loss(negative_log_likelihood, mean_over_batch_tokens),
    "dpo": Loss(negative_log_likelihood, mean_over_pairs),
}
"""The losses of given answers, by objective."""

SUMS: dict[str, Loss] = {
    "cross_entropy": Loss(negative_log_likelihood, total),
    "importance_sampling": Loss(unclipped, total),
    "ppo": Loss(clipped, total),
    "cispo": Loss(cispo, total),
    "dro": Loss(dro, total),
    "gspo": Loss(clipped, total),
}
"""The losses of a program's calls."""


def loss_of(spec: Spec) -> Loss:
    """Returns the loss of a step's updates, or of a call."""
    if isinstance(spec, TokenLoss):
        return SUMS[spec.name]
    return GIVEN.get(spec.objective) or LOSSES[spec.loss]


# --- estimates of the KL term --------------------------------------------------------------------


def k1(logprobs_N: Tensor, reference_logprobs_N: Tensor, max_log_ratio: float) -> Tensor:
    return _differences(logprobs_N, reference_logprobs_N, max_log_ratio)


def k2(logprobs_N: Tensor, reference_logprobs_N: Tensor, max_log_ratio: float) -> Tensor:
    return _differences(logprobs_N, reference_logprobs_N, max_log_ratio).square() / 2


def k3(logprobs_N: Tensor, reference_logprobs_N: Tensor, max_log_ratio: float) -> Tensor:
    differences_N = _differences(logprobs_N, reference_logprobs_N, max_log_ratio)
    return (-differences_N).expm1() + differences_N


def k3_true(logprobs_N: Tensor, reference_logprobs_N: Tensor, max_log_ratio: float) -> Tensor:
    gradient_N = k2(logprobs_N, reference_logprobs_N, max_log_ratio)
    value_N = k3(logprobs_N, reference_logprobs_N, max_log_ratio)
    return gradient_N + (value_N - gradient_N).detach()


def _differences(logprobs_N: Tensor, reference_logprobs_N: Tensor, max_log_ratio: float) -> Tensor:
    """Returns d `[N]`, clamped in value but not in gradient: its derivative by the log-probs is 1
    everywhere, except at a log-prob of -inf."""
    values_N = (logprobs_N.detach() - reference_logprobs_N).clamp(-max_log_ratio, max_log_ratio)
    return values_N + (logprobs_N - logprobs_N.detach()).nan_to_num()


KL: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_true": k3_true,
}
"""Estimates of KL(policy || reference), token by token, from log-probs of sampled tokens
(joschu.net/blog/kl-approx.html).

With d = logprob - reference_logprob:

    name       value           its gradient, in expectation over the policy's own samples
    k1         d               zero: only a metric, no pull to the reference
    k2         d^2 / 2         the gradient of KL(policy || reference)
    k3         e^-d - 1 + d    the gradient of KL(reference || policy); grows with e^-d. The value
                               is never negative (GRPO: arXiv 2402.03300)
    k3_true    e^-d - 1 + d    the gradient of KL(policy || reference): k3's value, k2's gradient

A right value need not have the right gradient: arXiv 2506.09477. All estimates assume samples of
the present policy. With several updates per batch they are slightly off, as in every other trainer.

Beyond +-max_log_ratio a token has the value and the gradient of the bound, so the pull back to the
reference never ends, and e^-d stays finite."""
