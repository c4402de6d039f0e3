"""The losses against numbers worked out by hand, and what they make of batches that are hard to
take."""

import dataclasses
import itertools
import math
from typing import get_args

import pytest
import torch

from services.trainer.learning.loss import (
    LOSSES,
    SUMS,
    Denominators,
    LossInputs,
    importance_ratios,
    total_loss,
)
from shared.job import TrainingSpec
from shared.wire import TokenLoss
from shared.wire.training import TokenLossName
from tests.support.loss_batches import by_ratio, loss_and_gradient, loss_inputs, part, random_batch

HAND = [[1.0, 2.0, 0.5], [0.5]]
"""Two sequences of ratios. With advantages 1 and -1 the clipped losses are -1, -1.28, -0.5 and
0.8."""


def test_the_losses_that_a_job_or_a_call_may_name_are_those_of_the_tables():
    assert set(get_args(TrainingSpec.model_fields["loss"].annotation)) == set(LOSSES)
    assert set(get_args(TokenLossName)) == set(SUMS)


def spec(**changes) -> TrainingSpec:
    return TrainingSpec(**changes)


def terms(x: LossInputs) -> torch.Tensor:
    """Each token's loss `[N]`."""
    return LOSSES[x.training.loss].terms(x, importance_ratios(x))


# --- a token's loss ------------------------------------------------------------------------------


def test_clipped_losses_by_hand():
    # A > 0 is capped at 1.28 A from above and not bounded below; A < 0 is floored at 0.8 A and not
    # bounded above.
    x = by_ratio([[1.0, 2.0, 0.5], [2.0, 0.5], [1.1]], [1.0, -1.0, 2.0])
    assert terms(x).tolist() == pytest.approx([-1.0, -1.28, -0.5, 2.0, 0.8, -2.2])


def test_the_gradient_vanishes_only_where_the_bound_is_active():
    # d(-min(rA, clip(r)A))/dlogprob is -rA where unbounded and 0 where bounded: r=2 with A>0, r=0.5
    # with A<0.
    _, gradient = loss_and_gradient(by_ratio([[2.0], [2.0], [0.5], [0.5]], [1.0, -1.0, 1.0, -1.0]))
    assert (gradient * 4).tolist() == pytest.approx([0.0, 2.0, -0.5, 0.0])


def test_dual_clip_bounds_the_loss_of_a_negative_advantage_by_hand():
    # r = 50 and A = -2: the clipped loss is 100, dual clip 3 makes it 3 * 2 = 6, with no gradient.
    # Nothing else changes.
    x = by_ratio([[50.0, 2.0, 0.5], [50.0]], [-2.0, 0.5], training=spec(dual_clip=3.0))
    assert terms(x).tolist() == pytest.approx([6.0, 4.0, 1.6, -0.64])
    _, gradient = loss_and_gradient(x)
    assert (gradient * 4).tolist() == pytest.approx([0.0, 4.0, 0.0, 0.0])


def test_cispo_bounds_the_weight_and_keeps_the_gradient_by_hand():
    # Weights min(r, 1.28): 2 -> 1.28, 0.5 stays. l = -weight A logprob, and its gradient -weight A.
    x = by_ratio([[2.0, 0.5], [2.0]], [1.0, -2.0], training=spec(loss="cispo"))
    logprobs = [math.log(2) - 1, math.log(0.5) - 1, math.log(2) - 1]
    assert terms(x).tolist() == pytest.approx(
        [-1.28 * logprobs[0], -0.5 * logprobs[1], 2.56 * logprobs[2]]
    )
    _, gradient = loss_and_gradient(x)
    assert (gradient * 3).tolist() == pytest.approx([-1.28, -0.5, 2.56])


