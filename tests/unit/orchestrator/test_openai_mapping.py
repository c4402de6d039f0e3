"""What OpenAI's knobs become."""

from __future__ import annotations

from typing import Any

import pytest

from services.orchestrator.extensions.openai import fine_tuning
from shared.job import Job, WandbSpec
from shared.wire import CreateFineTuningJob
from tests.support.job_records import record

GRADER = {
    "type": "string_check",
    "name": "same",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
    "operation": "eq",
}


def request(hyperparameters: dict[str, Any] | None = None, **more: Any) -> CreateFineTuningJob:
    return CreateFineTuningJob.model_validate(
        {
            "model": "owner/model",
            "training_file": "train.jsonl",
            "validation_file": "test.jsonl",
            "method": {
                "type": "reinforcement",
                "reinforcement": {"grader": GRADER, "hyperparameters": hyperparameters or {}},
            },
        }
        | more
    )


def job_of(asked: CreateFineTuningJob) -> Job:
    return Job.model_validate(fine_tuning.job_document(asked))


def test_what_is_left_to_us_is_as_in_any_job_with_an_adapter():
    job, default = job_of(request()), Job.model_fields
    assert job.sampling == default["sampling"].default
    assert job.evaluation == default["evaluation"].default
    assert job.lora is not None and job.learning_rate == 1e-5
    assert (job.name, job.seed, job.metadata) == ("fine-tuning", 0, {})
    (reward,) = job.rewards
    assert (reward.grader, reward.label) == ("string_check", "same")
    assert {"type": "string_check", "name": "same", **reward.params} == GRADER
    assert not reward.params.keys() & {"type", "name"}


def test_each_knob_goes_where_the_table_says():
    knobs = {
        "batch_size": 6,
        "compute_multiplier": 1.5,
        "eval_interval": 7,
        "eval_samples": 3,
        "learning_rate_multiplier": 0.5,
        "n_epochs": 3,
    }
    wandb = {"project": "p", "name": "mine", "tags": ["a"]}
    asked = request(
        knobs,
        suffix="My  Model!",
        seed=11,
        metadata={"team": "a"},
        integrations=[{"type": "wandb", "wandb": wandb}],
    )
    job = job_of(asked)
    assert (job.sampling.prompts_per_step, job.sampling.group_size) == (6, 12)
    assert (job.evaluation.every, job.evaluation.samples) == (7, 3)
    assert job.training.learning_rate == 5e-6
    assert (job.name, job.seed, job.metadata) == ("my-model", 11, {"team": "a"})
    assert job.wandb == WandbSpec(project="p", name="mine", tags=("a",))
    # three passes over 20 rows, 6 at a time
    assert fine_tuning.num_steps(asked, 20, 6) == 10


def by(method: dict[str, Any] | None, **more: Any) -> Job:
    """The job of a request for another method; without one it is supervised."""
    asked = request(**more).model_dump(exclude={"method"})
    return job_of(
        CreateFineTuningJob.model_validate(asked | ({"method": method} if method else {}))
    )


def test_a_request_without_a_method_is_supervised_as_openais_is():
    job, knobs = by(None), {"batch_size": 4, "learning_rate_multiplier": 0.5, "n_epochs": 3}
    assert (job.training.objective, job.rewards) == ("sft", ())
    assert job.data.columns == {"prompt": "messages"}
    assert job.learning_rate == pytest.approx(1e-4)
    tuned = by({"type": "supervised", "supervised": {"hyperparameters": knobs}})
    assert (tuned.sampling.prompts_per_step, tuned.learning_rate) == (4, pytest.approx(5e-5))


def test_a_request_for_preferences_names_openais_columns():
    job = by({"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.3}}})
    assert (job.training.objective, job.training.dpo_beta, job.learning_rate) == ("dpo", 0.3, 1e-5)
    assert job.data.columns == {
        "prompt": "input",
        "chosen": "preferred_output",
        "rejected": "non_preferred_output",
    }
    assert by({"type": "dpo"}).training.dpo_beta == 0.1


def test_keys_of_a_job_go_over_what_the_knobs_set():
    hone = {"sampling": {"max_tokens": 4}, "lora": None, "steps": 5}
    job = job_of(request({"batch_size": 6}, hone=hone))
    assert (job.sampling.prompts_per_step, job.sampling.max_tokens) == (6, 4)
    assert (job.lora, job.steps) == (None, 5)


@pytest.mark.parametrize(
    ("hyperparameters", "named"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"n_epochs": -1}, "n_epochs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"beta": 0.1}, "beta"),
    ],
)
def test_a_knob_that_means_nothing_here_is_refused_by_name(
    hyperparameters: dict[str, Any], named: str
):
    with pytest.raises(ValueError, match=named):
        request(hyperparameters)


def test_a_request_that_another_version_stored_is_shown():
    stored = job_of(request())
    stored = stored.model_copy(update={"request": stored.request | {"later": 1}})
    queued = record("queued").model_copy(update={"job": stored})
    assert fine_tuning.fine_tuning_job(queued, now=2.0, trained_tokens=None).id == "demo-1"


def test_a_record_is_shown_in_openais_words():
    job = job_of(request({"n_epochs": 2}))
    running = record("running").model_copy(update={"job": job, "created_at": 10.9, "eta_s": 30.0})
    shown = fine_tuning.fine_tuning_job(running, now=100.0, trained_tokens=None)
    assert (shown.created_at, shown.estimated_finish, shown.fine_tuned_model) == (10, 130, None)
    assert shown.method.reinforcement.hyperparameters.n_epochs == 2
    ended = running.model_copy(update={"status": "succeeded", "finished_at": 50.0})
    shown = fine_tuning.fine_tuning_job(ended, now=100.0, trained_tokens=7)
    assert (shown.fine_tuned_model, shown.finished_at) == ("demo-1", 50)
    assert (shown.estimated_finish, shown.trained_tokens) == (None, 7)
    paused = running.model_copy(update={"status": "paused", "error": "the disk is full"})
    error = fine_tuning.fine_tuning_job(paused, now=100.0, trained_tokens=None).error
    assert error is not None and (error.code, error.message) == ("paused", "the disk is full")
