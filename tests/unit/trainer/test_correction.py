"""Correction weights against numbers worked out by hand."""

import math

import pytest
import torch
from pydantic import ValidationError

from services.trainer.learning.correction import CorrectionSettings, correction_weights, resolve
from shared.errors import BadRequest
from shared.job import CorrectionSpec

RATIOS = [4.0, 0.25, 1.5, 3.0, 0.4, 1.0]
"""w of each token: two sequences of three tokens. Products 1.5 and 1.2."""


def weights(
    method: str, ratios=RATIOS, lengths=(3, 3), low=None, high=None, sequence_ratio="product"
) -> list[float]:
    sampler_N = torch.full((len(ratios),), -1.0)
    trainer_N = sampler_N + torch.tensor(ratios).log()
    sequences_N = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    spec = CorrectionSpec.model_validate(
        {"method": method, "low": low, "high": high, "sequence_ratio": sequence_ratio}
    )
    resolved = resolve(spec, max_staleness=0)
    return correction_weights(trainer_N, sampler_N, sequences_N, len(lengths), resolved).tolist()


def test_token_tis_truncates_each_tokens_weight_by_hand():
    assert weights("token_tis") == pytest.approx([2.0, 0.25, 1.5, 2.0, 0.4, 1.0], rel=1e-5)
    assert weights("token_tis", low=0.5, high=1.2) == pytest.approx(
        [1.2, 0.5, 1.2, 1.2, 0.5, 1.0], rel=1e-5
    )


def test_a_token_is_weighed_by_the_version_that_sampled_it_by_hand():
    # Four tokens of one completion that now have probability 0.5. The first two were sampled by
    # weights that gave them 0.4 and 0.8, the others by weights that gave them 0.5 and 0.25. Taken
    # to either weights alone, some w would be another. Product 1.25 * 0.625 * 1 * 2.
    sampled_with = [0.4, 0.8, 0.5, 0.25]
    ratios = [0.5 / probability for probability in sampled_with]
    assert weights("token_tis", ratios, (4,)) == pytest.approx([1.25, 0.625, 1.0, 2.0], rel=1e-5)
    assert weights("sequence_tis", ratios, (4,)) == pytest.approx([1.5625] * 4, rel=1e-5)


def test_sequence_tis_truncates_the_product_by_hand():
    assert weights("sequence_tis") == pytest.approx([1.5] * 3 + [1.2] * 3, rel=1e-5)
    assert weights("sequence_tis", high=1.3) == pytest.approx([1.3] * 3 + [1.2] * 3, rel=1e-5)


def test_sequence_mask_rejects_whole_sequences_and_leaves_others_their_product():
    assert weights("sequence_mask", high=1.3) == pytest.approx([0.0] * 3 + [1.2] * 3, rel=1e-5)
    assert weights("sequence_mask", low=1.3) == pytest.approx([1.5] * 3 + [0.0] * 3, rel=1e-5)


def test_the_geometric_mean_of_a_sequence_is_weighed_as_its_product_is_by_hand():
    # (4 * 0.25 * 1.5)^(1/3) = 1.144714 and (3 * 0.4 * 1)^(1/3) = 1.062659.
    geometric = {"sequence_ratio": "geometric_mean"}
    first, second = [1.144714] * 3, [1.062659] * 3
    assert weights("sequence_tis", **geometric) == pytest.approx([*first, *second], rel=1e-5)
    assert weights("sequence_tis", high=1.1, **geometric) == pytest.approx(
        [1.1, 1.1, 1.1, *second], rel=1e-5
    )
    assert weights("sequence_mask", **geometric) == [0.0] * 6  # its own bounds: 0.99 to 1.01
    assert weights("sequence_mask", low=0.9, high=1.1, **geometric) == pytest.approx(
        [0.0, 0.0, 0.0, *second], rel=1e-5
    )
    assert weights("token_tis", **geometric) == weights("token_tis")


def test_a_long_completions_product_vanishes_and_its_geometric_mean_does_not():
    # 10,000 tokens that differ by -0.001 nats each: e^-10 and e^-0.001.
    ratios = [math.exp(-0.001)] * 10_000
    (product,) = set(weights("sequence_tis", ratios, (10_000,)))
    (geometric,) = set(weights("sequence_tis", ratios, (10_000,), sequence_ratio="geometric_mean"))
    assert product == pytest.approx(math.exp(-10), rel=1e-3)
    assert geometric == pytest.approx(math.exp(-0.001), rel=1e-5)
    masked = weights("sequence_mask", ratios, (10_000,), low=0.1)
    assert set(masked) == {0.0}
    kept = weights("sequence_mask", ratios, (10_000,), sequence_ratio="geometric_mean")
    assert set(kept) == {geometric}


