"""Models compared on held-out problems: `/v1/evaluations`."""

from __future__ import annotations

from pydantic import Field

from shared.job import Job
from shared.wire.base import JobId, Wire

MAX_MODELS = 16


class EvaluatedModel(Wire):
    """A model, and its name in the report. `model` is a folder in Hugging Face format that the
    samplers see, such as a checkpoint, or a Hugging Face id, of commit, tag or branch
    `revision`."""

    name: str = Field(min_length=1, max_length=1000)
    model: str = Field(min_length=1, max_length=4096)
    revision: str | None = Field(default=None, min_length=1, max_length=1000)


class EvaluationRequest(Wire):
    """`POST /v1/evaluations`: samples and grades the held-out problems of `job` (`data.eval`,
    `evaluation.sets`) with each model in turn, by `[evaluation]` and the job's rewards. The job's
    own model and training problems are ignored. Completions have the same seeds for all models. The
    caller chooses `id`, a new one for each evaluation."""

    id: JobId
    models: tuple[EvaluatedModel, ...] = Field(min_length=1, max_length=MAX_MODELS)
    job: Job


class Estimate(Wire):
    """The mean over `num_problems` problems, and its 95 % confidence interval: None for one problem
    or equal values.

    `p_value` is for a difference on few problems, by an exact permutation test: None if more than
    16 problems differ, or if this is no difference."""

    mean: float
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    num_problems: int


class ModelScores(Wire):
    """A model's scores on a held-out set, by metric: reward, pass@k, completions/mean_length
    (tokens), completions/clipped_ratio (the share that `max_tokens` cut off). `missing_rewards` and
    `errored_rollouts` are shares of its completions, which count nowhere else.

    `differences` are its metrics minus the first model's, over the same problems; empty for the
    first model."""

    name: str
    metrics: dict[str, Estimate]
    differences: dict[str, Estimate] = {}
    missing_rewards: float
    errored_rollouts: float


class SetReport(Wire):
    """The models on one held-out set. `data.eval` is called ""; messages call the set `source`."""

    name: str
    source: str
    num_problems: int
    num_samples: int
    models: tuple[ModelScores, ...]


class EvaluationReport(Wire):
    """The result of an evaluation."""

    id: JobId
    temperature: float
    seed: int
    sets: tuple[SetReport, ...]


class EvaluationState(Wire):
    """`GET /v1/evaluations/{id}`: how far it is. `model` is being evaluated, `number` from 1 on of
    `num_models`; `num_done` of its `num_problems` problems are done."""

    id: JobId
    model: str
    number: int
    num_models: int
    num_done: int
    num_problems: int


class EvaluationEnded(Wire):
    """`DELETE /v1/evaluations/{id}`: `ended` says whether it was under way."""

    id: str
    ended: bool
