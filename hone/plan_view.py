"""A plan as text, one line for each of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.wire import Change, Cost, Placement, Plan

GIB_PARTS = {
    "trainer": {
        "weights": "weights_gib",
        "reference": "reference_gib",
        "gradients": "gradients_gib",
        "optimizer": "optimizer_gib",
        "activations": "activations_gib",
        "logits": "logits_gib",
        "update": "update_gib",
        "buffers": "buffers_gib",
        "overhead": "overhead_gib",
    },
    "sampler": {"weights": "weights_gib", "cache": "cache_gib", "overhead": "overhead_gib"},
}

SOURCES = {
    "tabled": "from data sheets",
    "benchmarked": "from a short measurement of this processor",
    "measured": "measured",
}
"""The source of a step's time, in words."""


def plan_lines(plan: Plan) -> list[str]:
    """Returns the plan as lines of text."""
    return [line for line in _lines(plan) if line]


def estimate_line(plan: Plan) -> str:
    """Returns the plan's result in one line."""
    if not plan.fits:
        sets = " ".join(f"--set {_set(change)}" for change in plan.changes)
        would = f"; it would with {sets}" if sets else ""
        return f"estimated: it does not fit on {plan.gpus}{would}"
    place = plan.placement
    parts = [f"{place.trainer.peak_gib:.1f} GiB for the trainer on {plan.gpus}"]
    if place.time is not None:
        parts.append(f"{place.time.step_s:.1f} s a step")
    if plan.cost is not None:
        parts.append(cost_text(plan.cost))
    return f"estimated: {', '.join(parts)}"


def _lines(plan: Plan) -> Iterator[str]:
    place = plan.placement
    trained = (
        "" if plan.num_trainable == plan.num_parameters else f", {plan.num_trainable:,} trained"
    )
    yield (
        f"{plan.model}: {plan.num_parameters:,} parameters{trained}, {plan.dtype}, learning rate "
        f"{plan.learning_rate:g}"
    )
    verdict = "fits" if plan.fits else "does not fit"
    yield f"{verdict} on {plan.gpus}: {placement_text(place)}"
    yield from (f"  {why}" for why in place.why_not)
    each = "each process" if place.kind == "cpu" else "each GPU"
    needed, room = place.trainer.peak_gib, place.trainer_room_gib
    yield f"  trainer, {each}: needs {needed:.1f} GiB and has {room:.1f}"
    yield f"    {_parts(place, 'trainer')}"
    if place.trainer.host_gib:
        yield f"    and {place.trainer.host_gib:.1f} GiB in the host's memory for each rank"
    least = place.sampler.weights_gib + place.sampler.overhead_gib + place.sampler.least_cache_gib
    room = place.sampler_room_gib
    yield f"  sampler, {each}: needs at least {least:.1f} GiB and has {room:.1f}"
    yield (
        f"    {_parts(place, 'sampler')} (for {place.sampler.sequences} sequences at once, "
        f"{place.sampler.cache_bytes_per_token:,} bytes per token)"
    )
    if place.time is not None:
        time = place.time
        parts = f"sampling {time.sample_s:.1f}, training {time.train_s:.1f}, sync {time.sync_s:.1f}"
        yield f"  a step takes about {time.step_s:.1f} s ({parts}; {SOURCES[time.source]})"
    if plan.cost is not None:
        yield f"  {cost_text(plan.cost)}"
    if place.settings:
        yield f"  settings: {' '.join(f'{name}={value}' for name, value in place.settings.items())}"
    yield from _remedies(plan)
    faster = [other for other in plan.others if other.fits]
    if faster:
        yield f"  also fits: {'; '.join(_other(other) for other in faster[:3])}"
    yield from (f"  note: {note}" for note in plan.notes)


def _remedies(plan: Plan) -> Iterator[str]:
    if plan.changes:
        yield f"  it fits with {' '.join(f'--set {_set(change)}' for change in plan.changes)}"
        for change in plan.changes:
            learned = "; this changes what is learned" if change.learned else ""
            yield f"    {_set(change)}: {change.why}{learned}"
    if plan.enough:
        start = "or as it is" if plan.changes else "as it is it fits"
        yield f"  {start} on {' or '.join(plan.enough)}"
    if not plan.fits and not plan.changes and not plan.enough:
        yield "  no change of the job, and none of the GPUs known here, is enough"


def _set(change: Change) -> str:
    return f"{change.key}={change.value}"


def placement_text(place: Placement) -> str:
    """Returns who gets which GPUs, in words."""
    samplers = "1 sampler" if place.num_samplers == 1 else f"{place.num_samplers} samplers"
    over = f" over {place.tensor_parallel} GPUs each" if place.tensor_parallel > 1 else ""
    ranks = "1 rank" if place.trainer_ranks == 1 else f"{place.trainer_ranks} ranks"
    match place.kind:
        case "split":
            return f"the trainer has {ranks} and {samplers}{over}, each on GPUs of its own"
        case "turns":
            return f"{ranks} and {samplers}{over} take turns on the same GPUs"
        case "shared":
            return "trainer and sampler share the GPU"
        case "cpu":
            return f"{ranks} and {samplers} in the host's memory"


def cost_text(cost: Cost) -> str:
    """Returns what a job costs, in words."""
    rate = f"{cost.per_hour:.2f} {cost.currency} per hour: {cost.source}"
    if cost.total is None or cost.hours is None:
        return f"a step costs about {cost.per_step:.4f} {cost.currency} ({rate})"
    return f"all steps: about {_hours(cost.hours)}, {cost.total:.2f} {cost.currency} ({rate})"


def _hours(hours: float) -> str:
    if hours >= 1:
        return f"{hours:.1f} hours"
    minutes = round(hours * 60)
    return {0: "less than a minute", 1: "1 minute"}.get(minutes, f"{minutes} minutes")


def _parts(place: Placement, who: str) -> str:
    memory = place.trainer if who == "trainer" else place.sampler
    found = {name: float(getattr(memory, field)) for name, field in GIB_PARTS[who].items()}
    return ", ".join(f"{name} {gib:.1f}" for name, gib in found.items() if gib >= 0.05)


def _other(place: Placement) -> str:
    time = f", {place.time.step_s:.1f} s a step" if place.time else ""
    return f"{placement_text(place)}{time}"
