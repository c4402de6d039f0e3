"""Advantages against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from services.orchestrator.grpo.advantages import batch_advantages, has_signal
from shared.job import AdvantageSpec
from tests.support.scored_batches import make_batch, make_job, score

LEAVE_ONE_OUT = {"std": "none", "baseline": "leave_one_out"}


@pytest.mark.parametrize(
    ("spec", "rewards_PG", "expected_PG"),
    [
        # mean 1/2, unbiased variance 4 * 1/4 / 3 = 1/3
        ({}, [[1.0, 0.0, 0.0, 1.0]], [[0.8660239, -0.8660239, -0.8660239, 0.8660239]]),
        ({"std": "none"}, [[1.0, 3.0], [10.0, 30.0]], [[-1.0, 1.0], [-10.0, 10.0]]),
        # 3 against (1 + 2) / 2, 1 against (3 + 2) / 2, 2 against (3 + 1) / 2
        (LEAVE_ONE_OUT, [[3.0, 1.0, 2.0]], [[1.5, -1.5, 0.0]]),
        (LEAVE_ONE_OUT, [[4.0, None, 1.0]], [[3.0, None, -3.0]]),
        # both groups: mean 3, variance (9 + 1 + 1 + 9) / 3; the groups' means are 1 and 5
        ({"std": "batch"}, [[0.0, 2.0], [4.0, 6.0]], [[-0.3872982, 0.3872982]] * 2),
        # a group without signal counts in the deviation: variance (0 + 0 + 1 + 1) / 3
        ({"std": "batch"}, [[1.0, 1.0], [0.0, 2.0]], [[None] * 2, [-1.2247434, 1.2247434]]),
        # over 1 and 0 only: mean 1/2; an invented 0 would make it 1/3
        ({"std": "none"}, [[1.0, None, 0.0]], [[0.5, None, -0.5]]),
        # no signal: equal but for rounding, or nothing to compare with
        ({}, [[1.0, 1.0], [0.1 + 0.2, 0.3], [0.3, 0.30000001192092896]], [[None] * 2] * 3),
        ({}, [[-1e9, -1e9 + 64]], [[None] * 2]),
        ({}, [[5.0], [], [1.0, None]], [[None], [], [None, None]]),
        ({"std": "batch"}, [[5.0], []], [[None], []]),
        ({}, [[0.3, 0.3 + 1e-8], [1.0, 0.0]], [[None] * 2, [0.7071058, -0.7071058]]),
    ],
)
def test_advantages_of_one_reward_by_hand(
    spec: dict[str, str], rewards_PG: list[list[float | None]], expected_PG: list[list[float]]
) -> None:
    job = make_job(**spec)
    batch = make_batch(*(tuple(score(job, value) for value in values) for values in rewards_PG))
    for found_G, expected_G in zip(batch_advantages(batch, job), expected_PG, strict=True):
        assert found_G == [one and pytest.approx(one, rel=1e-7) for one in expected_G]


GDPO = {"combine": "normalize_then_sum"}


@pytest.mark.parametrize(
    ("weights_K", "spec", "values_PGK", "expected_PG"),
    [
        # sums 2, 2.5, 0: mean 1.5
        ((2.0, 0.5), {}, [[(1.0, 0.0), (1.0, 1.0), (0.0, 0.0)]], [[0.5, 1.0, -1.5]]),
        # a reward that does not apply adds nothing, a failed one leaves no sum
        (
            (1.0, 1.0),
            {},
            [[(1.0, "skipped"), (0.0, 2.0), (1.0, None), ("skipped", "skipped")]],
            [[-0.5, 0.5, None, None]],
        ),
        # equal sums have no signal; normalized first, the rewards are kept apart:
        # +-1/2, and -+1/2 weighted by 3, are 1/2 - 3/2 and -1/2 + 3/2
        ((1.0, 1.0), {}, [[(1.0, 0.0), (0.0, 1.0)]], [[None, None]]),
        ((1.0, 3.0), GDPO, [[(1.0, 0.0), (0.0, 1.0)]], [[-1.0, 1.0]]),
        # a rollout with a missing part is left out of every reward: the first is over 0 and 1
        # only, -1/2 and 1/2, and the second over one
        (
            (1.0, 1.0),
            GDPO,
            [[(0.0, "skipped"), (1.0, 0.0), (100.0, None)]],
            [[-0.5, 0.5, None]],
        ),
        # each reward is divided in its group, the sum over the batch. Group 1: the first is
        # -+1 / sqrt 2, the second is equal. Group 2: both are -+1 / sqrt 2. Over the batch: mean 0,
        # variance (1/2 + 1/2 + 2 + 2) / 3 = 5 / 3
        (
            (1.0, 1.0),
            GDPO | {"std": "group"},
            [[(0.0, 5.0), (2.0, 5.0)], [(0.0, 0.0), (4.0, 8.0)]],
            [[-math.sqrt(0.3), math.sqrt(0.3)], [-2 * math.sqrt(0.3), 2 * math.sqrt(0.3)]],
        ),
        # a reward of weight zero is watched and teaches nothing
        ((1.0, 0.0), {}, [[(1.0, 0.0), (1.0, 7.0)]], [[None, None]]),
        ((1.0, 0.0), GDPO, [[(1.0, 0.0), (1.0, 7.0)]], [[None, None]]),
    ],
)
def test_advantages_of_several_rewards_by_hand(
    weights_K: tuple[float, ...],
    spec: dict[str, str],
    values_PGK: list[list[tuple[float | str | None, ...]]],
    expected_PG: list[list[float | None]],
) -> None:
    rewards = ({"grader": f"r{index}", "weight": one} for index, one in enumerate(weights_K))
    job = make_job(*rewards, **({"std": "none"} | spec))
    batch = make_batch(*(tuple(score(job, *one) for one in values) for values in values_PGK))
    for found_G, expected_G in zip(batch_advantages(batch, job), expected_PG, strict=True):
        assert found_G == [one and pytest.approx(one, rel=1e-5) for one in expected_G]


def test_with_a_kl_term_a_group_without_signal_is_trained_on_with_advantages_of_0() -> None:
    job = make_job()
    job = job.model_copy(update={"training": job.training.model_copy(update={"beta": 0.1})})
    batch = make_batch(tuple(score(job, value) for value in (1.0, 1.0, None)))
    assert batch_advantages(batch, job) == [[0.0, 0.0, None]]


def test_groups_that_differ_in_shaping_rewards_alone_have_no_signal() -> None:
    job = make_job(
        {"grader": "right"}, {"grader": "length", "shaping": True, "weight": 0.1}, std="none"
    )
    wrong = (score(job, 0.0, 0.3), score(job, 0.0, 0.9))
    mixed = (score(job, 1.0, 0.0), score(job, 0.0, 1.0))
    shorter = (score(job, 1.0, "skipped"), score(job, 1.0, 0.5))
    batch = make_batch(wrong, mixed, shorter)
    assert batch_advantages(batch, job) == [
        [None, None],
        pytest.approx([0.45, -0.45]),
        [None, None],
    ]
    both = job.model_copy(
        update={"advantages": AdvantageSpec(combine="normalize_then_sum", std="none")}
    )
    assert [has_signal(scores_G, both) for scores_G in batch.scores] == [False, True, False]


def test_a_job_of_shaping_rewards_only_is_judged_on_them() -> None:
    job = make_job({"grader": "length", "shaping": True})
    assert has_signal((score(job, 0.0), score(job, 1.0)), job)


def test_a_completion_cut_off_counts_in_the_baseline_and_is_not_trained_on() -> None:
    job = make_job(std="none", mask_truncated=True)
    scores_G = tuple(score(job, value) for value in (1.0, 0.0, 0.5))
    assert batch_advantages(make_batch(scores_G, cut_off=(1,)), job) == [[0.5, None, 0.0]]
    unmasked = make_job(std="none")
    assert batch_advantages(make_batch(scores_G, cut_off=(1,)), unmasked) == [[0.5, -0.5, 0.0]]
