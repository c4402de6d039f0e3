"""What a job asks for that is allowed and probably not meant."""

from __future__ import annotations

from typing import Any

from services.orchestrator.jobs.preflight import probable_mistakes
from shared.job import Job
from tests.support.scored_batches import make_job


def job(**changes: Any) -> Job:
    return Job.model_validate(make_job().model_dump() | changes)


def test_a_learning_rate_of_0_is_a_warning() -> None:
    (said,) = probable_mistakes(job(training={"learning_rate": 0}))
    assert said == (
        "training.learning_rate is 0: the job samples, grades and changes no weight; expected a "
        "rate above 0, such as 1e-6"
    )
    assert not probable_mistakes(job())


def test_rewards_that_all_weigh_nothing_are_a_warning() -> None:
    (said,) = probable_mistakes(job(rewards=[{"grader": "length", "weight": 0}]))
    assert said.startswith("the weight of the only reward is 0: every completion earns the same")
    both = [{"grader": "length", "weight": 0}, {"grader": "exact_match", "weight": 0}]
    (said,) = probable_mistakes(job(rewards=both))
    assert said.startswith("the weight of every reward is 0")
    both[1]["weight"] = -0.5
    assert not probable_mistakes(job(rewards=both)), "a penalty teaches"
