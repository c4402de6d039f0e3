"""Batches for the tests of the losses: from lists, one per sequence, to `LossInputs`, and parts of
them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from services.trainer.learning.loss import Denominators, LossInputs, total_loss
from shared.job import TrainingSpec

DOUBLE = torch.float64


def loss_inputs(
    logprobs_S_T: Sequence[Sequence[float]],
    old_logprobs_S_T: Sequence[Sequence[float]],
    advantages_S: Sequence[float],
    training: TrainingSpec | None = None,
    dtype: torch.dtype = DOUBLE,
    **changes: Any,
) -> LossInputs:
    """The whole step in one micro-batch, without reference and correction unless `changes` say
    otherwise."""
    lengths_S = torch.tensor([len(logprobs) for logprobs in logprobs_S_T])
    num_sequences = len(lengths_S)
    num_tokens = int(lengths_S.sum())
    fields: dict[str, Any] = {
        "logprobs_N": flat(logprobs_S_T, dtype),
        "old_logprobs_N": flat(old_logprobs_S_T, dtype),
        "reference_logprobs_N": None,
        "advantages_N": torch.tensor(advantages_S, dtype=dtype).repeat_interleave(lengths_S),
        "weights_N": torch.ones(num_tokens, dtype=dtype),
        "sequences_N": torch.arange(num_sequences).repeat_interleave(lengths_S),
        "lengths_N": lengths_S.repeat_interleave(lengths_S),
        "in_ratio_N": torch.ones(num_tokens, dtype=torch.bool),
        "denominators": Denominators(num_sequences, num_tokens, num_tokens, max_tokens=16),
        "spec": training or TrainingSpec(),
    }
    return LossInputs(**(fields | changes))


def by_ratio(
    ratios_S_T: Sequence[Sequence[float]], advantages_S: Sequence[float], **changes: Any
) -> LossInputs:
    """As `loss_inputs`, with ratios given as they are: the old log-probs are -1, the new ones
    follow."""
    old_S_T = [[-1.0] * len(ratios) for ratios in ratios_S_T]
    new_S_T = [
        [float(torch.tensor(ratio, dtype=DOUBLE).log()) - 1 for ratio in ratios]
        for ratios in ratios_S_T
    ]
    return loss_inputs(new_S_T, old_S_T, advantages_S, **changes)


def random_batch(
    lengths_S: Sequence[int],
    seed: int,
    training: TrainingSpec,
    dtype: torch.dtype = DOUBLE,
    spread: float = 0.5,
) -> LossInputs:
    """Old log-probs as completions have them, from -0.01 to -20 (log-uniform); new and reference
    ones normally distributed around those. Random weights."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=DOUBLE)

    num_tokens = sum(lengths_S)
    old_N = -0.01 * 2000 ** torch.rand(num_tokens, generator=generator, dtype=DOUBLE)
    x = loss_inputs(
        [[0.0] * length for length in lengths_S],
        [[0.0] * length for length in lengths_S],
        [0.0] * len(lengths_S),
    )
    return dataclasses.replace(
        x,
        logprobs_N=(old_N + spread * normal(num_tokens)).to(dtype),
        old_logprobs_N=old_N.to(dtype),
        reference_logprobs_N=(old_N + spread * normal(num_tokens)).to(dtype),
        advantages_N=normal(len(lengths_S)).to(dtype).repeat_interleave(torch.tensor(lengths_S)),
        weights_N=torch.rand(num_tokens, generator=generator, dtype=DOUBLE).mul(2).to(dtype),
        spec=training,
    )


def part(x: LossInputs, first: int, end: int) -> LossInputs:
    """The micro-batch of the sequences from `first` to before `end`; the totals stay those of the
    step."""
    chosen_N = (x.sequences_N >= first) & (x.sequences_N < end)
    tensors = {
        name: value[chosen_N] for name, value in vars(x).items() if isinstance(value, Tensor)
    }
    return dataclasses.replace(x, **(tensors | {"sequences_N": tensors["sequences_N"] - first}))


def loss_and_gradient(x: LossInputs) -> tuple[float, Tensor]:
    """The loss, and its gradient by the trainer's log-probs `[N]`."""
    logprobs_N = x.logprobs_N.detach().clone().requires_grad_()
    loss = total_loss(dataclasses.replace(x, logprobs_N=logprobs_N))
    (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
    return loss.item(), gradient_N


def flat(values_S_T: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for values in values_S_T for value in values], dtype=dtype)
