"""What a job asks for that is allowed and probably not meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.jobs.preflight import probable_mistakes, unknown_targets
from shared.job import Job
from tests.support.model_folders import make_model_folder
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


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"training": {"learning_rate": 10}},
            "training.learning_rate is 10: such updates ruin a model; expected at most 0.01, "
            "usually 1e-6 to 1e-4",
        ),
        (
            {"training": {"beta": 50}},
            "training.beta is 50: the KL term outweighs the rewards, so the policy stays where it "
            "began; expected 0 to 0.1 as a rule",
        ),
        (
            {"data": {"train": "x", "eval": "y"}, "stop": {"target": 2.0}},
            "stop.target is 2, and reward is at most 1, if no grader gives more than 1: the job "
            "would not stop early",
        ),
        (
            {"training": {"minibatches": 100}, "sampling": {"prompts_per_step": 12}},
            "training.minibatches is 100 for 12 groups (sampling.prompts_per_step): a minibatch "
            "has less than a group, or nothing",
        ),
        (
            {"steps": 864_000_000},
            "steps is 864000000: at a second each these are 10000 days",
        ),
        (
            {"steps": 7, "data": {"train": "x", "epochs": 2}},
            "steps is 7 and data.epochs 2: the job ends after the fewer steps of both; expected "
            "one of them",
        ),
    ],
)
def test_values_that_are_probably_typing_errors_are_warnings(
    changes: dict[str, Any], sentence: str
) -> None:
    assert probable_mistakes(job(**changes)) == [sentence]


def test_usual_values_are_no_warnings() -> None:
    usual = {"learning_rate": 1e-4, "beta": 0.04, "minibatches": 4}
    data = {"train": "x", "eval": "y"}
    assert not probable_mistakes(job(training=usual, data=data, stop={"target": 1.0}, steps=5000))
    two = [{"grader": "math", "weight": 2.0}, {"grader": "length", "shaping": True, "weight": 9.0}]
    assert not probable_mistakes(job(rewards=two, data=data, stop={"target": 2.0}))


def test_lora_layers_that_the_model_has_not_are_a_warning(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m")
    one = job(lora={"target_modules": ["q_proj", "nope"]})
    assert unknown_targets(one, folder) == (
        "lora.target_modules names 'nope', and the model has no such layer; it has down_proj, "
        "gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )
    assert unknown_targets(job(lora={"target_modules": ["q_proj"]}), folder) == ""
    assert unknown_targets(job(lora={"target_modules": "all-linear"}), folder) == ""
    assert unknown_targets(one, tmp_path) == "", "its weights are not here"
