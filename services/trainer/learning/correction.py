"""Weights that correct the loss for the sampler not being the trainer: other kernels, other
precision, or older weights.

From w = exp(trainer's log-prob - sampler's), the trainer's being those before the first update of
the batch, and for the two sequence methods the product of w over the sequence:

    token_tis        clamp(w, low, high)                   truncated importance sampling: fengyao.notion.site/off-policy-rl
    sequence_tis     clamp(product of w, low, high)        the same of the sequence
    sequence_mask    product of w if within [low, high], else 0
    icepop           w if within [low, high], else 0       arXiv 2510.18855

A token of weight 0 has no gradient and still counts in the loss's denominators: what is rejected
must not make the rest weigh more. The sampler's log-prob -inf gives w = infinity, which is above
every bound; NaN stays NaN, and the engine refuses the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from services.trainer.learning.loss import sequence_sums
from shared.errors import BadRequest
from shared.job import CorrectionSpec

Method = Literal["none", "token_tis", "sequence_tis", "sequence_mask", "icepop"]

BOUNDS: dict[Method, tuple[float, float]] = {
    "none": (0.5, 2.0),
    "token_tis": (0.0, 2.0),
    "sequence_tis": (0.0, 2.0),
    "sequence_mask": (0.0, 3.0),
    "icepop": (0.5, 5.0),
}
"""What `low` and `high` are where the job does not say. "none" weighs nothing: its bounds are only
for the metrics."""


@dataclass(frozen=True)
class Resolved:
    """A correction with nothing left open. `method` "none": no weights."""

    method: Method
    low: float
    high: float

    @property
    def of_sequences(self) -> bool:
        return self.method.startswith("sequence")


def resolve(correction: CorrectionSpec, max_staleness: int) -> Resolved:
    """Returns the correction with "auto" and unset bounds filled in. Raises BadRequest for a lower
    bound above the upper."""
    automatic: Method = "token_tis" if max_staleness > 0 else "none"
    method: Method = automatic if correction.method == "auto" else correction.method
    low, high = BOUNDS[method]
    low = low if correction.low is None else correction.low
    high = high if correction.high is None else correction.high
    if low > high:
        raise BadRequest(
            f"correction.low is {low:g} and correction.high {high:g} with method {method!r}; "
            "expected low <= high"
        )
    return Resolved(method, low, high)


@torch.no_grad()
def correction_weights(
    trainer_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    sequences_N: Tensor,
    num_sequences: int,
    resolved: Resolved,
) -> Tensor:
    """Returns a weight for each token `[N]`, without gradient, in the dtype of
    `trainer_logprobs_N`."""
    if resolved.method == "none":
        return torch.ones_like(trainer_logprobs_N)
    ratios_N = log_ratios(
        trainer_logprobs_N, sampler_logprobs_N, sequences_N, num_sequences, resolved
    ).exp()
    if resolved.method in ("token_tis", "sequence_tis"):
        weights_N = ratios_N.clamp(resolved.low, resolved.high)
    else:
        weights_N = torch.where(
            (ratios_N < resolved.low) | (ratios_N > resolved.high), 0.0, ratios_N
        )
    return weights_N.to(trainer_logprobs_N.dtype)


def log_ratios(
    trainer_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    sequences_N: Tensor,
    num_sequences: int,
    resolved: Resolved,
) -> Tensor:
    """Returns log w `[N]` in float64: of each token, or for the sequence methods the sum over its
    sequence."""
    log_ratio_N = trainer_logprobs_N.double() - sampler_logprobs_N.double()
    return (
        sequence_sums(log_ratio_N, sequences_N, num_sequences)
        if resolved.of_sequences
        else log_ratio_N
    )
