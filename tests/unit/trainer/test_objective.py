"""What the importance ratio is taken to: the trainer's own log-probs by default, so that the noise
between two engines is not clipped."""

import math
from typing import Any

import pytest
import torch

from services.trainer.learning.batch import MicroBatch, collate
from services.trainer.learning.correction import loss_inputs, resolve
from services.trainer.learning.loss import Denominators, LossInputs, importance_ratios, total_loss
from shared.job import CorrectionSpec, TrainingSpec
from shared.wire import Example

LENGTH = 512
NOISE = 0.01
GSPO = TrainingSpec(loss="gspo", clip_low=3e-4, clip_high=4e-4)
"""At the bounds of its paper, arXiv 2507.18071, section 5.1."""


def on_policy(num_sequences: int) -> tuple[MicroBatch, torch.Tensor]:
    """Completions that the trainer itself could have sampled, and its log-probs of them: the
    sampler's differ by noise of 0.01 nats per token and nothing else."""
    generator = torch.Generator().manual_seed(0)
    logprobs_ST = -0.01 * 2000 ** torch.rand(num_sequences, LENGTH, generator=generator)
    sampler_ST = logprobs_ST + NOISE * torch.randn(num_sequences, LENGTH, generator=generator)
    examples = [
        Example(
            prompt_token_ids=(1,),
            token_ids=(2,) * LENGTH,
            old_logprobs=sampler_T.tolist(),
            advantage=1.0 if index % 2 else -1.0,
        )
        for index, sampler_T in enumerate(sampler_ST)
    ]
    return collate(examples), logprobs_ST.flatten().requires_grad_()


def inputs_of(
    batch: MicroBatch,
    logprobs_N: torch.Tensor,
    correction: CorrectionSpec | None = None,
    spec: TrainingSpec | None = None,
    *,
    max_staleness: int = 0,
    **before: Any,
) -> LossInputs:
    return loss_inputs(
        batch,
        logprobs_N,
        correction=resolve(correction or CorrectionSpec(), max_staleness),
        denominators=Denominators(batch.num_sequences, 1, 1, max_tokens=LENGTH),
        spec=spec or TrainingSpec(),
        **before,
    )


def silenced(correction: CorrectionSpec) -> tuple[float, torch.Tensor]:
    """Returns the share of sequences whose gradient is zero, and the gradient `[S, T]`."""
    num_sequences = 400
    batch, logprobs_N = on_policy(num_sequences)
    x = inputs_of(batch, logprobs_N, correction, GSPO)
    (gradient_N,) = torch.autograd.grad(total_loss(x), logprobs_N)
    gradient_ST = gradient_N.view(num_sequences, LENGTH)
    return (gradient_ST == 0).all(1).double().mean().item(), gradient_ST


def test_gspo_at_its_bounds_is_not_clipped_by_the_noise_between_two_engines():
    # The ratio is 1, so each token's gradient equals the gradient of -A / (S T), to the bit.
    share, gradient_ST = silenced(CorrectionSpec())
    assert share == 0.0
    expected = torch.where(torch.arange(400) % 2 == 1, -1.0, 1.0)[:, None] / (400 * LENGTH)
    torch.testing.assert_close(gradient_ST, expected.expand(400, LENGTH), rtol=1e-6, atol=0)


def test_with_the_ratio_taken_to_the_sampler_noise_silences_a_fifth_of_sequences():
    # The mean of 512 noises of 0.01 has a deviation of 4.4e-4: beyond -3e-4 with probability 0.25
    # (A < 0), beyond 4e-4 with 0.18 (A > 0).
    share, _ = silenced(CorrectionSpec(ratio_base="sampler"))
    deviation = NOISE / math.sqrt(LENGTH)
    expected = sum(math.erfc(b / deviation / math.sqrt(2)) / 2 for b in (3e-4, 4e-4)) / 2
    assert expected == pytest.approx(0.216, abs=1e-3)
    assert share == pytest.approx(expected, abs=0.05)


def test_the_first_updates_ratio_is_exactly_1_and_weights_are_taken_to_the_sampler():
    batch, logprobs_N = on_policy(4)
    x = inputs_of(batch, logprobs_N, max_staleness=1)
    assert (importance_ratios(x) == 1).all()
    expected = (logprobs_N.detach() - batch.sampler_logprobs_N).exp()
    torch.testing.assert_close(x.weights_N, expected, rtol=1e-4, atol=0)


def test_later_updates_are_compared_with_the_log_probs_before_the_first():
    batch, logprobs_N = on_policy(2)
    x = inputs_of(batch, logprobs_N, before_N=logprobs_N.detach() - 0.1)
    assert importance_ratios(x).tolist() == pytest.approx([math.exp(0.1)] * 1024, rel=1e-5)


def test_noise_between_the_frozen_and_the_first_training_pass_is_not_in_the_ratio():
    # Dropout: the first update's log-probs are not those before it; weights are of the latter.
    batch, logprobs_N = on_policy(2)
    before_N = logprobs_N.detach() - 0.1
    correction = CorrectionSpec(method="token_tis", high=9.0)
    x = inputs_of(batch, logprobs_N, correction, GSPO, before_N=before_N, first=True)
    assert (importance_ratios(x) == 1).all()
    expected = (before_N - batch.sampler_logprobs_N).exp()
    torch.testing.assert_close(x.weights_N, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("base", ["trainer", "sampler"])
def test_an_unknown_sampler_is_taken_to_be_the_trainer(base):
    # Two examples of two tokens; no one measured the log-probs of the second one.
    known = Example(prompt_token_ids=(1,), token_ids=(2, 3), old_logprobs=(-1, -3), advantage=1.0)
    unknown = Example(prompt_token_ids=(1,), token_ids=(2, 3), advantage=1.0)
    logprobs_N = torch.tensor([-2.0, -2.0, -5.0, -6.0], requires_grad=True)
    for method in ("token_tis", "sequence_tis") if base == "trainer" else ("none",):
        correction = CorrectionSpec(method=method, ratio_base=base, high=9.0)
        x = inputs_of(collate([known, unknown]), logprobs_N, correction)
        e = math.e
        ratios = [1, 1, 1, 1] if base == "trainer" else [1 / e, e, 1, 1]
        weights = [1 / e, e, 1, 1] if method == "token_tis" else [1, 1, 1, 1]
        assert importance_ratios(x).tolist() == pytest.approx(ratios)
        assert x.weights_N.tolist() == pytest.approx(weights)
