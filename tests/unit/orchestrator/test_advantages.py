"""Advantages against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from services.orchestrator.advantages import group_advantages


def test_a_group_is_centred_and_divided_by_its_unbiased_deviation() -> None:
    # rewards 1 0 0 1: mean 1/2, deviations +-1/2, unbiased variance 4 * 1/4 / 3 = 1/3
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    (advantages_G,) = group_advantages([[1.0, 0.0, 0.0, 1.0]], "group")
    assert advantages_G == pytest.approx([expected, -expected, -expected, expected], rel=1e-12)


def test_without_the_division_an_advantage_is_the_distance_to_the_mean() -> None:
    assert group_advantages([[3.0, 1.0, 2.0]], "none") == [[1.0, -1.0, 0.0]]


def test_each_group_has_its_own_mean() -> None:
    assert group_advantages([[1.0, 3.0], [10.0, 30.0]], "none") == [[-1.0, 1.0], [-10.0, 10.0]]


@pytest.mark.parametrize("rewards_G", [[1.0, 1.0, 1.0], [0.1 + 0.2, 0.3, 0.3], [5.0], []])
def test_a_group_without_a_difference_has_no_signal(rewards_G: list[float]) -> None:
    assert group_advantages([rewards_G], "group") == [[None] * len(rewards_G)]


def test_a_missing_reward_is_missing_and_not_zero() -> None:
    # over 1 and 0 only: mean 1/2; an invented 0 would make it 1/3
    assert group_advantages([[1.0, None, 0.0]], "none") == [[0.5, None, -0.5]]


def test_one_reward_beside_missing_ones_has_no_signal() -> None:
    assert group_advantages([[1.0, None, None]], "group") == [[None, None, None]]
