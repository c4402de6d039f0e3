"""What `bench.scale` compares with, worked out by hand."""

from __future__ import annotations

import pytest

from bench.scale_side import Load, Schedule, length


def load(max_staleness: int) -> Load:
    return Load(
        num_samplers=1,
        num_prompts=1,
        num_steps=2,
        max_staleness=max_staleness,
        slots=2,
        tokens_per_s=1.0,
    )


@pytest.mark.parametrize(
    ("max_staleness", "share"),
    [
        (0, 0.25),  # step 1 ends at 4 and step 2 at 6: 9 of 12 seconds
        (1, 0.10),  # step 2 begins where the short one of step 1 ended, at 2: 9 of 10 seconds
    ],
)
def test_an_oracle_waits_only_for_what_staleness_forbids(max_staleness: int, share: float) -> None:
    found = Schedule(sort=True).idle_share(load(max_staleness), [[2, 4], [1, 2]])
    assert found == pytest.approx(share)


def test_lengths_have_a_long_tail_and_a_limit() -> None:
    lengths = sorted(length(seed, load(0)) for seed in range(2000))
    assert 800 < lengths[1000] < 1000 and lengths[0] >= 1
    assert sum(tokens == 8192 for tokens in lengths) in range(10, 50)


def test_the_order_of_asking_and_the_time_between_steps_make_a_schedule_longer() -> None:
    """Two places, in seconds: 1 and 1, then 2 on one of them; the next step's 2 follows all of
    these, so 6 of 10 are used; with 3 seconds between the steps 6 of 16."""
    lengths = [[1, 1, 2], [2]]
    assert Schedule(sort=False).idle_share(load(0), lengths) == pytest.approx(0.4)
    assert Schedule(sort=True).idle_share(load(0), lengths) == pytest.approx(0.25)
    later = Schedule(sort=False, between_s=(3.0, 0.0))
    assert later.idle_share(load(0), lengths) == pytest.approx(0.625)
