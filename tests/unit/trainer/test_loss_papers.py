"""Losses and gradients against the papers' objectives, written out here sequence by sequence and
token by token, in float64.

Ours run in float32, as in training: the relative error is at most 1e-5, of the loss to the sum of
its terms' sizes (which is the loss itself where nothing cancels) and of each token's gradient by
itself, down to 1e-7, where the derivative of a saturated sigmoid has no more digits in float32.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.trainer.learning.loss import LossInputs
from shared.job import TrainingSpec
from tests.support.loss_batches import loss_and_gradient, random_batch

CLOSE = 1e-5

BATCHES: dict[str, tuple[list[int], float]] = {
    "random": ([5, 1, 12, 3, 7, 2], 0.5),
    "one token": ([1], 0.5),
    "one sequence": ([9], 0.5),
    "all of one token": ([1, 1, 1, 1], 0.5),
    "on policy": ([4, 6], 0.0),
    "ratios of 1e6": ([6, 3, 1], 7.0),
}
"""Lengths of the sequences, and how far new log-probs are from old ones (in nats, standard
deviation)."""


@dataclass(frozen=True)
class Sequence:
    """One completion: log-probs `[T]` as lists of numbers, its advantage, and its correction
    weights `[T]`."""

    new: list[Tensor]
    old: list[Tensor]
    reference: list[Tensor]
    weights: list[Tensor]
    advantage: Tensor

    def __len__(self) -> int:
        return len(self.new)

    def ratios(self, training: TrainingSpec) -> list[Tensor]:
        logs = [new - old for new, old in zip(self.new, self.old, strict=True)]
        if training.importance == "sequence" or training.loss == "gspo":
            logs = [sum(logs, torch.tensor(0.0)) / len(logs)] * len(logs)
        limit = training.max_log_ratio
        return [torch.exp(torch.clamp(log, -limit, limit)) for log in logs]


def ppo_term(ratio: Tensor, new: Tensor, advantage: Tensor, training: TrainingSpec) -> Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A), and at least c A where A < 0: arXiv 1707.06347,
    2503.14476, 1912.09729."""
    clipped = min(
        max(ratio, torch.tensor(1.0 - training.clip_low)), torch.tensor(1.0 + training.clip_high)
    )
    term = min(ratio * advantage, clipped * advantage)
    if training.dual_clip is not None and advantage < 0:
        term = max(term, training.dual_clip * advantage)
    return term


def cispo_term(ratio: Tensor, new: Tensor, advantage: Tensor, training: TrainingSpec) -> Tensor:
    """sg(min(r, 1 + high)) A log pi: arXiv 2506.13585."""
    return min(ratio.item(), 1.0 + training.clip_high) * advantage * new


def sapo_term(ratio: Tensor, new: Tensor, advantage: Tensor, training: TrainingSpec) -> Tensor:
    """f(r) A with f(x) = 4 / tau * sigmoid(tau (x - 1)): arXiv 2511.20347."""
    tau = training.tau_positive if advantage > 0 else training.tau_negative
    return 4.0 / tau / (1.0 + torch.exp(-tau * (ratio - 1.0))) * advantage


TERMS: dict[str, Callable[[Tensor, Tensor, Tensor, TrainingSpec], Tensor]] = {
    "cispo": cispo_term,
    "sapo": sapo_term,
}


def kl(new: Tensor, reference: Tensor, name: str, limit: float) -> Tensor:
    """joschu.net/blog/kl-approx.html, with r = reference / new; `k3_true`: k2's gradient."""
    log_r = torch.clamp(reference - new, -limit, limit)
    estimates = {"k1": -log_r, "k2": log_r**2 / 2, "k3": torch.exp(log_r) - 1 - log_r}
    if name != "k3_true":
        return estimates[name]
    return estimates["k3"].detach() + estimates["k2"] - estimates["k2"].detach()


def token_weight(
    sequence: Sequence, sequences: list[Sequence], training: TrainingSpec, max_tokens: int
) -> float:
    """What a token of this sequence counts in the mean."""
    if training.loss in ("grpo", "gspo", "sapo"):
        return 1 / len(sequence) / len(sequences)
    if training.loss == "dr_grpo":
        return 1 / len(sequences) / max_tokens
    return 1 / sum(len(other) for other in sequences)


def transcribed(
    sequences: list[Sequence], training: TrainingSpec, max_tokens: int
) -> tuple[Tensor, float]:
    """The loss, and the sum of the sizes of its terms."""
    terms = []
    for sequence in sequences:
        share = token_weight(sequence, sequences, training, max_tokens)
        for t, ratio in enumerate(sequence.ratios(training)):
            term = TERMS.get(training.loss, ppo_term)(
                ratio, sequence.new[t], sequence.advantage, training
            )
            divergence = kl(
                sequence.new[t], sequence.reference[t], training.kl, training.max_log_ratio
            )
            terms += [-share * sequence.weights[t] * term, share * training.beta * divergence]
    return sum(terms, torch.tensor(0.0)), sum(abs(term.item()) for term in terms)


def in_sequences(x: LossInputs, new_N: Tensor) -> list[Sequence]:
    """The batch as the papers see it, in float64."""

    def column(values_N: Tensor, chosen_N: Tensor) -> list[Tensor]:
        return list(values_N.double()[chosen_N])

    assert x.reference_logprobs_N is not None
    return [
        Sequence(
            *(
                column(values_N, x.sequences_N == i)
                for values_N in (new_N, x.old_logprobs_N, x.reference_logprobs_N, x.weights_N)
            ),
            advantage=column(x.advantages_N, x.sequences_N == i)[0],
        )
        for i in range(int(x.sequences_N.max()) + 1)
    ]


def check(x: LossInputs) -> None:
    new_N = x.logprobs_N.double().requires_grad_()
    expected, size = transcribed(in_sequences(x, new_N), x.training, x.denominators.max_tokens)
    (expected_N,) = torch.autograd.grad(expected, new_N)
    loss, gradient_N = loss_and_gradient(x)
    assert math.isfinite(expected.item())
    assert loss == pytest.approx(expected.item(), rel=0, abs=CLOSE * size)
    torch.testing.assert_close(gradient_N.double(), expected_N, rtol=CLOSE, atol=1e-7)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "gspo"])
def test_losses_and_gradients_are_the_papers(loss, importance, batch):
    lengths, spread = BATCHES[batch]
    for seed, dual_clip, beta in ((0, None, 0.0), (1, 3.0, 0.0), (2, 1.1, 0.04)):
        training = TrainingSpec(
            loss=loss,
            importance=importance,
            dual_clip=dual_clip,
            beta=beta,
            clip_low=0.1,
            clip_high=0.3,
        )
        check(random_batch(lengths, seed, training, torch.float32, spread))


@pytest.mark.parametrize(
    ("name", "loss"),
    list(itertools.product(["k1", "k2", "k3", "k3_true"], ["dapo", "grpo", "dr_grpo"])),
)
def test_the_divergence_and_its_gradient_are_the_estimators(name, loss):
    for spread in (0.01, 0.5, 7.0):
        training = TrainingSpec(loss=loss, beta=0.3, kl=name)
        x = random_batch([4, 1, 6], 5, training, torch.float32, spread)
        check(x)
        check(dataclasses.replace(x, advantages_N=torch.zeros_like(x.advantages_N)))
