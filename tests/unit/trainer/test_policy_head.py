"""The tiled head against plain torch: values, every gradient, and how much exists at a time."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from services.trainer.learning import head as head_module
from services.trainer.learning.head import CandidateTokens, ScoringHead, as_scoring_head
from services.trainer.learning.policy import chunked_logprobs


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


@pytest.mark.parametrize("tile", [1, 12])
@pytest.mark.parametrize("cap", [None, 10.0], ids=["plain", "capped, some tokens"])
def test_the_gradient_is_that_of_the_values_to_double_precision(monkeypatch, tile, cap):
    small_tiles(monkeypatch, tile)
    torch.manual_seed(1)
    head, targets = as_scoring_head(nn.Linear(3, 9).double()), torch.tensor([0, 8, 4, 4])
    hidden = ((20 if cap else 1) * torch.randn(4, 3, dtype=torch.float64)).requires_grad_()
    kept = CandidateTokens.of([0, 5, 4, 7], [2, 0, 2, 0]) if cap else None

    def logprobs(hidden, weight, bias):
        return torch.func.functional_call(
            head, {"weight": weight, "bias": bias}, (hidden, targets, 1.3, 3, kept, cap)
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


@pytest.mark.slow
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
        head(torch.randn(200, 2, requires_grad=True), torch.zeros(200, dtype=torch.long), 1.0, 16)[
            0
        ].sum().backward()
    assert largest == 200 * 2  # the hidden states; whole logits would be 200 x 100


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
def test_bfloat16_weights_are_scored_in_float32_at_logits_as_models_have_them(bias):
    # Logits of deviation 8, so up to 30 and more, over 32,768 tokens. In bfloat16 a logit of 30 is
    # off by up to 0.0625.
    torch.manual_seed(2)
    head = nn.Linear(256, 32_768, bias=bias)
    with torch.no_grad():
        head.weight.normal_()
    head = head.bfloat16()
    hidden = (0.5 * torch.randn(48, 256)).bfloat16().requires_grad_()
    exact = nn.Linear(256, 32_768, bias=bias).double()
    exact.load_state_dict({name: value.double() for name, value in head.state_dict().items()})
    exact_hidden = hidden.detach().double().requires_grad_()
    logits = exact(exact_hidden)
    assert logits.abs().max() > 30
    targets = logits.detach().softmax(-1).multinomial(1)[:, 0]  # as sampled
    expected, expected_entropies = plain(exact, exact_hidden, targets, 1.0)
    expected.sum().backward()
    logprobs, entropies = as_scoring_head(head)(hidden, targets, 1.0, 16)
    logprobs.sum().backward()
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(entropies.double(), expected_entropies, rtol=0, atol=1e-4)
    assert head.weight.grad.dtype == hidden.grad.dtype == torch.bfloat16
    for ours, theirs in ((head.weight, exact.weight), (hidden, exact_hidden)):
        error = (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()
        assert error < 0.005


def restricted(head: nn.Linear, hidden, targets, temperature, kept_ids: list[list[int]]):
    """As `plain`, over the ids of each token alone; none: over all."""
    logits = nn.functional.linear(hidden, head.weight, head.bias) / temperature
    outside = torch.zeros_like(logits, dtype=torch.bool)
    for row, ids in enumerate(kept_ids):
        if ids:
            outside[row] = True
            outside[row, ids] = False
    logits = logits.masked_fill(outside, -torch.inf)
    logprobs = logits.log_softmax(-1)
    entropies = torch.special.entr(logprobs.exp()).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropies


@pytest.mark.parametrize("tile", [1, 7, 1 << 20])
@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_log_probs_are_renormalized_over_the_tokens_that_could_be_sampled(monkeypatch, tile, chunk):
    small_tiles(monkeypatch, tile)
    torch.manual_seed(3)
    head, hidden, targets = nn.Linear(4, 11), 2 * torch.randn(5, 4), torch.tensor([0, 10, 3, 3, 7])
    kept_ids = [[0, 5, 10], [10], [], [1, 2, 3, 4], [6, 7]]
    kept = CandidateTokens.of([i for ids in kept_ids for i in ids], [len(ids) for ids in kept_ids])
    results = []
    for score in (
        lambda leaf: restricted(head, leaf, targets, 0.7, kept_ids),
        lambda leaf: as_scoring_head(head)(leaf, targets, 0.7, chunk, kept),
        lambda leaf: chunked_logprobs(
            nn.Sequential(head), leaf, targets, 0.7, chunk_tokens=chunk, kept=kept
        ),
    ):
        leaf = hidden.clone().requires_grad_()
        logprobs, entropies = score(leaf)
        gradients = torch.autograd.grad(
            logprobs, [leaf, head.weight, head.bias], torch.arange(5.0) - 2
        )
        results.append([logprobs, entropies, *gradients])
    for ours in results[1:]:
        for expected, value in zip(results[0], ours, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    assert results[1][0][1].item() == 0.0  # the only token that could be sampled


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
