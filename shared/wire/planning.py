"""What a job will probably need: `POST /v1/jobs/plan`, `hone plan`, and part of a dry run.

`shared/plan/` computes it.
"""

from __future__ import annotations

from typing import Literal

from shared.wire.base import Wire

PlacementKind = Literal["split", "turns", "shared", "cpu"]


class PromptLengths(Wire):
    """The tokens of the `longest` of `num` prompts of a job, None if they were not counted, for the
    reason `why_not`. `is_all`: the job has no other prompts."""

    longest: int | None = None
    num: int = 0
    is_all: bool = False
    why_not: str = ""


class TrainerMemory(Wire):
    """Peak memory of a GPU of the trainer, in GiB: `peak_gib` is weights, reference, gradients,
    optimizer and overhead, and the largest sum of activations, logits, update and buffers that
    exist at once. `host_gib` is each rank's part in the host's memory: offloaded states, states
    moved while the sampler has its turn, or copies before several updates."""

    weights_gib: float
    reference_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    logits_gib: float
    update_gib: float
    buffers_gib: float
    overhead_gib: float
    peak_gib: float
    host_gib: float


class SamplerMemory(Wire):
    """Memory of a GPU of the sampler, in GiB. `cache_gib` holds the `sequences` that are sampled at
    once, at their longest; a smaller cache samples fewer at once. `least_cache_gib` holds one
    sequence of `max_model_len` and is required."""

    weights_gib: float
    cache_gib: float
    least_cache_gib: float
    overhead_gib: float
    cache_bytes_per_token: int
    sequences: int


class StepTime(Wire):
    """Seconds of a step. `step_s` is the sum, or the longer of sampling and training if they run at
    the same time. "tabled": from the GPUs' data sheets; "benchmarked": from a short measurement of
    this machine's processor; "measured": from the steps of a run."""

    sample_s: float
    train_s: float
    sync_s: float
    step_s: float
    source: Literal["tabled", "benchmarked", "measured"]


class Cost(Wire):
    """The job's cost, in `currency`: `total` for all of its `hours`, None while the number of steps
    is not known. `source` says where the price per hour comes from."""

    currency: str
    per_hour: float
    per_step: float
    hours: float | None
    total: float | None
    source: str


class Placement(Wire):
    """Who gets which GPUs. "split": each its own. "turns": both the same ones, one after the other
    (HONE_COLOCATE). "shared": both the same ones at once. "cpu": none. `fits` is False for the
    reasons in `why_not`. `settings` are the settings, by name, that choose it."""

    kind: PlacementKind
    trainer_ranks: int
    num_samplers: int
    tensor_parallel: int
    fits: bool
    why_not: tuple[str, ...] = ()
    trainer_room_gib: float
    sampler_room_gib: float
    trainer: TrainerMemory
    sampler: SamplerMemory
    time: StepTime | None = None
    settings: dict[str, str] = {}


class Change(Wire):
    """A change of the job: `key` and `value` as `--set` takes them, and its effect. `learned`: it
    changes what is learned."""

    key: str
    value: str
    why: str
    learned: bool = False


class Plan(Wire):
    """A job's needs on `gpus`, from arithmetic alone. `placement` is the fastest placement that
    fits; if none fits, the placement that lacks the least memory. `changes` together make the job
    fit; empty if it fits already, or if no combination is enough. On the GPUs in `enough` the job
    fits as it is. `others` are the placements that were not chosen. `notes` say what is unknown or
    assumed."""

    model: str
    num_parameters: int
    num_trainable: int
    learning_rate: float
    dtype: str
    gpus: str
    fits: bool
    placement: Placement
    others: tuple[Placement, ...] = ()
    changes: tuple[Change, ...] = ()
    enough: tuple[str, ...] = ()
    steps: int
    prompt_tokens: int
    completion_tokens: int
    cost: Cost | None = None
    notes: tuple[str, ...] = ()
