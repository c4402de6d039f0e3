"""Advantages against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from services.orchestrator.loop.advantages import (
    EPSILON,
    Rewards,
    batch_advantages,
    has_signal,
    normalize,
)
from shared.job import AdvantageSpec, Job
from tests.support.scored_batches import make_batch, make_job, score

MEAN_ONLY = AdvantageSpec(std="none")


def advantages(job: Job, *rewards_PG: list[float | None]) -> list[list[float | None]]:
    """The advantages of a job with one reward."""
    return batch_advantages(
        make_batch(*(tuple(score(job, value) for value in rewards_G) for rewards_G in rewards_PG)),
        job,
    )


def test_a_group_is_centred_and_divided_by_its_unbiased_deviation() -> None:
    # rewards 1 0 0 1: mean 1/2, deviations +-1/2, unbiased variance 4 * 1/4 / 3 = 1/3
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    (advantages_G,) = advantages(make_job(), [1.0, 0.0, 0.0, 1.0])
    assert advantages_G == pytest.approx([expected, -expected, -expected, expected], rel=1e-12)


def test_without_the_division_an_advantage_is_the_distance_to_the_mean() -> None:
    assert advantages(make_job(std="none"), [3.0, 1.0, 2.0]) == [[1.0, -1.0, 0.0]]


def test_each_group_has_its_own_mean() -> None:
    assert advantages(make_job(std="none"), [1.0, 3.0], [10.0, 30.0]) == [
        [-1.0, 1.0],
        [-10.0, 10.0],
    ]


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    # 3 against (1 + 2) / 2, 1 against (3 + 2) / 2, 2 against (3 + 1) / 2
    (advantages_G,) = advantages(make_job(std="none", baseline="leave_one_out"), [3.0, 1.0, 2.0])
    assert advantages_G == pytest.approx([1.5, -1.5, 0.0])


def test_leave_one_out_leaves_out_what_is_missing_too() -> None:
    assert advantages(make_job(std="none", baseline="leave_one_out"), [4.0, None, 1.0]) == [
        [3.0, None, -3.0]
    ]


def test_the_batch_deviation_is_one_for_all_groups() -> None:
    # 0 2 4 6 over both groups: mean 3, squares 9 + 1 + 1 + 9 = 20, unbiased variance 20 / 3; group
    # means 1 and 5
    scale = math.sqrt(20 / 3) + EPSILON
    assert advantages(make_job(std="batch"), [0.0, 2.0], [4.0, 6.0]) == [
        pytest.approx([-1 / scale, 1 / scale]),
        pytest.approx([-1 / scale, 1 / scale]),
    ]


def test_groups_without_signal_count_in_the_batch_deviation_but_are_dropped() -> None:
    # 1 1 0 2: mean 1, squares 0 + 0 + 1 + 1, unbiased variance 2 / 3
    scale = math.sqrt(2 / 3) + EPSILON
    assert advantages(make_job(std="batch"), [1.0, 1.0], [0.0, 2.0]) == [
        [None, None],
        pytest.approx([-1 / scale, 1 / scale]),
    ]


@pytest.mark.parametrize(
    "rewards_G", [[1.0, 1.0, 1.0], [0.1 + 0.2, 0.3, 0.3], [0.3, 0.30000001192092896], [5.0], []]
)
def test_float_noise_is_not_variance_and_a_group_of_one_has_nothing_to_compare_with(
    rewards_G: list[float | None],
) -> None:
    assert advantages(make_job(), rewards_G) == [[None] * len(rewards_G)]


def test_a_missing_reward_is_missing_and_not_zero() -> None:
    # over 1 and 0 only: mean 1/2; an invented 0 would make it 1/3
    assert advantages(make_job(std="none"), [1.0, None, 0.0]) == [[0.5, None, -0.5]]


def test_one_reward_beside_missing_ones_has_no_signal() -> None:
    assert advantages(make_job(), [1.0, None, None]) == [[None, None, None]]


def test_several_rewards_are_weighted_and_summed() -> None:
    job = make_job(
        {"grader": "right", "weight": 2.0}, {"grader": "form", "weight": 0.5}, std="none"
    )
    # sums 2, 2.5, 0: mean 1.5
    batch = make_batch((score(job, 1.0, 0.0), score(job, 1.0, 1.0), score(job, 0.0, 0.0)))
    assert batch_advantages(batch, job) == [[0.5, 1.0, -1.5]]


def test_a_reward_that_does_not_apply_adds_nothing_and_a_failed_one_leaves_no_sum() -> None:
    job = make_job({"grader": "right"}, {"grader": "form"}, std="none")
    batch = make_batch(
        (
            score(job, 1.0, "skipped"),
            score(job, 0.0, 2.0),
            score(job, 1.0, None),
            score(job, "skipped", "skipped"),
        )
    )
    assert batch_advantages(batch, job) == [[-0.5, 0.5, None, None]]


def test_normalizing_before_summing_keeps_rewards_apart_that_a_sum_confuses() -> None:
    """GDPO's case: sums 1 1 and 0 2 weigh rewards of different scales; (1, 0) and (0, 1) have equal
    sums but do differ."""
    job = make_job(
        {"grader": "a"}, {"grader": "b", "weight": 3.0}, combine="normalize_then_sum", std="none"
    )
    # a: +-1/2, b: -+1/2 weighted by 3: 1/2 - 3/2 and -1/2 + 3/2
    batch = make_batch((score(job, 1.0, 0.0), score(job, 0.0, 1.0)))
    assert batch_advantages(batch, job) == [[-1.0, 1.0]]
    summed = make_job({"grader": "a"}, {"grader": "b"}, std="none")
    assert not has_signal((score(summed, 1.0, 0.0), score(summed, 0.0, 1.0)), summed)


def test_gdpo_divides_each_reward_in_its_group_and_the_sum_over_the_batch() -> None:
    job = make_job({"grader": "a"}, {"grader": "b"}, combine="normalize_then_sum")
    batch = make_batch(
        (score(job, 0.0, 5.0), score(job, 2.0, 5.0)), (score(job, 0.0, 0.0), score(job, 4.0, 8.0))
    )
    # group 1: a is -+1 / sqrt 2, b is equal: S -+1/sqrt 2.  group 2: a and b are -+1/sqrt 2 each: S
    # -+2/sqrt 2 (but for eps) over the batch: mean 0, variance (1/2 + 1/2 + 2 + 2) / 3 = 5 / 3
    small, large = 1 / math.sqrt(2) / math.sqrt(5 / 3), 2 / math.sqrt(2) / math.sqrt(5 / 3)
    assert batch_advantages(batch, job) == [
        pytest.approx([-small, small], rel=1e-5),
        pytest.approx([-large, large], rel=1e-5),
    ]


def test_gdpo_leaves_a_rollout_with_a_missing_part_out_of_every_reward() -> None:
    job = make_job({"grader": "a"}, {"grader": "b"}, combine="normalize_then_sum", std="none")
    batch = make_batch((score(job, 0.0, "skipped"), score(job, 1.0, 0.0), score(job, 100.0, None)))
    # a over 0 and 1 only: -1/2, 1/2; b over one: 0
    assert batch_advantages(batch, job) == [[-0.5, 0.5, None]]


def test_groups_that_differ_in_shaping_rewards_alone_have_no_signal() -> None:
    job = make_job(
        {"grader": "right"}, {"grader": "length", "shaping": True, "weight": 0.1}, std="none"
    )
    wrong = (score(job, 0.0, 0.3), score(job, 0.0, 0.9))
    mixed = (score(job, 1.0, 0.0), score(job, 0.0, 1.0))
    batch = make_batch(wrong, mixed)
    assert batch_advantages(batch, job) == [[None, None], pytest.approx([0.45, -0.45])]
    both = job.model_copy(
        update={"advantages": AdvantageSpec(combine="normalize_then_sum", std="none")}
    )
    assert [has_signal(scores_G, both) for scores_G in batch.scores] == [False, True]


def test_a_job_of_shaping_rewards_only_is_judged_on_them() -> None:
    job = make_job({"grader": "length", "shaping": True})
    assert has_signal((score(job, 0.0), score(job, 1.0)), job)


def test_a_reward_of_weight_zero_is_watched_and_teaches_nothing() -> None:
    for combine in ("sum_then_normalize", "normalize_then_sum"):
        job = make_job({"grader": "right"}, {"grader": "watched", "weight": 0.0}, combine=combine)
        assert not has_signal((score(job, 1.0, 0.0), score(job, 1.0, 7.0)), job)


def test_a_completion_cut_off_counts_in_the_baseline_and_is_not_trained_on() -> None:
    job = make_job(std="none", mask_truncated=True)
    scores_G = tuple(score(job, value) for value in (1.0, 0.0, 0.5))
    assert batch_advantages(make_batch(scores_G, cut_off=(1,)), job) == [[0.5, None, 0.0]]
    unmasked = make_job(std="none")
    assert batch_advantages(make_batch(scores_G, cut_off=(1,)), unmasked) == [[0.5, -0.5, 0.0]]


def test_rewards_that_are_all_equal_are_no_division_by_almost_nothing() -> None:
    noisy: Rewards = [[0.3, 0.3 + 1e-8], [1.0, 0.0]]
    assert normalize(noisy, AdvantageSpec())[0] == [0.0, 0.0]
    assert normalize(noisy, MEAN_ONLY)[1] == [0.5, -0.5]
