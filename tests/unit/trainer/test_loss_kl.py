"""The KL estimators: values by hand, and that gradients are what `KL` says they are, in exact
expectation over a small policy."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from services.trainer.learning.loss import KL, LOSSES, total_loss
from shared.job import TrainingSpec
from tests.support.loss_batches import by_ratio, loss_and_gradient


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", [0.5, -1.0]),
        ("k2", [0.125, 0.5]),
        ("k3", [math.exp(-0.5) - 0.5, math.e - 2]),
        ("k3_true", [math.exp(-0.5) - 0.5, math.e - 2]),
    ],
)
def test_values_by_hand(name, expected):
    # d = logprob - reference is 0.5 and -1; k3 is e^-d - 1 + d.
    logprobs, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert KL[name](logprobs, reference, 20.0).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", KL)
def test_equal_policies_have_neither_divergence_nor_pull(name):
    logprobs = torch.tensor([-1.0, -9.0], requires_grad=True)
    values = KL[name](logprobs, logprobs.detach(), 20.0)
    (gradient,) = torch.autograd.grad(values.sum(), logprobs)
    assert values.tolist() == [0.0, 0.0]
    assert gradient.tolist() == ([1.0, 1.0] if name == "k1" else [0.0, 0.0])


def expected_gradient(name: str, logits_V: Tensor, reference_V: Tensor) -> Tensor:
    """The estimator's gradient by the logits, in exact expectation: every token of the vocabulary
    weighs its probability."""
    logits_V = logits_V.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(0)
    values_V = KL[name](logprobs_V, reference_V, 20.0)
    (gradient_V,) = torch.autograd.grad((logprobs_V.detach().exp() * values_V).sum(), logits_V)
    return gradient_V


def true_gradient(logits_V: Tensor, reference_V: Tensor, reverse: bool) -> Tensor:
    logits_V = logits_V.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(0)
    first_V, second_V = (logprobs_V, reference_V) if reverse else (reference_V, logprobs_V)
    (gradient_V,) = torch.autograd.grad((first_V.exp() * (first_V - second_V)).sum(), logits_V)
    return gradient_V


def test_trap_k1_k3_gradient_only_k2_and_k3_true_have_that_of_the_divergence():
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(6, generator=generator, dtype=torch.float64)
    reference_V = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    to_reference = true_gradient(logits_V, reference_V, reverse=True)
    from_reference = true_gradient(logits_V, reference_V, reverse=False)
    assert (to_reference - from_reference).abs().max() > 0.01
    torch.testing.assert_close(
        expected_gradient("k1", logits_V, reference_V), torch.zeros(6, dtype=torch.float64)
    )
    torch.testing.assert_close(expected_gradient("k2", logits_V, reference_V), to_reference)
    torch.testing.assert_close(expected_gradient("k3", logits_V, reference_V), from_reference)
    torch.testing.assert_close(expected_gradient("k3_true", logits_V, reference_V), to_reference)


@pytest.mark.parametrize("reference", [-math.inf, -1000.0, -21.0])
@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        ("k1", 20.0, 1.0),
        ("k2", 200.0, 20.0),
        ("k3", 19.0, 1.0),  # e^-20 - 1 + 20, and 1 - e^-20
        ("k3_true", 19.0, 20.0),
    ],
)
def test_a_token_far_above_the_reference_is_still_pulled_back(name, value, gradient, reference):
    assert kl_of(name, -1.0, reference) == pytest.approx((value, gradient))


@pytest.mark.parametrize("logprob", [-1000.0, -21.0])
@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        ("k1", -20.0, 1.0),
        ("k2", 200.0, -20.0),
        ("k3", math.exp(20) - 21, 1 - math.exp(20)),
        ("k3_true", math.exp(20) - 21, -20.0),
    ],
)
def test_a_token_far_below_the_reference_is_still_pulled_up(name, value, gradient, logprob):
    assert kl_of(name, logprob, -1.0) == pytest.approx((value, gradient), rel=1e-6)


@pytest.mark.parametrize("name", KL)
def test_an_impossible_token_has_a_finite_divergence_and_no_gradient(name):
    value, gradient = kl_of(name, -math.inf, -1.0)
    assert math.isfinite(value)
    assert gradient == 0.0


@pytest.mark.parametrize("name", KL)
def test_a_divergence_from_nan_is_nan(name):
    assert math.isnan(kl_of(name, math.nan, -1.0)[0])
    assert math.isnan(kl_of(name, -1.0, math.nan)[0])


def kl_of(name: str, logprob: float, reference: float) -> tuple[float, float]:
    """Returns one token's estimate, clamped at 20, and its gradient by the log-prob."""
    logprobs = torch.tensor([logprob], requires_grad=True)
    values = KL[name](logprobs, torch.tensor([reference]), 20.0)
    (gradient,) = torch.autograd.grad(values.sum(), logprobs)
    return values.item(), gradient.item()


@pytest.mark.parametrize("loss", LOSSES)
def test_kl_is_averaged_as_its_loss_is(loss):
    # With advantages of 0 only beta * KL is left; a KL of 1, 2, 3 | 4 by k1.
    training = TrainingSpec(loss=loss, beta=0.1, kl="k1")
    x = by_ratio([[1.0, 1.0, 1.0], [1.0]], [0.0, 0.0], training=training)
    x = dataclasses.replace(
        x, reference_logprobs_N=x.logprobs_N - torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    )
    expected = {
        "grpo": 3.0,
        "gspo": 3.0,
        "sapo": 3.0,
        "dapo": 2.5,
        "cispo": 2.5,
        "bnpo": 2.5,
        "dr_grpo": 10 / 32,
    }[loss]
    assert total_loss(x).item() == pytest.approx(0.1 * expected)


def test_beta_0_needs_no_reference_and_beta_above_0_does():
    x = by_ratio([[1.0]], [1.0])
    assert loss_and_gradient(x)[0] == pytest.approx(-1.0)
    with pytest.raises(ValueError, match=r"beta is 0.1 and there are no reference log-probs"):
        total_loss(dataclasses.replace(x, spec=TrainingSpec(beta=0.1)))