def test_sapo_gates_with_a_temperature_for_each_sign_by_hand():
    # A = 1: -(4/1) sigmoid(r - 1). A = -1/2: (2/2) sigmoid(2 (r - 1)). At r = 1 both have the
    # gradient of -r A.
    x = by_ratio(
        [[1.0, 2.0], [1.0, 0.5]], [1.0, -0.5], training=spec(loss="sapo", tau_negative=2.0)
    )
    assert terms(x).tolist() == pytest.approx(
        [-2.0, -4 / (1 + math.exp(-1)), 0.5, 1 / (1 + math.exp(1))]
    )
    _, gradient = loss_and_gradient(x)
    assert (gradient[[0, 2]] * 4).tolist() == pytest.approx([-1.0, 0.5])


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens_by_hand():
    # 2, 4, 1 -> (2 * 4 * 1)^(1/3) = 2 for each of the three, and 0.5 for the other. gspo always
    # takes it.
    ratios = [[2.0, 4.0, 1.0], [0.5]]
    for training in (
        spec(importance="sequence"),
        spec(loss="gspo"),
        spec(loss="sapo", importance="sequence"),
    ):
        assert importance_ratios(
            by_ratio(ratios, [1.0, 1.0], training=training)
        ).tolist() == pytest.approx([2, 2, 2, 0.5])


def test_the_gradient_of_a_sequences_ratio_reaches_all_its_tokens_alike():
    # grpo of one sequence with ratio 2 and A = -1: the loss is 2, and its gradient 2 / 4 at each of
    # 4 tokens.
    loss, gradient = loss_and_gradient(
        by_ratio([[4.0, 1.0, 8.0, 0.5]], [-1.0], training=spec(loss="gspo"))
    )
    assert loss == pytest.approx(2.0)
    assert gradient.tolist() == pytest.approx([0.5] * 4)


def test_a_masked_token_does_not_count_in_the_ratio_of_its_sequence():
    # The mean of the first two log ratios is that of 2, and each of 4 losses is 2 as above.
    x = by_ratio([[4.0, 1.0, 8.0, 0.5]], [-1.0], training=spec(loss="gspo"))
    marked_N = torch.tensor([True, True, False, False])
    loss, gradient = loss_and_gradient(dataclasses.replace(x, in_ratio_N=marked_N))
    assert loss == pytest.approx(2.0)
    assert gradient.tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0])


LOG_2 = math.log(2)


@pytest.mark.parametrize(
    ("loss", "expected", "gradient"),
    [
        (TokenLoss(name="cross_entropy"), 2.0, [-1.0, -1.0]),
        (TokenLoss(name="importance_sampling"), -2.5, [-2.0, -0.5]),
        (TokenLoss(name="ppo"), -1.2 - 0.5, [0.0, -0.5]),
        (
            TokenLoss(name="cispo", ratio_low=0.8, ratio_high=1.5),
            1.5 * (1 - LOG_2) + 0.8 * (1 + LOG_2),
            [-1.5, -0.8],
        ),
        (TokenLoss(name="cispo"), 2 * (1 - LOG_2) + 0.5 * (1 + LOG_2), [-2.0, -0.5]),
        (
            TokenLoss(name="dro", beta=2.0),
            2.0 + 2 * LOG_2**2,
            [-1 + 2 * LOG_2, -1 - 2 * LOG_2],
        ),
        (TokenLoss(name="gspo", ratio_low=0.9, ratio_high=1.1), -2.0, [-1.0, -1.0]),
    ],
    ids=str,
)
def test_the_losses_of_calls_by_hand(loss, expected, gradient):
    """Ratios 2 and 1/2 of log-probs log 2 - 1 and -log 2 - 1, and advantages of 1."""
    found, gradient_N = loss_and_gradient(by_ratio([[2.0, 0.5]], [1.0], spec=loss))
    assert found == pytest.approx(expected)
    assert gradient_N.tolist() == pytest.approx(gradient)


# --- averages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("dapo", -1.98 / 4),
        ("bnpo", -1.98 / 4),
        ("grpo", (-2.78 / 3 + 0.8) / 2),
        ("dr_grpo", -1.98 / (2 * 16)),
        ("gspo", (-1.0 + 0.8) / 2),
    ],
)
def test_each_average_by_hand(loss, expected):
    # The clipped losses are -1, -1.28, -0.5 | 0.8, their sum -1.98. gspo's first ratio is (1 * 2 *
    # 0.5)^(1/3) = 1.
    x = by_ratio(HAND, [1.0, -1.0], training=spec(loss=loss))
    assert total_loss(x).item() == pytest.approx(expected)


