"""Changes that make a job fit: the cheapest of all combinations, judged by the plan's
arithmetic."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared.job import Job, LoraSpec
from shared.plan.gpus import TABLE, GpuGroup
from shared.plan.placement import PlanInput, placements
from shared.wire.records import Change

COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Remedy:
    """A change of the job's key `key` that saves memory, with its cost: the cheapest combination
    has the least sum of costs. `apply` returns the job with the change, or None if the job has it
    already."""

    key: str
    why: str
    cost: int
    apply: Callable[[PlanInput], Job | None]
    learned: bool = False

    def change(self, job: Job) -> Change:
        found = operator.attrgetter(self.key)(job)
        text = str(found).lower() if isinstance(found, bool) else str(found)
        return Change(key=self.key, value=text, why=self.why, learned=self.learned)


def remedies(needs: PlanInput, pools: tuple[GpuGroup, ...]) -> tuple[Change, ...]:
    """Returns the changes that together make the job fit onto the GPUs; () if no combination is
    enough."""
    for chosen in _combinations():
        if OFFLOAD in chosen and pools[0].gpu.is_cpu:
            continue  # the host's memory is what runs short
        for job in _changed(needs, chosen):
            if placements(replace(needs, job=job), pools)[0].fits:
                return tuple(remedy.change(job) for remedy in chosen)
    return ()


def enough_gpus(needs: PlanInput, pools: tuple[GpuGroup, ...]) -> tuple[str, ...]:
    """Returns GPUs that fit the job as it is: more GPUs of the planned kind, and the smallest
    single GPU."""
    given = pools[0]
    more = [GpuGroup(count, given.gpu) for count in COUNTS if count > given.count]
    single = [GpuGroup(1, gpu) for gpu in sorted(TABLE.values(), key=lambda gpu: gpu.memory_gib)]
    found = [
        next((pool for pool in tried if placements(needs, (pool,))[0].fits), None)
        for tried in (more if len(pools) == 1 and not given.gpu.is_cpu else [], single)
    ]
    return tuple(str(pool) for pool in found if pool is not None)


def _combinations() -> Iterator[tuple[Remedy, ...]]:
    """Yields the combinations of remedies, the cheapest first."""
    every = [
        chosen
        for count in range(1, len(REMEDIES) + 1)
        for chosen in itertools.combinations(REMEDIES, count)
    ]
    yield from sorted(every, key=lambda chosen: sum(remedy.cost for remedy in chosen))


def _changed(needs: PlanInput, chosen: Sequence[Remedy]) -> Iterator[Job]:
    """Yields the job with all of the changes. If smaller micro-batches are among them, yields it
    with smaller and smaller ones."""
    fewer = MICRO_BATCH in chosen
    for remedy in chosen:
        if remedy is MICRO_BATCH:
            continue
        job = remedy.apply(needs)
        if job is None:
            return
        needs = replace(needs, job=job)
    if not fewer:
        yield needs.job
    while fewer and (job := MICRO_BATCH.apply(needs)) is not None:
        yield job
        needs = replace(needs, job=job)


def _with_memory(job: Job, **values: Any) -> Job:
    return job.model_copy(update={"memory": job.memory.model_copy(update=values)})


def _halved(needs: PlanInput) -> Job | None:
    """Half the tokens of a micro-batch, down to one longest sequence."""
    tokens = needs.job.memory.micro_batch_tokens
    half = max(tokens // 2, needs.longest)
    return _with_memory(needs.job, micro_batch_tokens=half) if half < tokens else None


def _checkpointed(needs: PlanInput) -> Job | None:
    if needs.job.memory.gradient_checkpointing:
        return None
    return _with_memory(needs.job, gradient_checkpointing=True)


def _shorter(needs: PlanInput) -> Job | None:
    """Lowers the bound to the longest sequence of training or evaluation, if known. A lower bound
    would cut completions, and so change what is learned."""
    job = needs.job
    needed = needs.prompt_tokens + max(job.sampling.max_tokens, job.evaluation.max_tokens or 0)
    if not needs.is_longest or needed >= (job.max_model_len or needs.model.max_len):
        return None
    return job.model_copy(update={"max_model_len": needed})


def _spread(needs: PlanInput) -> Job | None:
    return _with_memory(needs.job, zero_stage=3) if needs.job.memory.zero_stage < 3 else None


def _offloaded(needs: PlanInput) -> Job | None:
    if needs.job.memory.offload_optimizer or needs.job.memory.zero_stage == 0:
        return None
    return _with_memory(needs.job, offload_optimizer=True)


def _adapted(needs: PlanInput) -> Job | None:
    return None if needs.job.lora else needs.job.model_copy(update={"lora": LoraSpec()})


MICRO_BATCH = Remedy(
    "memory.micro_batch_tokens",
    "fewer tokens in a pass, and more passes",
    1,
    _halved,
)

OFFLOAD = Remedy(
    "memory.offload_optimizer",
    "master weights and Adam's moments are in the host's memory and updated there",
    8,
    _offloaded,
)

REMEDIES = (
    MICRO_BATCH,
    Remedy(
        "max_model_len",
        "the sampler holds no longer sequence; the longest prompt has its whole completion",
        1,
        _shorter,
    ),
    Remedy(
        "memory.gradient_checkpointing",
        "layers are computed again in the backward pass: a third more time",
        2,
        _checkpointed,
    ),
    Remedy(
        "memory.zero_stage",
        "ranks share the weights too, and gather them while they compute",
        4,
        _spread,
    ),
    OFFLOAD,
    Remedy(
        "lora.rank",
        "only adapters are trained, which is another way to learn",
        100,
        _adapted,
        learned=True,
    ),
)
"""The remedies, in the order in which a plan lists them."""
