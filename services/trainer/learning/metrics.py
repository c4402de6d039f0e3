"""What a step reports, over all its completion tokens, all micro-batches and all ranks. The one
place that names metrics.

Of every pass of every update, by the ratio r that the loss uses (clamped; of the token or of the
sequence):

    clip_fraction/low    share of tokens held by the lower bound: r < 1 - clip_low and advantage < 0
    clip_fraction/high   share of tokens held by the upper bound: r > 1 + clip_high and advantage > 0
    clip_fraction/dual   share of tokens held by the dual clip: r > dual_clip and advantage < 0 (only with dual_clip)
    ratio/mean           mean of r
    kl/old_k3            KL(old || new) by k3 = r - 1 - log r (joschu.net/blog/kl-approx.html)
    kl/reference         KL(new || reference) by the job's estimator (only with beta)
    entropy              mean entropy of the policy at each token, in nats, at the sampling temperature
    padding_fraction     share of the padded tokens that are padding
    num_micro_batches    passes through a micro-batch, of each rank

"cispo" bounds a weight and holds no token: its clip_fraction/high counts every r > 1 + clip_high,
and it has no other. "sapo" has no bounds and no clip fractions.

Trainer against sampler, by w = exp(trainer's log-prob before the first update - sampler's), raw,
whatever the correction:

    mismatch/logprob_diff_mean, mismatch/logprob_diff_max     of |log w|
    mismatch/ratio_mean, mismatch/ratio_max                   of w
    mismatch/k3_kl                    KL(sampler || trainer) by k3 = w - 1 - log w
    mismatch/effective_sample_size    (sum w)^2 / (N sum w^2): the share of tokens that weigh, 1 if all do alike
    mismatch/token_mult_prob_error    mean of exp(|log w|), NeMo-RL's; above 1.05 something is wrong
    mismatch/out_of_range_fraction    share of tokens whose w (the sequence methods: their sequence's) is outside the correction's
                                      bounds; without a correction, outside [0.5, 2]

At staleness 0 this is the numerical difference of the two engines, and nothing else. All are sums
(and maxima) over tokens until the end, so they are exact however a step is split. A metric that is
not finite is left out: JSON has no number for it.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.learning.batch import MicroBatch
from services.trainer.learning.correction import Resolved, log_ratios
from services.trainer.learning.kl import KL
from services.trainer.learning.loss import LossInputs, importance_ratios
from shared.job import TrainingSpec

MAX_RAW_LOG_RATIO = 300.0
"""Beyond this a raw ratio is not told apart; its square, summed over any batch, is still finite in
float64."""

UPDATE = (
    "clip_fraction/low",
    "clip_fraction/high",
    "clip_fraction/dual",
    "ratio/mean",
    "kl/old_k3",
    "kl/reference",
    "entropy",
)
MISMATCH = (
    "mismatch/logprob_diff_mean",
    "mismatch/ratio_mean",
    "mismatch/k3_kl",
    "mismatch/token_mult_prob_error",
    "mismatch/out_of_range_fraction",
)
COUNTS = (
    "loss",
    "num_tokens",
    "num_padded_tokens",
    "num_real_tokens",
    "num_mismatch_tokens",
    "squared_ratios",
)
SUMS = UPDATE + MISMATCH + COUNTS
MAXIMA = ("mismatch/logprob_diff_max", "mismatch/ratio_max")


class StepMetrics:
    """Running sums and maxima of one step on one rank, in float64 on the device; nothing waits for
    the device until `reduce`.

    A dummy micro-batch counts as a micro-batch and as nothing else.
    """

    def __init__(self, device: torch.device, training: TrainingSpec, correction: Resolved) -> None:
        self._training = training
        self._correction = correction
        self._sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in SUMS}
        self._maxima = {
            name: torch.zeros((), dtype=torch.float64, device=device) for name in MAXIMA
        }
        self._num_micro_batches = 0

    @torch.no_grad()
    def add(self, batch: MicroBatch, x: LossInputs, entropy_N: Tensor, loss: Tensor) -> None:
        """Adds one pass through a micro-batch. `loss` is its share of its optimizer step's."""
        self._num_micro_batches += 1
        if batch.weight == 0:
            return
        ratio_N = importance_ratios(x).double()
        values = clip_fractions(x, ratio_N) | {
            "ratio/mean": ratio_N,
            "kl/old_k3": ratio_N - 1 - ratio_N.log(),
            "entropy": entropy_N,
            "loss": loss,
            "num_real_tokens": batch.attention_mask_BT,
        }
        if x.reference_logprobs_N is not None:
            values["kl/reference"] = KL[x.training.kl](
                x.logprobs_N, x.reference_logprobs_N, x.training.max_log_ratio
            )
        for name, value in values.items():
            self._sums[name] += value.double().sum()
        self._sums["num_tokens"] += ratio_N.numel()
        self._sums["num_padded_tokens"] += batch.input_ids_BT.numel()

    @torch.no_grad()
    def add_mismatch(self, batch: MicroBatch, trainer_logprobs_N: Tensor) -> None:
        """Adds a micro-batch's difference between trainer and sampler: once, with the trainer's
        log-probs before any update."""
        if batch.weight == 0:
            return
        pair = (
            trainer_logprobs_N,
            batch.sampler_logprobs_N,
            batch.sequences_N,
            batch.num_sequences,
        )
        weighed_N = log_ratios(*pair, self._correction).exp()
        log_ratio_N = (trainer_logprobs_N.double() - batch.sampler_logprobs_N.double()).clamp(
            -MAX_RAW_LOG_RATIO, MAX_RAW_LOG_RATIO
        )
        ratio_N, diff_N = log_ratio_N.exp(), log_ratio_N.abs()
        values = {
            "mismatch/logprob_diff_mean": diff_N,
            "mismatch/ratio_mean": ratio_N,
            "mismatch/k3_kl": ratio_N - 1 - log_ratio_N,
            "mismatch/token_mult_prob_error": diff_N.exp(),
            "mismatch/out_of_range_fraction": (weighed_N < self._correction.low)
            | (weighed_N > self._correction.high),
            "squared_ratios": ratio_N.square(),
        }
        for name, value in values.items():
            self._sums[name] += value.double().sum()
        self._sums["num_mismatch_tokens"] += ratio_N.numel()
        for name, value_N in {
            "mismatch/logprob_diff_max": diff_N,
            "mismatch/ratio_max": ratio_N,
        }.items():
            self._maxima[name] = torch.maximum(self._maxima[name], value_N.max())

    def reduce(self, num_updates: int = 1) -> tuple[float, dict[str, float]]:
        """Returns the mean loss of the step's updates, and its metrics by name, from all ranks: a
        collective."""
        sums, maxima = (
            _over_ranks(self._sums, dist.ReduceOp.SUM),
            _over_ranks(self._maxima, dist.ReduceOp.MAX),
        )
        metrics = {name: sums[name] / sums["num_tokens"] for name in self._reported()}
        metrics["padding_fraction"] = 1 - sums["num_real_tokens"] / sums["num_padded_tokens"]
        metrics["num_micro_batches"] = float(self._num_micro_batches)
        num_tokens = sums["num_mismatch_tokens"]
        if num_tokens:
            metrics |= {name: sums[name] / num_tokens for name in MISMATCH} | maxima
            squared_sum = sums["mismatch/ratio_mean"] ** 2
            metrics["mismatch/effective_sample_size"] = squared_sum / (
                num_tokens * sums["squared_ratios"]
            )
        return sums["loss"] / num_updates, {
            name: value for name, value in metrics.items() if math.isfinite(value)
        }

    def _reported(self) -> tuple[str, ...]:
        training = self._training
        left_out = {
            "clip_fraction/low": training.loss in ("cispo", "sapo"),
            "clip_fraction/high": training.loss == "sapo",
            "clip_fraction/dual": training.dual_clip is None or training.loss in ("cispo", "sapo"),
            "kl/reference": training.beta == 0,
        }
        return tuple(name for name in UPDATE if not left_out.get(name))


def clip_fractions(x: LossInputs, ratio_N: Tensor) -> dict[str, Tensor]:
    """Returns, for each bound by its metric's name, which tokens it holds: bools `[N]`."""
    training = x.training
    negative_N = x.advantages_N < 0
    high_N = ratio_N > 1 + training.clip_high
    return {
        "clip_fraction/low": (ratio_N < 1 - training.clip_low) & negative_N,
        "clip_fraction/high": high_N if training.loss == "cispo" else high_N & (x.advantages_N > 0),
        "clip_fraction/dual": (ratio_N > (training.dual_clip or math.inf)) & negative_N,
    }


def _over_ranks(values: dict[str, Tensor], op: dist.ReduceOp.RedOpType) -> dict[str, float]:
    stacked = torch.stack(list(values.values()))
    dist.all_reduce(stacked, op=op)
    return dict(zip(values, stacked.tolist(), strict=True))
