"""OpenAI's requests as jobs, and jobs in OpenAI's shape. docs/openai.md has it for users."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from shared.errors import BadRequest
from shared.job import LORA_LEARNING_RATE, SFT_FACTOR, UPLOADED, SamplingSpec, name_of
from shared.wire import (
    Checkpoint,
    CreateFineTuningJob,
    Event,
    FineTuningCheckpoint,
    FineTuningError,
    FineTuningEvent,
    FineTuningJob,
    JobRecord,
    Reinforcement,
)
from shared.wire.openai import PREFIX
from shared.wire.rewards import reward_of

OBJECTIVES = {"reinforcement": "rl", "supervised": "sft", "dpo": "dpo"}
"""What a job learns, by OpenAI's method."""

PREFERENCES = {
    "prompt": "input",
    "chosen": "preferred_output",
    "rejected": "non_preferred_output",
}
"""The columns of a file of preferences."""


def job_document(request: CreateFineTuningJob) -> dict[str, Any]:
    """Returns the requested job, with one step: the number of steps depends on the data and is set
    later. Raises BadRequest for an invalid file id."""
    if "request" in request.hone:
        raise BadRequest("'hone.request' is what was asked for here, and cannot be set")
    _check_file("training_file", request.training_file)
    _check_file("validation_file", request.validation_file)
    method, knobs = request.method, request.method.hyperparameters
    document: dict[str, Any] = {
        "name": name_of(request.suffix or "", "fine-tuning"),
        "model": request.model,
        "steps": 1,
        "seed": request.seed or 0,
        "data": {
            "train": request.training_file,
            "eval": request.validation_file,
            "columns": {"prompt": "messages"},
        },
        "sampling": _given(prompts_per_step=knobs.batch_size),
        "training": {"objective": OBJECTIVES[method.type]},
        "lora": {},
        "metadata": request.metadata or {},
        "request": request.model_dump(mode="json", exclude={"metadata"}),
    }
    if method.reinforcement:
        document = _laid_over(document, _reinforcement(method.reinforcement))
    if method.type == "dpo":
        beta = method.dpo.hyperparameters.beta if method.dpo else "auto"
        preferences = {"data": {"columns": PREFERENCES}, "training": _given(dpo_beta=beta)}
        document = _laid_over(document, preferences)
    if knobs.learning_rate_multiplier != "auto":
        usual = LORA_LEARNING_RATE * (SFT_FACTOR if method.type == "supervised" else 1)
        document["training"]["learning_rate"] = usual * knobs.learning_rate_multiplier
    for integration in request.integrations or ():
        document["wandb"] = integration.wandb.model_dump(mode="json")
    return _laid_over(document, request.hone)


def _reinforcement(method: Reinforcement) -> dict[str, Any]:
    knobs, size = method.hyperparameters, SamplingSpec().group_size
    times = knobs.compute_multiplier
    num = size if isinstance(times, str) else max(round(size * times), 2)
    return {
        "sampling": {"group_size": num},
        "rewards": [reward_of(method.grader).model_dump(exclude_unset=True)],
        "evaluation": _given(every=knobs.eval_interval, samples=knobs.eval_samples),
    }


def steps(request: CreateFineTuningJob, num_rows: int, prompts_per_step: int) -> int:
    """Returns how many steps make the requested number of passes over `num_rows` rows."""
    epochs = request.method.hyperparameters.n_epochs
    return math.ceil(num_rows * (1 if epochs == "auto" else epochs) / prompts_per_step)


def fine_tuning_job(record: JobRecord, now: float, trained_tokens: int | None) -> FineTuningJob:
    """Returns the record in OpenAI's shape. The ETA counts from `now` (Unix seconds)."""
    job = record.job
    request = CreateFineTuningJob.model_validate(job.request, extra="ignore")  # of any version
    ends_at = now + record.eta_s if record.status == "running" and record.eta_s else None
    return FineTuningJob(
        id=record.id,
        created_at=int(record.created_at),
        finished_at=_whole(record.finished_at),
        estimated_finish=_whole(ends_at),
        model=job.model,
        fine_tuned_model=record.id if record.status == "succeeded" else None,
        status=record.status,
        error=None
        if record.error is None
        else FineTuningError(code=record.status, message=record.error),
        training_file=request.training_file,
        validation_file=request.validation_file,
        method=request.method,
        seed=job.seed,
        trained_tokens=trained_tokens,
        metadata=job.metadata,
        integrations=request.integrations or (),
    )


def fine_tuning_event(event: Event) -> FineTuningEvent:
    return FineTuningEvent(
        id=PREFIX + event.id,
        created_at=int(event.time),
        level="warn" if event.level == "warning" else event.level,
        message=event.message,
        type="metrics" if event.type in ("step", "eval") else "message",
        data=event.data,
    )


def fine_tuning_checkpoint(
    record: JobRecord, checkpoint: Checkpoint, metrics: Mapping[str, float], created_at: float
) -> FineTuningCheckpoint:
    return FineTuningCheckpoint(
        id=checkpoint_id(record.id, checkpoint),
        created_at=int(created_at),
        fine_tuned_model_checkpoint=checkpoint.path,
        fine_tuning_job_id=record.id,
        metrics={"step": float(checkpoint.step), **metrics},
        step_number=checkpoint.step,
    )


def checkpoint_id(job_id: str, checkpoint: Checkpoint) -> str:
    return f"ftckpt-{job_id}-{checkpoint.step}"


def _check_file(field: str, name: str | None) -> None:
    """Raises BadRequest for a misspelt file id: otherwise it would be looked for on the Hub."""
    if name is not None and name.startswith("file-") and not UPLOADED.fullmatch(name):
        raise BadRequest(
            f"'{field}': got {name!r:.80}; expected the id of an uploaded file, 'file-' and 24 "
            "hexadecimal digits"
        )


def _given(**values: Any) -> dict[str, Any]:
    """Returns the values that are not "auto". Keys that are left out have a job's defaults."""
    return {key: value for key, value in values.items() if value != "auto"}


def _laid_over(document: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the document with `changes` in it, section by section."""
    changed = dict(document)
    for key, value in changes.items():
        old = changed.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _laid_over(cast(dict[str, Any], old), cast(dict[str, Any], value))
        changed[key] = value
    return changed


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