def test_icepop_rejects_tokens_outside_its_bounds_on_both_sides_by_hand():
    assert weights("icepop") == pytest.approx([4.0, 0.0, 1.5, 3.0, 0.0, 1.0], rel=1e-5)
    assert weights("icepop", high=2.0) == pytest.approx([0.0, 0.0, 1.5, 0.0, 0.0, 1.0], rel=1e-5)


def test_bounds_are_within():
    assert weights("icepop", [1.0, 1.0], (2,), low=1.0, high=1.0) == [1.0, 1.0]


def test_without_correction_every_weight_is_one():
    assert weights("none") == [1.0] * 6


def test_weights_carry_no_gradient():
    trainer_N = torch.tensor([-1.0, -2.0], requires_grad=True)
    result = correction_weights(
        trainer_N,
        torch.tensor([-1.0, -1.0]),
        torch.tensor([0, 0]),
        1,
        CorrectionSettings("token_tis", 0, 2),
    )
    assert not result.requires_grad


@pytest.mark.parametrize(
    ("method", "infinite", "zero"),
    [
        ("token_tis", 2.0, 0.0),
        ("sequence_tis", 2.0, 0.0),
        ("sequence_mask", 0.0, 0.0),
        ("icepop", 0.0, 0.0),
    ],
)
def test_infinite_log_probs_and_ratios_beyond_float32_are_bounded(method, infinite, zero):
    sampler_N = torch.tensor([-math.inf, -900.0, -1.0, -1.0])
    trainer_N = torch.tensor([-1.0, -1.0, -math.inf, -900.0])
    resolved = resolve(CorrectionSpec(method=method), 0)
    result = correction_weights(trainer_N, sampler_N, torch.arange(4), 4, resolved)
    assert result.tolist() == [infinite, infinite, zero, zero]


@pytest.mark.parametrize("method", ["token_tis", "sequence_tis", "sequence_mask", "icepop"])
def test_nan_is_never_hidden(method):
    trainer_N = torch.tensor([math.nan, -math.inf, -1.0])
    sampler_N = torch.tensor([-1.0, -math.inf, math.nan])
    resolved = resolve(CorrectionSpec(method=method), 0)
    assert correction_weights(trainer_N, sampler_N, torch.arange(3), 3, resolved).isnan().all()


def test_the_product_of_a_long_sequence_keeps_its_digits():
    # 20000 tokens, each off by about 3e-4 nats: e^6, summed in float64 (in float32 the third digit
    # would be wrong).
    trainer_N, sampler_N = torch.full((20000,), -1.0), torch.full((20000,), -1.0003)
    difference = trainer_N[0].item() - sampler_N[0].item()
    resolved = CorrectionSettings("sequence_tis", 0, 1000)
    (value,) = set(
        correction_weights(trainer_N, sampler_N, torch.zeros(20000).long(), 1, resolved).tolist()
    )
    assert value == pytest.approx(math.exp(20000 * difference), rel=1e-6)


@pytest.mark.parametrize(
    ("method", "low", "high"),
    [
        ("token_tis", 0.0, 2.0),
        ("sequence_tis", 0.0, 2.0),
        ("sequence_mask", 0.0, 3.0),
        ("icepop", 0.5, 5.0),
        ("none", 0.5, 2.0),
    ],
)
def test_bounds_that_are_not_set_are_the_methods(method, low, high):
    assert resolve(CorrectionSpec(method=method), 3) == CorrectionSettings(method, low, high)
    assert resolve(CorrectionSpec(method=method, low=0.1, high=7.0), 0) == CorrectionSettings(
        method, 0.1, 7.0
    )


def test_auto_corrects_only_what_may_be_stale():
    assert resolve(CorrectionSpec(), max_staleness=0).method == "none"
    assert resolve(CorrectionSpec(), max_staleness=1) == CorrectionSettings("token_tis", 0.0, 2.0)


def test_with_the_ratio_taken_to_the_sampler_auto_corrects_nothing_more():
    resolved = resolve(CorrectionSpec(ratio_base="sampler"), max_staleness=3)
    assert (resolved.method, resolved.ratio_base) == ("none", "sampler")
    with pytest.raises(ValidationError, match="the mismatch would be corrected twice"):
        CorrectionSpec(ratio_base="sampler", method="token_tis")


def test_bounds_the_wrong_way_round_are_a_sentence():
    with pytest.raises(
        BadRequest,
        match=r"correction.low is 6 and correction.high 5 with method 'icepop'; expected low <=",
    ):
        resolve(CorrectionSpec(method="icepop", low=6.0), 0)
