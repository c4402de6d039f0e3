"""The problems of `make demo`."""

from __future__ import annotations

import re

from deploy.larger_number import NUM_TEST, NUM_TRAIN, Problem, make_problems


def numbers(problem: Problem) -> tuple[int, int]:
    first, second = map(int, re.findall(r"\d+", str(problem["question"])))
    return first, second


def test_each_answer_is_the_larger_number_and_stands_first_in_half_of_the_problems() -> None:
    for problems in make_problems(0):
        assert all(problem["answer"] == max(numbers(problem)) for problem in problems)
        first = sum(problem["answer"] == numbers(problem)[0] for problem in problems)
        assert abs(first / len(problems) - 0.5) < 0.05


def test_no_held_out_pair_of_numbers_is_trained_on_in_either_order() -> None:
    train, test = ({frozenset(numbers(one)) for one in part} for part in make_problems(3))
    assert (len(train), len(test)) == (NUM_TRAIN, NUM_TEST) and not train & test