def test_a_token_weighs_the_same_in_any_minibatch_under_dapo_and_not_under_bnpo():
    # A batch of 4 tokens in two minibatches of 3 and 1, every l = -1 (cispo: 1): dapo divides by 4
    # / 2, bnpo by 3 and by 1.
    whole = by_ratio([[1.0, 1.0, 1.0], [1.0]], [1.0, 1.0])
    for loss, expected in (("dapo", [-1.5, -0.5]), ("cispo", [1.5, 0.5]), ("bnpo", [-1.0, -1.0])):
        shares = [
            total_loss(
                dataclasses.replace(
                    part(whole, i, i + 1),
                    denominators=Denominators(1, 2, n, max_tokens=16),
                    spec=spec(loss=loss),
                )
            )
            for i, n in ((0, 3), (1, 1))
        ]
        assert [share.item() for share in shares] == pytest.approx(expected), loss


# --- splits: the trap "token-loss scaling" -------------------------------------------------------


@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("loss", LOSSES)
def test_trap_token_loss_scaling_shares_of_any_split_add_up(loss, importance):
    training = spec(loss=loss, importance=importance, beta=0.1, dual_clip=3.0)
    x = random_batch([3, 1, 7, 2, 5], 1, training)
    whole, gradient = loss_and_gradient(x)
    for cuts in ([0, 1, 2, 3, 4, 5], [0, 2, 5], [0, 4, 5]):
        parts = [loss_and_gradient(part(x, a, b)) for a, b in itertools.pairwise(cuts)]
        assert sum(value for value, _ in parts) == pytest.approx(whole, rel=1e-12)
        torch.testing.assert_close(
            torch.cat([values for _, values in parts]), gradient, rtol=1e-12, atol=0
        )


# --- the trap "explosive ratio", and other adversarial batches -----------------------------------


def test_trap_explosive_ratio_is_clamped_and_has_no_gradient():
    # e^100 is infinite in float32, and with A < 0 no bound of the clip would hold it.
    x = loss_inputs([[0.0, -100.0]], [[-100.0, 0.0]], [-1.0], dtype=torch.float32)
    assert importance_ratios(x).tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)
    loss, gradient = loss_and_gradient(x)
    assert loss == pytest.approx((math.exp(20) + 0.8) / 2, rel=1e-6)
    assert gradient.tolist() == [0.0, 0.0]


def test_trap_explosive_ratio_is_held_by_dual_clip_at_any_size():
    x = by_ratio([[1e6, 1e6, 1e-6]], [-1.0], training=spec(dual_clip=3.0), dtype=torch.float32)
    loss, gradient = loss_and_gradient(x)
    assert loss == pytest.approx((3 + 3 + 0.8) / 3)
    assert gradient.tolist() == [0.0, 0.0, 0.0]


def test_the_clamp_is_the_jobs():
    x = by_ratio(
        [[math.exp(5.0), math.exp(-5.0), math.exp(1.0)]], [1.0], training=spec(max_log_ratio=2.0)
    )
    assert importance_ratios(x).log().tolist() == pytest.approx([2.0, -2.0, 1.0])


