"""The report of a job of 0 steps: models compared on held-out problems."""

from __future__ import annotations

from shared.wire.base import JobId, Wire


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
    """The result of the job `id`, which evaluated models: the `evaluation` in its summary."""

    id: JobId
    temperature: float
    seed: int
    sets: tuple[SetReport, ...]
