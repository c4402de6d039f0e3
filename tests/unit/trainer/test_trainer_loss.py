"""The losses against numbers worked out by hand, and against a transcription of the papers' sums in plain Python."""

import math

import pytest
import torch

from services.trainer.loss import LossInputs, dapo, grpo, importance_ratios, token_losses


def inputs(ratios, advantages, lengths, **kwargs) -> LossInputs:
    """Ratios are given as they are; the old log-probs are -1, the new ones follow."""
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    defaults = {"num_tokens": len(ratios), "num_sequences": 2, "clip_low": 0.2, "clip_high": 0.28}
    return LossInputs(
        logprobs_N=old + torch.tensor(ratios, dtype=torch.float64).log(),
        old_logprobs_N=old,
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        lengths_N=torch.tensor(lengths),
        **(defaults | kwargs),
    )


def test_token_losses_by_hand():
    # A > 0 is capped at 1.28 A from above and not bounded below; A < 0 is floored at 0.8 A and not bounded above.
    x = inputs([1.0, 2.0, 0.5, 2.0, 0.5, 1.1], [1.0, 1.0, 1.0, -1.0, -1.0, 2.0], [6] * 6)
    assert token_losses(x).tolist() == pytest.approx([-1.0, -1.28, -0.5, 2.0, 0.8, -2.2])


def test_dapo_is_the_mean_over_all_tokens_by_hand():
    # Sequence 1 (A=1): ratios 1, 2, 0.5 -> -1, -1.28, -0.5. Sequence 2 (A=-1): ratio 0.5 -> 0.8. Sum -1.98 over 4 tokens.
    x = inputs([1.0, 2.0, 0.5, 0.5], [1.0, 1.0, 1.0, -1.0], [3, 3, 3, 1])
    assert dapo(x).item() == pytest.approx(-1.98 / 4)


def test_grpo_is_the_mean_of_sequence_means_by_hand():
    # The same tokens: sequence means -2.78/3 and 0.8, over 2 sequences.
    x = inputs([1.0, 2.0, 0.5, 0.5], [1.0, 1.0, 1.0, -1.0], [3, 3, 3, 1])
    assert grpo(x).item() == pytest.approx((-2.78 / 3 + 0.8) / 2)


def test_a_ratio_beyond_e_to_the_20_is_clamped_and_has_no_gradient():
    logprobs = torch.tensor([30.0, -30.0, 0.5], requires_grad=True)
    ratios = importance_ratios(logprobs, torch.zeros(3))
    assert ratios.tolist() == pytest.approx([math.exp(20), math.exp(-20), math.exp(0.5)], rel=1e-5)
    ratios.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0, math.exp(0.5)])


def test_the_gradient_vanishes_only_where_the_bound_is_active():
    # d(-min(rA, clip(r)A))/dlogprob is -rA where unbounded and 0 where bounded: r=2 with A>0, r=0.5 with A<0.
    x = inputs([2.0, 2.0, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0], [4] * 4)
    logprobs = x.logprobs_N.clone().requires_grad_()
    token_losses(LossInputs(**(vars(x) | {"logprobs_N": logprobs}))).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 2.0, -0.5, 0.0])


@pytest.mark.parametrize("name", ["dapo", "grpo"])
def test_losses_equal_a_plain_transcription(name):
    generator = torch.Generator().manual_seed(3)
    sequences = []
    for length in (1, 4, 9, 2):
        new = -torch.rand(length, generator=generator, dtype=torch.float64) * 3
        old = -torch.rand(length, generator=generator, dtype=torch.float64) * 3
        sequences.append((new.tolist(), old.tolist(), torch.randn(1, generator=generator).item()))
    expected = transcribed(name, sequences, 0.1, 0.3)
    lengths = [len(new) for new, _, _ in sequences]
    x = LossInputs(
        logprobs_N=torch.tensor([value for new, _, _ in sequences for value in new], dtype=torch.float64),
        old_logprobs_N=torch.tensor([value for _, old, _ in sequences for value in old], dtype=torch.float64),
        advantages_N=torch.tensor([a for new, _, a in sequences for _ in new], dtype=torch.float64),
        lengths_N=torch.tensor([length for length in lengths for _ in range(length)]),
        num_tokens=sum(lengths),
        num_sequences=len(sequences),
        clip_low=0.1,
        clip_high=0.3,
    )
    assert {"dapo": dapo, "grpo": grpo}[name](x).item() == pytest.approx(expected, rel=1e-12)


def transcribed(name, sequences, clip_low, clip_high):
    """The objective as the papers print it, one token at a time, negated."""
    total_tokens = sum(len(new) for new, _, _ in sequences)
    objective = 0.0
    for new, old, advantage in sequences:
        for logprob, old_logprob in zip(new, old, strict=True):
            ratio = math.exp(logprob - old_logprob)
            bounded = max(1 - clip_low, min(1 + clip_high, ratio))
            term = min(ratio * advantage, bounded * advantage)
            objective += term / total_tokens if name == "dapo" else term / len(new) / len(sequences)
    return -objective


@pytest.mark.parametrize("loss", [dapo, grpo])
def test_shares_of_any_split_add_up_to_the_loss(loss):
    ratios, advantages, lengths = [1.0, 2.0, 0.5, 0.5, 1.2], [1.0, 1.0, 1.0, -1.0, -1.0], [3, 3, 3, 2, 2]
    whole = loss(inputs(ratios, advantages, lengths)).item()
    parts = [loss(inputs(ratios[a:b], advantages[a:b], lengths[a:b], num_tokens=5)).item() for a, b in ((0, 1), (1, 3), (3, 5))]
    assert sum(parts) == pytest.approx(whole)
