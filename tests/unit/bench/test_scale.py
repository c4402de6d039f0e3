"""What `bench.scale` compares with, worked out by hand."""

from __future__ import annotations

import pytest

from bench.scale import idle_figures
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


def test_the_difference_from_the_oracle_is_split_into_its_causes() -> None:
    """Two places, in seconds. In order 1 and 1, then 2, and the next step's 2: 6 of 10 are used, by
    an oracle 6 of 8. This run took 7.5 s, 6 of 15, one of which was between its steps: 6 of 12."""
    told = {
        "first_at": 100.0,
        "last_at": 107.5,
        "sampled_tokens": 6,
        "lengths": [[1, 1, 2], [2]],
        "steps_s": [{"store": 0.5, "train": 0.25, "sync": 0.25}] * 2,
    }
    found = {each.name.split(": ")[1]: each for each in idle_figures(load(0), told)}
    assert found["idle share of the samplers"].value == pytest.approx(0.6)
    assert found["idle share of the oracle"].value == pytest.approx(0.25)
    assert found["difference"].value == pytest.approx(0.35)
    assert found["of it for not knowing lengths"].value == pytest.approx(0.15)
    assert found["of it by the loop"].value == pytest.approx(0.2)
    assert found["of that between the steps"].value == pytest.approx(0.1)
    assert [each.goal for each in found.values()].count(None) == len(found) - 1
    assert not found["of it by the loop"].ok