@pytest.mark.parametrize("loss", LOSSES)
def test_one_token_at_ratio_one_has_the_policy_gradient(loss):
    # Every loss begins as REINFORCE: d loss / d logprob = -A, over one token of one sequence
    # (dr_grpo: of 16 at most).
    _, gradient = loss_and_gradient(loss_inputs([[-1.5]], [[-1.5]], [0.7], spec(loss=loss)))
    assert gradient.item() == pytest.approx(-0.7 / (16 if loss == "dr_grpo" else 1))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_without_signal_has_neither_loss_nor_gradient(loss):
    # Groups of one, or of equal rewards: every advantage is 0, whatever the ratios.
    value, gradient = loss_and_gradient(
        by_ratio([[1e6, 1e-6, 1.0], [3.0]], [0.0, 0.0], training=spec(loss=loss))
    )
    assert value == 0.0
    assert not gradient.any()


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"cispo"}))
def test_an_infinite_log_prob_of_one_side_is_the_clamped_ratio_without_gradient(loss):
    infinity = math.inf
    x = loss_inputs(
        [[-infinity, -1.0], [-1.0]],
        [[-1.0, -1.0], [-infinity]],
        [1.0, 1.0],
        spec(loss=loss),
        torch.float32,
    )
    ratios = importance_ratios(x).tolist()
    assert ratios[0] == pytest.approx(math.exp(-20), rel=1e-5)
    assert ratios[2] == pytest.approx(math.exp(20), rel=1e-5)
    value, gradient = loss_and_gradient(x)
    assert math.isfinite(value)
    assert gradient[[0, 2]].tolist() == [0.0, 0.0]


def test_cispos_loss_of_a_token_that_the_trainer_holds_impossible_is_infinite():
    value, _ = loss_and_gradient(loss_inputs([[-math.inf]], [[-1.0]], [1.0], spec(loss="cispo")))
    assert value == math.inf


def test_a_rejected_token_has_no_say_even_where_its_loss_is_infinite():
    # Token TIS gives a token that the trainer holds impossible the weight e^-inf = 0. The other's
    # loss is 1 of 2 tokens.
    x = loss_inputs(
        [[-math.inf, -1.0]],
        [[-1.0, -1.0]],
        [1.0],
        spec(loss="cispo"),
        weights_N=torch.tensor([0.0, 1.0]).double(),
    )
    value, gradient = loss_and_gradient(x)
    assert value == pytest.approx(0.5)
    assert gradient.tolist() == pytest.approx([0.0, -0.5])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("new", "old"), [(math.nan, -1.0), (-1.0, math.nan), (-math.inf, -math.inf)]
)
def test_nan_is_never_hidden(loss, new, old):
    value, _ = loss_and_gradient(loss_inputs([[new, -1.0]], [[old, -1.0]], [1.0], spec(loss=loss)))
    assert math.isnan(value)


def test_an_infinite_log_prob_of_a_sequence_leaves_the_other_sequences_alone():
    _, gradient = loss_and_gradient(
        loss_inputs(
            [[-math.inf, -1.0], [-1.0]], [[-1.0, -1.0], [-1.0]], [1.0, 1.0], spec(loss="gspo")
        )
    )
    assert gradient.tolist() == pytest.approx([0.0, 0.0, -0.5])


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_half_the_tokens_rejected_is_half_the_loss(loss):
    # Four equal tokens in two sequences: what is kept must not weigh more because something else
    # was rejected.
    x = by_ratio([[1.0, 1.0], [1.0, 1.0]], [1.0, 1.0], training=spec(loss=loss))
    rejecting = dataclasses.replace(
        x, weights_N=torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    )
    (whole, gradient), (half, kept) = loss_and_gradient(x), loss_and_gradient(rejecting)
    assert half == pytest.approx(whole / 2)
    if loss != "gspo":  # whose one ratio a sequence spreads the gradient over its tokens
        assert kept.tolist() == pytest.approx([gradient[0].item(), 0.0, gradient[2].item(), 0.0])


def test_weights_multiply_the_policy_loss_and_not_the_kl():
    x = by_ratio(
        [[1.0], [1.0]],
        [1.0, 1.0],
        training=spec(beta=0.5, kl="k2"),
        weights_N=torch.tensor([2.0, 0.0]).double(),
    )
    x = dataclasses.replace(x, reference_logprobs_N=torch.tensor([-2.0, -4.0]).double())
    # Losses -2 and 0 over 2 tokens; KL (-1 + 2)^2 / 2 and (-1 + 4)^2 / 2 over 2 tokens, times 0.5.
    assert total_loss(x).item() == pytest.approx(-2 / 2 + 0.5 * (0.5 + 4.5) / 2)
