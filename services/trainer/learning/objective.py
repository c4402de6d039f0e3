"""Prepares a micro-batch's log-probs for the loss: the ratio's denominators, and the correction's
weights."""

from __future__ import annotations

import torch
from torch import Tensor

from services.trainer.learning.batch import MicroBatch
from services.trainer.learning.correction import Resolved, correction_weights
from services.trainer.learning.loss import Denominators, LossInputs
from shared.job import TrainingSpec


def loss_inputs(
    batch: MicroBatch,
    logprobs_N: Tensor,
    *,
    before_N: Tensor | None = None,
    first: bool = False,
    reference_N: Tensor | None = None,
    correction: Resolved,
    denominators: Denominators,
    training: TrainingSpec,
) -> LossInputs:
    """Returns the loss's inputs. `before_N` are the trainer's log-probs before the first update of
    the batch; None: this is the first update, and they are `logprobs_N`.

    `first`: this is the first update, so its ratio is taken to `logprobs_N` and is exactly 1. With
    `before_N`, dropout's noise would be clipped as if training had changed the policy.
    """
    now_N = logprobs_N.detach()
    trainer_N = now_N if first or before_N is None else before_N
    before_N = now_N if before_N is None else before_N
    sampler_N = known_sampler_logprobs(batch, before_N)
    return LossInputs(
        logprobs_N=logprobs_N,
        old_logprobs_N=sampler_N if correction.ratio_base == "sampler" else trainer_N,
        reference_logprobs_N=reference_N,
        advantages_N=batch.advantages_N,
        weights_N=correction_weights(
            before_N, sampler_N, batch.sequences_N, batch.num_sequences, correction
        ),
        sequences_N=batch.sequences_N,
        lengths_N=batch.lengths_N,
        denominators=denominators,
        training=training,
    )


def known_sampler_logprobs(batch: MicroBatch, trainer_logprobs_N: Tensor) -> Tensor:
    """Returns the sampler's log-probs `[N]`, and the trainer's where they were not measured."""
    return torch.where(batch.measured_N, batch.sampler_logprobs_N, trainer_logprobs_N)
