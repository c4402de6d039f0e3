"""Learning rates, worked out by hand."""

from __future__ import annotations

import pytest

from services.trainer.loaded import learning_rate
from shared.job.file import parse_job
from tests.support.engine_ranks import a_job


def rates(steps: int, **training: object) -> list[float]:
    job = parse_job(
        {
            "name": "t",
            "model": "m",
            "steps": steps,
            "data": {"train": "x"},
            "rewards": [{"grader": "x"}],
            "training": {"learning_rate": 8.0, **training},
        }
    )
    return [learning_rate(job, step) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({}, [8, 8, 8, 8, 8]),
        ({"warmup_steps": 4}, [2, 4, 6, 8, 8]),
        ({"schedule": "linear"}, [8, 6, 4, 2, 0]),
        ({"schedule": "linear", "min_learning_rate": 4.0}, [8, 7, 6, 5, 4]),
        ({"schedule": "linear", "warmup_steps": 2}, [4, 8, 16 / 3, 8 / 3, 0]),
        ({"schedule": "cosine"}, [8, 4 + 2 * 2**0.5, 4, 4 - 2 * 2**0.5, 0]),
        (
            {"schedule": "cosine", "min_learning_rate": 2.0, "warmup_steps": 3},
            [8 / 3, 16 / 3, 8, 5, 2],
        ),
        ({"schedule": "cosine", "warmup_steps": 9}, [8 / 9, 16 / 9, 24 / 9, 32 / 9, 40 / 9]),
    ],
)
def test_the_rate_warms_up_to_its_peak_and_falls_to_its_minimum_at_the_last_step(
    training, expected
):
    assert rates(5, **training) == pytest.approx(expected, abs=1e-12)


def test_the_peak_of_adapters_is_1e_5_where_the_job_says_none():
    job = a_job("m", lora={}, training={"warmup_steps": 4})
    assert [learning_rate(job, step) for step in (1, 4)] == pytest.approx([2.5e-6, 1e-5])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_single_step_has_the_peak_rate(schedule):
    assert rates(1, schedule=schedule) == [8]


def test_the_schedule_begins_after_the_warm_up() -> None:
    job = parse_job(
        {
            "name": "t",
            "model": "m",
            "steps": 7,
            "data": {"train": "x"},
            "rewards": [{"grader": "x"}],
            "training": {"learning_rate": 8.0, "schedule": "linear", "warmup_steps": 2},
            "warmup": {"steps": 2, "learning_rate": 3.0},
        }
    )
    assert [learning_rate(job, step) for step in range(1, 8)] == pytest.approx(
        [3, 3, 4, 8, 16 / 3, 8 / 3, 0]
    )
