"""The metrics of a step's update, over all its sampled tokens, micro-batches and ranks. The
orchestrator adds its own metrics (services/orchestrator/grpo/metrics.py).

Of every pass of every update, by the ratio r that the loss uses (clamped; of the token or of the
sequence). Names that TRL has mean what they mean there, but for ratios of sequences: here each of a
sequence's tokens counts, there the sequence once.

    clip_ratio/low_mean     share of tokens held by the lower bound: r < 1 - clip_low, A < 0
    clip_ratio/high_mean    share of tokens held by the upper bound: r > 1 + clip_high, A > 0
    clip_ratio/region_mean  share of tokens held by either
    clip_ratio/dual_mean    share of tokens held by the dual clip: r > dual_clip, A < 0
                            (only with dual_clip)
    cispo_clip_ratio        share of tokens with r > 1 + clip_high, A > 0 ("cispo" only, whose bound
                            holds a weight and no token)
    ratio/mean              mean of r
    kl                      KL(new || reference) by the job's estimator (only with beta)
    kl/old_k3               KL(old || new) by k3 = r - 1 - log r (joschu.net/blog/kl-approx.html)
    entropy                 mean entropy of the policy at each token, in nats, at the sampling
                            temperature
    padding_fraction        share of the padded tokens that are padding
    tokens/trained          sampled tokens, of all passes
    tokens/computed         tokens that went through the model for them, of all passes that train,
                            with prompts and without padding; a shared prefix counts once
    tokens/shared_fraction  share of the sequences' tokens that were not computed again, because
                            another sequence of the micro-batch begins with them too
    rewards/chosen          with "dpo", over pairs: dpo_beta times the sum over the chosen answer's
                            tokens of logprob - reference logprob (TRL's); the loss is theirs too
    rewards/rejected        the same of the rejected answer
    rewards/margins         their difference
    rewards/accuracies      share of pairs in which it is above 0
    num_micro_batches       passes through a micro-batch, of each rank

Which of the first five a loss has is in `LOSSES` (loss.py).

Trainer against sampler, by w = exp(trainer's log-prob before the first update - sampler's), raw,
whatever the correction, over the tokens whose sampler's log-prob is known:

    mismatch/logprob_diff_mean      mean of |log w|
    mismatch/logprob_diff_max       its maximum
    mismatch/ratio_mean             mean of w
    mismatch/ratio_max              its maximum
    mismatch/k3_kl                  KL(sampler || trainer) by k3 = w - 1 - log w
    mismatch/effective_sample_size  (sum w)^2 / (N sum w^2): the share of tokens that count, 1 if
                                    all weights are equal
    mismatch/token_mult_prob_error  mean of exp(|log w|), NeMo-RL's; above 1.05 something is wrong
    mismatch/out_of_range_fraction  share of tokens whose weight before bounds (token's or
                                    sequence's) is outside the correction's bounds; without a
                                    correction, w outside [0.5, 2]

By which weights sampled each token, as far as that is known: of version v where version u is
trained, its staleness is u - v. A completion may have tokens of several versions, each with the
log-prob that its own version gave it, so w is of the token's own sampler throughout.

    staleness/mean                  mean staleness
    staleness/max                   its maximum, at most the job's max_staleness
    staleness/older_fraction        share of tokens with a staleness above 0
    mismatch/current/<name>         logprob_diff_mean and k3_kl over the tokens of staleness 0
    mismatch/older/<name>           the same over the others

At staleness 0 the mismatch is the numerical difference of the two engines, and nothing else. All
are sums (and maxima) over tokens until the end, so they are exact however a step is split. A metric
that is not finite is left out: JSON has no number for it.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.learning.batch import MicroBatch
from services.trainer.learning.correction import (
    CorrectionSettings,
    Preferences,
    known_sampler_logprobs,
    log_ratios,
)
from services.trainer.learning.examples import UNKNOWN
from services.trainer.learning.loss import (
    LossInputs,
    Spec,
    bounds_of,
    importance_ratios,
    kl,
    kl_weight,
)
from shared.wire import Logprobs

MAX_RAW_LOG_RATIO = 300.0
"""Raw log ratios are clamped to this, so that the squared ratio, summed over any batch, is finite
in float64."""

UPDATE = ("ratio/mean", "kl/old_k3", "entropy")
MEANS = {
    "num_mismatch_tokens": (
        "mismatch/logprob_diff_mean",
        "mismatch/ratio_mean",
        "mismatch/k3_kl",
        "mismatch/token_mult_prob_error",
        "mismatch/out_of_range_fraction",
    ),
    "num_current_tokens": ("mismatch/current/logprob_diff_mean", "mismatch/current/k3_kl"),
    "num_older_tokens": ("mismatch/older/logprob_diff_mean", "mismatch/older/k3_kl"),
    "num_dated_tokens": ("staleness/mean", "staleness/older_fraction"),
}
"""Metrics that are means over some of the tokens, by the name of the count of these tokens."""

MAXIMA = {
    "mismatch/logprob_diff_max": "num_mismatch_tokens",
    "mismatch/ratio_max": "num_mismatch_tokens",
    "staleness/max": "num_dated_tokens",
}
"""Metrics that are maxima, with the name of the count of their tokens."""

COUNTS = (
    "loss",
    "num_tokens",
    "num_padded_tokens",
    "num_real_tokens",
    "num_sequence_tokens",
    "squared_ratios",
    *MEANS,
)


class StepMetrics:
    """Running sums and maxima of one step or call on one rank, in float64 on the device; nothing
    waits for the device until `reduce`.

    A dummy micro-batch counts only as a micro-batch. `num_tokens` are the step's sampled tokens, on
    all ranks; log-probs and entropies are kept for each of them. `version` is the version of the
    weights before the step; None: it is unknown, and so is every token's staleness.
    """

    def __init__(
        self,
        device: torch.device,
        spec: Spec,
        correction: CorrectionSettings,
        version: int | None = None,
        num_tokens: int = 0,
    ) -> None:
        self._tokens_2N = torch.zeros((2, num_tokens), device=device)
        self._bounds = bounds_of(spec)
        with_reference = ("kl",) if kl_weight(spec) else ()
        self._update = (*self._bounds, *UPDATE, *with_reference)
        self.correction = correction
        self._version = version
        self._sums = {
            name: torch.zeros((), dtype=torch.float64, device=device)
            for name in (*self._update, *COUNTS, *itertools.chain(*MEANS.values()))
        }
        self._maxima = {
            name: torch.zeros((), dtype=torch.float64, device=device) for name in MAXIMA
        }
        self._num_micro_batches = 0
        self.preferences: Preferences | None = None

    @torch.no_grad()
    def add(self, batch: MicroBatch, x: LossInputs, entropy_N: Tensor, loss: Tensor) -> None:
        """Adds one pass through a micro-batch. `loss` is its share of its optimizer step's."""
        self._num_micro_batches += 1
        if batch.weight == 0:
            return
        ratio_N = importance_ratios(x).double()
        values = {name: held(x, ratio_N) for name, held in self._bounds.items()} | {
            "ratio/mean": ratio_N,
            "kl/old_k3": ratio_N - 1 - ratio_N.log(),
            "entropy": entropy_N,
            "loss": loss,
            "num_real_tokens": batch.attention_mask_BT,
        }
        if x.reference_logprobs_N is not None:
            values["kl"] = kl(x)
        for name, value in values.items():
            self._sums[name] += value.double().sum()
        self._keep(batch, 1, entropy_N)
        self._sums["num_tokens"] += ratio_N.numel()
        self._sums["num_padded_tokens"] += batch.input_ids_BT.numel()
        self._sums["num_sequence_tokens"] += batch.num_sequence_tokens

    @torch.no_grad()
    def add_mismatch(self, batch: MicroBatch, trainer_logprobs_N: Tensor) -> None:
        """Adds a micro-batch's difference between trainer and sampler: once, with the trainer's
        log-probs before any update."""
        if batch.weight == 0:
            return
        self._keep(batch, 0, trainer_logprobs_N)
        sampler_N = known_sampler_logprobs(batch, trainer_logprobs_N)
        weighed_N = log_ratios(
            trainer_logprobs_N,
            sampler_N,
            batch.sequences_N,
            batch.num_sequences,
            self.correction,
        ).exp()
        log_ratio_N = (trainer_logprobs_N.double() - sampler_N.double()).clamp(
            -MAX_RAW_LOG_RATIO, MAX_RAW_LOG_RATIO
        )
        ratio_N, diff_N = log_ratio_N.exp(), log_ratio_N.abs()
        k3_N = ratio_N - 1 - log_ratio_N
        values = {
            "mismatch/logprob_diff_mean": diff_N,
            "mismatch/logprob_diff_max": diff_N,
            "mismatch/ratio_mean": ratio_N,
            "mismatch/ratio_max": ratio_N,
            "mismatch/k3_kl": k3_N,
            "mismatch/token_mult_prob_error": diff_N.exp(),
            "mismatch/out_of_range_fraction": (weighed_N < self.correction.low)
            | (weighed_N > self.correction.high),
            "squared_ratios": ratio_N.square(),
        }
        self._add_over(batch.measured_N, "num_mismatch_tokens", values)
        if self._version is not None:
            self._add_by_staleness(batch, self._version, diff_N, k3_N)

    def _keep(self, batch: MicroBatch, row: int, values_N: Tensor) -> None:
        if self._tokens_2N.shape[1]:
            self._tokens_2N[row, batch.places_N] = values_N.float()

    def of_tokens(self) -> tuple[Logprobs, Logprobs]:
        """Returns the log-probs before the first update, and the entropies of the last pass, of
        each of the step's sampled tokens, from all ranks: a collective."""
        # each token has its value on one rank, and 0 on the others
        dist.all_reduce(self._tokens_2N, op=dist.ReduceOp.SUM)
        logprobs_N, entropies_N = self._tokens_2N.cpu().numpy().astype("<f4")
        return Logprobs(logprobs_N.tobytes()), Logprobs(entropies_N.tobytes())

    def _add_by_staleness(
        self, batch: MicroBatch, version: int, diff_N: Tensor, k3_N: Tensor
    ) -> None:
        dated_N = batch.versions_N != UNKNOWN
        staleness_N = version - batch.versions_N
        values = {
            "staleness/mean": staleness_N,
            "staleness/max": staleness_N,
            "staleness/older_fraction": staleness_N > 0,
        }
        self._add_over(dated_N, "num_dated_tokens", values)
        for age, of_age_N in (("current", staleness_N == 0), ("older", staleness_N > 0)):
            values = {
                f"mismatch/{age}/logprob_diff_mean": diff_N,
                f"mismatch/{age}/k3_kl": k3_N,
            }
            self._add_over(dated_N & of_age_N & batch.measured_N, f"num_{age}_tokens", values)

    def _add_over(self, chosen_N: Tensor, count: str, values: dict[str, Tensor]) -> None:
        """Adds values `[N]` of the chosen tokens to sums and maxima, and the number of these tokens
        to `count`."""
        self._sums[count] += chosen_N.sum()
        for name, value_N in values.items():
            chosen_value_N = torch.where(chosen_N, value_N.double(), 0.0)
            if name in self._maxima:
                self._maxima[name] = torch.maximum(self._maxima[name], chosen_value_N.max())
            else:
                self._sums[name] += chosen_value_N.sum()

    def reduce(self, num_minibatches: int = 1) -> tuple[float, dict[str, float]]:
        """Returns the mean loss of the step's minibatches, of all its epochs, and its metrics by
        name, from all ranks: a collective."""
        sums, maxima = (
            _over_ranks(self._sums, dist.ReduceOp.SUM),
            _over_ranks(self._maxima, dist.ReduceOp.MAX),
        )
        metrics = {name: sums[name] / sums["num_tokens"] for name in self._update}
        metrics["padding_fraction"] = 1 - sums["num_real_tokens"] / sums["num_padded_tokens"]
        metrics["tokens/trained"] = sums["num_tokens"]
        metrics["tokens/computed"] = sums["num_real_tokens"]
        metrics["tokens/shared_fraction"] = (
            1 - sums["num_real_tokens"] / sums["num_sequence_tokens"]
        )
        metrics["num_micro_batches"] = float(self._num_micro_batches)
        for count, names in MEANS.items():
            if sums[count]:
                metrics |= {name: sums[name] / sums[count] for name in names}
        metrics |= {name: maxima[name] for name, count in MAXIMA.items() if sums[count]}
        if num_tokens := sums["num_mismatch_tokens"]:
            squared_sum = sums["mismatch/ratio_mean"] ** 2
            metrics["mismatch/effective_sample_size"] = squared_sum / (
                num_tokens * sums["squared_ratios"]
            )
        loss = sums["loss"] / num_minibatches
        if self.preferences is not None:
            metrics |= self.preferences.metrics()
            loss = metrics.pop("loss")
        return loss, {name: value for name, value in metrics.items() if math.isfinite(value)}


def _over_ranks(values: dict[str, Tensor], op: dist.ReduceOp.RedOpType) -> dict[str, float]:
    stacked = torch.stack(list(values.values()))
    dist.all_reduce(stacked, op=op)
    return dict(zip(values, stacked.tolist(), strict=True))
