"""Bodies in OpenAI's shape: fine-tuning jobs, files, and completions, as far as the orchestrator
must know them to pass them on to samplers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    field_validator,
    model_validator,
)

from shared.documented import Plain
from shared.wire.base import JobId, Wire

Auto = Literal["auto"]

PREFIX = "ftevent-"
"""Prefix of an event's id here; the rest is its id in the job's events."""


class Hyperparameters(Wire):
    """OpenAI's hyperparameters, of every method. docs/openai.md says what each does to the job."""

    batch_size: Auto | int = Field(default="auto")
    learning_rate_multiplier: Auto | float = Field(default="auto")
    n_epochs: Auto | int = Field(default="auto")

    @field_validator("*")
    @classmethod
    def _above_zero(cls, value: Any) -> Any:
        if isinstance(value, int | float) and value <= 0:
            raise ValueError("expected 'auto' or a number above 0")
        return value


class ReinforcementHyperparameters(Hyperparameters):
    """The hyperparameters of reinforcement."""

    compute_multiplier: Auto | float = Field(default="auto")
    eval_interval: Auto | int = Field(default="auto")
    eval_samples: Auto | int = Field(default="auto")
    reasoning_effort: Literal["default"] = "default"


class DpoHyperparameters(Hyperparameters):
    """The hyperparameters of preferences. OpenAI's `beta` is at most 2."""

    beta: Auto | float = Field(default="auto")


class Supervised(Wire):
    hyperparameters: Hyperparameters = Hyperparameters()


class Dpo(Wire):
    hyperparameters: DpoHyperparameters = DpoHyperparameters()


class Reinforcement(Wire):
    """`grader` has a `type`, the name of any grader, and its params beside it."""

    grader: dict[str, Plain]
    hyperparameters: ReinforcementHyperparameters = ReinforcementHyperparameters()
    response_format: None = None


class FineTuningMethod(Wire):
    """The objective: reinforcement, given answers ("supervised"), or preferences ("dpo"). The field
    of the type's name has its parameters, which only reinforcement needs."""

    type: Literal["reinforcement", "supervised", "dpo"] = "supervised"
    reinforcement: Reinforcement | None = None
    supervised: Supervised | None = None
    dpo: Dpo | None = None

    @model_validator(mode="after")
    def _has_its_own_parameters(self) -> FineTuningMethod:
        given = [name for name in ("reinforcement", "supervised", "dpo") if getattr(self, name)]
        if other := next((name for name in given if name != self.type), None):
            raise ValueError(f"type is {self.type!r} and {other!r} is set; expected {self.type!r}")
        if self.type == "reinforcement" and self.reinforcement is None:
            raise ValueError(
                "type is 'reinforcement' and 'reinforcement' is missing, which has the grader"
            )
        return self

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The hyperparameters of the method."""
        chosen = self.reinforcement or self.supervised or self.dpo
        return chosen.hyperparameters if chosen else Hyperparameters()


class WandbIntegration(Wire):
    """Where metrics are also logged: `[wandb]` of a job."""

    project: str
    name: str | None = None
    entity: str | None = None
    tags: tuple[str, ...] = ()


class Integration(Wire):
    type: Literal["wandb"]
    wandb: WandbIntegration


class CreateFineTuningJob(Wire):
    """`POST /v1/fine_tuning/jobs`. `training_file` and `validation_file` are ids of uploaded files
    or any other source that `data.train` of a job takes. `hone` has keys of a job file, which
    override the values from OpenAI's fields."""

    model: str
    training_file: str
    validation_file: str | None = None
    method: FineTuningMethod = FineTuningMethod()
    suffix: str | None = Field(default=None, min_length=1, max_length=64)
    seed: int | None = Field(default=None, ge=0)
    metadata: dict[str, str] | None = None
    integrations: tuple[Integration, ...] | None = Field(default=None, max_length=1)
    hone: dict[str, Any] = {}


class FineTuningError(Wire):
    code: str
    message: str
    param: str | None = None


class FineTuningJob(Wire):
    """A job as OpenAI shows it. Times are Unix seconds. `status` is one of OpenAI's, or Hone's own
    "paused"; `error` then says why. Once the job has succeeded, `fine_tuned_model` is the trained
    model's name."""

    id: JobId
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None = None
    estimated_finish: int | None = None
    model: str
    fine_tuned_model: str | None = None
    organization_id: str = "hone"
    status: Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]
    error: FineTuningError | None = None
    training_file: str
    validation_file: str | None = None
    result_files: tuple[str, ...] = ()
    hyperparameters: dict[str, Any] = {}
    method: FineTuningMethod
    seed: int
    trained_tokens: int | None = None
    metadata: dict[str, str] = {}
    integrations: tuple[Integration, ...] = ()


class FineTuningJobList(Wire):
    """A page, newest first. `has_more`: the next page begins after the last id (`?after=`)."""

    object: Literal["list"] = "list"
    data: tuple[FineTuningJob, ...]
    has_more: bool


class FineTuningEvent(Wire):
    """An event of a job. The `data` of "metrics" are numbers."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any] = {}


class FineTuningEventList(Wire):
    """A page, newest first."""

    object: Literal["list"] = "list"
    data: tuple[FineTuningEvent, ...]
    has_more: bool


class FineTuningCheckpoint(Wire):
    """A checkpoint on disk. `fine_tuned_model_checkpoint` is its folder, in Hugging Face format; it
    is not served by name. `metrics` are the job's at that step."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: JobId
    metrics: dict[str, float]
    step_number: int


class FineTuningCheckpointList(Wire):
    """A page, newest first."""

    object: Literal["list"] = "list"
    data: tuple[FineTuningCheckpoint, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ValidateGraderRequest(Wire):
    """`POST /v1/fine_tuning/alpha/graders/validate`."""

    grader: dict[str, Plain]


class ValidatedGrader(Wire):
    """The grader, which a job can name."""

    grader: dict[str, Plain]


Purpose = Literal["fine-tune", "assistants", "batch", "vision", "user_data", "evals"]
"""A file's purpose, as OpenAI's clients send it. A job may use any file."""


class UploadedFile(Wire):
    """A file that was uploaded. `created_at` is Unix seconds. A job names it by its `id`, as
    `data.train` or `data.eval`."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class FileList(Wire):
    """A page of files. `has_more`: the next page begins after `last_id` (`?after=`)."""

    object: Literal["list"] = "list"
    data: tuple[UploadedFile, ...]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


class FileDeleted(Wire):
    """`DELETE /v1/files/{id}`."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class ServedModel(BaseModel):
    """A model that can be called by its `id`, with the sampler's other fields."""

    model_config = ConfigDict(frozen=True, extra="allow")

    id: str
    object: str = "model"


class ServedModelList(BaseModel):
    """`GET /v1/models`: the models that can be called now."""

    object: str = "list"
    data: tuple[ServedModel, ...]


class CallRequest(BaseModel):
    """`POST /v1/completions` and `/v1/chat/completions`: the model, and OpenAI's other fields,
    which the sampler reads."""

    model_config = ConfigDict(frozen=True, extra="allow")

    model: str


class CallAnswer(RootModel[dict[str, Any]]):
    """OpenAI's completion or chat completion."""
