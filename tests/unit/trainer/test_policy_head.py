"""The tiled head against plain torch: values, every gradient, and how much exists at a time."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from services.trainer.learning import head as head_module
from services.trainer.learning.head import ScoringHead, as_scoring_head


def small_tiles(monkeypatch, logits: int) -> None:
    monkeypatch.setattr(head_module, "TILE_LOGITS", {"cpu": logits})


def plain(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor, temperature: float):
    distribution = torch.distributions.Categorical(
        logits=nn.functional.linear(hidden, head.weight, head.bias) / temperature
    )
    return distribution.log_prob(targets), distribution.entropy()


@pytest.mark.parametrize("tile", [1, 7, 12, 1 << 20])
@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_tiled_scores_and_gradients_equal_those_of_torch(monkeypatch, tile, chunk):
    small_tiles(monkeypatch, tile)
    torch.manual_seed(0)
    head, hidden, targets = nn.Linear(4, 11), 2 * torch.randn(5, 4), torch.tensor([0, 10, 3, 3, 7])
    upstream = torch.randn(5)
    results = []
    for score in (plain, lambda *args: as_scoring_head(args[0])(*args[1:], chunk)):
        leaf = hidden.clone().requires_grad_()
        logprobs, entropies = score(head, leaf, targets, 0.7)
        gradients = torch.autograd.grad(logprobs, [leaf, head.weight, head.bias], upstream)
        results.append([logprobs, entropies, *gradients])
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_that_of_the_values_to_double_precision(monkeypatch):
    small_tiles(monkeypatch, 12)
    torch.manual_seed(1)
    head, targets = as_scoring_head(nn.Linear(3, 9).double()), torch.tensor([0, 8, 4, 4])
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def logprobs(hidden, weight, bias):
        return torch.func.functional_call(
            head, {"weight": weight, "bias": bias}, (hidden, targets, 1.3, 3)
        )[0]

    assert torch.autograd.gradcheck(logprobs, (hidden, head.weight, head.bias))


def test_the_entropy_carries_no_gradient_and_frozen_weights_get_none():
    head = as_scoring_head(nn.Linear(4, 7).requires_grad_(False))
    hidden = torch.randn(5, 4, requires_grad=True)
    logprobs, entropies = head(hidden, torch.arange(5), 1.0, 2)
    assert not entropies.requires_grad
    logprobs.sum().backward()
    expected = torch.autograd.grad(plain(head, hidden, torch.arange(5), 1.0)[0].sum(), hidden)[0]
    torch.testing.assert_close(hidden.grad, expected)
    assert head.weight.grad is None and head.bias.grad is None


def test_a_frozen_body_still_trains_the_head():
    head = as_scoring_head(nn.Linear(4, 7, bias=False))
    hidden = torch.randn(5, 4)
    head(hidden, torch.arange(5), 1.0, 2)[0].sum().backward()
    expected = torch.autograd.grad(plain(head, hidden, torch.arange(5), 1.0)[0].sum(), head.weight)[
        0
    ]
    torch.testing.assert_close(head.weight.grad, expected)


def test_huge_logits_give_finite_scores_as_close_as_float32_is(monkeypatch):
    small_tiles(monkeypatch, 8)
    head = as_scoring_head(nn.Linear(1, 6, bias=False))
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[-3e4], [0.0], [3e4], [2.9999e4], [-1e30], [1.0]]))
    logprobs, entropies = head(torch.ones(3, 1), torch.tensor([2, 3, 0]), 1.0, 2)
    # Only the logits 30000 and 29999 count: p = 1 / (1 + e^-1) = 0.731059 and 0.268941.
    torch.testing.assert_close(logprobs, torch.tensor([-0.3132617, -1.3132617, -60000.313]))
    torch.testing.assert_close(entropies, torch.full((3,), 0.5822031))


def test_a_nan_anywhere_is_not_hidden(monkeypatch):
    small_tiles(monkeypatch, 8)
    hidden = torch.randn(3, 4)
    hidden[1, 2] = float("nan")
    logprobs, _ = as_scoring_head(nn.Linear(4, 7))(hidden, torch.arange(3), 1.0, 2)
    assert logprobs.isnan().tolist() == [False, True, False]


def test_no_tensor_is_larger_than_a_tile_or_the_weight(monkeypatch):
    small_tiles(monkeypatch, 64)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    head = as_scoring_head(nn.Linear(2, 100, bias=False))
    with Watch():
        head(
            torch.randn(1000, 2, requires_grad=True), torch.zeros(1000, dtype=torch.long), 1.0, 16
        )[0].sum().backward()
    assert largest == 1000 * 2  # the hidden states; whole logits would be 1000 x 100


def test_bfloat16_weights_are_scored_in_float32():
    torch.manual_seed(2)
    head, hidden, targets = (
        nn.Linear(64, 500, bias=False).bfloat16(),
        torch.randn(40, 64).bfloat16(),
        torch.arange(40),
    )
    exact = nn.Linear(64, 500, bias=False)
    exact.weight.data = head.weight.data.float()
    expected = plain(exact, hidden.float(), targets, 1.0)[0]
    expected.sum().backward()
    logprobs, entropies = as_scoring_head(head)(hidden, targets, 1.0, 16)
    logprobs.sum().backward()
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert head.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=0.02)
    error = (head.weight.grad.float() - exact.weight.grad).norm() / exact.weight.grad.norm()
    assert error < 0.01


def test_only_a_plain_linear_layer_is_made_to_score():
    class Scaled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    linear = nn.Linear(2, 3)
    assert as_scoring_head(linear) is linear and isinstance(linear, ScoringHead)
    assert as_scoring_head(linear) is linear
    assert as_scoring_head(Scaled(2, 3)) is None
    assert as_scoring_head(nn.Sequential(nn.Linear(2, 3))) is None
    hidden = torch.randn(4, 2)
    torch.testing.assert_close(
        linear(hidden), nn.functional.linear(hidden, linear.weight, linear.bias)
    )
