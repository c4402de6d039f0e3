"""Which attempts may use a service, by who came and whom each named beside itself."""

from __future__ import annotations

from shared.http.ownership import Holders


def let_in(*calls: tuple[int, int, tuple[int, ...]]) -> Holders:
    found = Holders()
    for attempt, epoch, beside in calls:
        if not found.is_stale((attempt, epoch)):
            found.take((attempt, epoch), beside)
    return found


def holding(found: Holders) -> list[int]:
    return [attempt for attempt in range(20) if attempt in found]


def test_a_newer_attempt_supersedes_all_that_it_does_not_name() -> None:
    assert holding(let_in((5, 1, ()))) == [5]
    assert holding(let_in((5, 1, ()), (7, 1, ()))) == [7]
    assert holding(let_in((5, 1, ()), (7, 1, (5,)), (9, 1, (7,)))) == [7, 9]


def test_the_order_in_which_they_come_makes_no_difference() -> None:
    calls = [(5, 1, ()), (7, 1, (5,)), (9, 1, (5, 7))]
    assert holding(let_in(*calls)) == holding(let_in(*calls[::-1])) == [5, 7, 9]


def test_an_older_epoch_of_a_holder_and_an_attempt_that_no_one_named_are_stale() -> None:
    found = let_in((5, 3, ()), (7, 1, (5,)))
    assert [found.is_stale(fence) for fence in ((5, 2), (5, 3), (6, 9), (7, 0), (8, 0))] == [
        True,
        False,
        True,
        True,
        False,
    ]


def test_an_attempt_that_came_without_a_word_of_the_others_names_them_later() -> None:
    """As after a restart of a sampler: weights came before the model."""
    assert holding(let_in((5, 1, ()), (7, 1, ()), (7, 2, (5,)))) == [5, 7]
