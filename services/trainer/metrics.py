"""What a step reports, over all its completion tokens, all micro-batches and all ranks. The one place that names metrics.

    clip_fraction/low    share of tokens held by the lower bound: ratio < 1 - clip_low and advantage < 0
    clip_fraction/high   share of tokens held by the upper bound: ratio > 1 + clip_high and advantage > 0
    ratio/mean           mean importance ratio, as the loss uses it (log-ratio clamped to +-20)
    kl/old_k3            KL(old || new) by k3 = r - 1 - log r, r as the loss uses it (joschu.net/blog/kl-approx.html)
    entropy              mean entropy of the policy at each token, in nats, at the sampling temperature
    mismatch/logprob_diff_mean, mismatch/logprob_diff_max
                         |logprob - old_logprob|: trainer against sampler, on the weights before the update
    mismatch/k3          k3 again, raw: nothing clamped
    mismatch/ratio_max   largest ratio, raw
    padding_fraction     share of the padded tokens that are padding
    num_micro_batches    micro-batches of each rank

With one optimizer step a batch the first pass is the only one, so `mismatch/*` is of the policy that is being updated: at
staleness 0 it is the numerical difference of the two engines, and nothing else.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.batch import MicroBatch
from services.trainer.loss import importance_ratios

MAX_RAW_LOG_RATIO = 700.0
"""Raw ratios are float64, where e^710 is infinite, and infinity is no JSON number."""

SUMS = (
    "loss",
    "num_tokens",
    "clip_fraction/low",
    "clip_fraction/high",
    "ratio/mean",
    "kl/old_k3",
    "entropy",
    "mismatch/logprob_diff_mean",
    "mismatch/k3",
    "num_padded_tokens",
    "num_real_tokens",
)
MAXIMA = ("mismatch/logprob_diff_max", "mismatch/ratio_max")
PER_TOKEN = SUMS[2:9]


class StepMetrics:
    """Running sums and maxima of one step on one rank, in float64 on the device; nothing waits for the device until `reduce`."""

    def __init__(self, device: torch.device, clip_low: float, clip_high: float) -> None:
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self._maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=device)
        self._low, self._high = 1 - clip_low, 1 + clip_high
        self._num_micro_batches = 0

    @torch.no_grad()
    def add(self, batch: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor, loss: Tensor) -> None:
        """Adds a micro-batch. `loss` is its share of the step's. A dummy counts as a micro-batch and as nothing else."""
        self._num_micro_batches += 1
        if batch.weight == 0:
            return
        log_ratio_N = logprobs_N.double() - batch.sampler_logprobs_N.double()
        raw_ratio_N = log_ratio_N.clamp(-MAX_RAW_LOG_RATIO, MAX_RAW_LOG_RATIO).exp()
        ratio_N = importance_ratios(logprobs_N.double(), batch.sampler_logprobs_N.double())
        diff_N = log_ratio_N.abs()
        sums = [
            loss.double(),
            torch.full_like(self._sums[0], diff_N.numel()),
            ((ratio_N < self._low) & (batch.advantages_N < 0)).sum(),
            ((ratio_N > self._high) & (batch.advantages_N > 0)).sum(),
            ratio_N.sum(),
            (ratio_N - 1 - ratio_N.log()).sum(),
            entropy_N.double().sum(),
            diff_N.sum(),
            (raw_ratio_N - 1 - raw_ratio_N.log()).sum(),
            torch.full_like(self._sums[0], batch.input_ids_BT.numel()),
            batch.attention_mask_BT.sum(),
        ]
        self._sums += torch.stack([value.double() for value in sums])
        self._maxima = torch.maximum(self._maxima, torch.stack([diff_N.max(), raw_ratio_N.max()]))

    def reduce(self) -> tuple[float, dict[str, float]]:
        """Returns the step's loss and its metrics by name, from all ranks: a collective."""
        dist.all_reduce(self._sums, op=dist.ReduceOp.SUM)
        dist.all_reduce(self._maxima, op=dist.ReduceOp.MAX)
        sums = dict(zip(SUMS, self._sums.tolist(), strict=True))
        metrics = {name: sums[name] / sums["num_tokens"] for name in PER_TOKEN}
        metrics |= dict(zip(MAXIMA, self._maxima.tolist(), strict=True))
        metrics["padding_fraction"] = 1 - sums["num_real_tokens"] / sums["num_padded_tokens"]
        metrics["num_micro_batches"] = float(self._num_micro_batches)
        return sums["loss"], metrics
