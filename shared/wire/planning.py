"""What a job will probably need: `POST /v1/jobs/plan`, `hone plan`, and part of a dry run.

How it is worked out, and from what, is in `shared/plan/`.
"""

from __future__ import annotations

from typing import Literal

from shared.wire.base import Wire

PlacementKind = Literal["split", "turns", "shared", "cpu"]


class TrainerMemory(Wire):
    """What a GPU of the trainer holds at its highest, in GiB: `peak_gib` is weights, reference,
    gradients, optimizer and overhead, and the most that is there at once of activations, logits,
    update and buffers. `host_gib` is what each rank has in the host's memory besides: what is
    offloaded, moved while the sampler has its turn, or copied before several updates."""

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
    """What a GPU of the sampler holds, in GiB. `cache_gib` is for the `sequences` that are sampled
    at once, at their longest; with less, fewer are. `least_cache_gib`, for one sequence of
    `max_model_len`, has to be there."""

    weights_gib: float
    cache_gib: float
    least_cache_gib: float
    overhead_gib: float
    cache_bytes_per_token: int
    sequences: int


class StepTime(Wire):
    """Seconds of a step. `step_s` is all of them, or the longer of sampling and training where they
    run beside each other. "tabled": from the GPUs' data sheets; "measured": from the steps of a
    run."""

    sample_s: float
    train_s: float
    sync_s: float
    step_s: float
    source: Literal["tabled", "measured"]


class Cost(Wire):
    """What the job costs, in `currency`: `total` for all of its `hours`, None while the number of
    steps is not known. `source` says where the price per hour is from."""

    currency: str
    per_hour: float
    per_step: float
    hours: float | None
    total: float | None
    source: str


class Placement(Wire):
    """Who gets which GPUs. "split": each its own. "turns": both the same ones, one after the other
    (HONE_COLOCATE). "shared": both the same ones at once. "cpu": none. `fits` is False for the
    reasons in `why_not`. `settings` are what it is chosen by, by name."""

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
    """A change of the job: `key` and `value` as `--set` takes them, and what it does. It changes
    what is learned where `learned`."""

    key: str
    value: str
    why: str
    learned: bool = False


class Plan(Wire):
    """What a job needs on `gpus`, from arithmetic alone. `placement` is the fastest of those that
    fit; where none does, the one that lacks least. `changes`, made together, make it fit; empty
    where it does already, or where none of those tried is enough; onto the GPUs in `enough` it fits
    as it is. `others` are the placements that were not chosen. `notes` say what is not known, and
    what was taken for granted."""

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
