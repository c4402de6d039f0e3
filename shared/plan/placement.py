"""Which GPUs trainer and samplers get: every possible placement, whether it fits, and how long a
step takes.

    split    N ranks on GPUs of their own, S samplers of t GPUs each on the others
    turns    N ranks and one sampler over the same N GPUs, one after the other (HONE_COLOCATE): the
             optimizer's states are in the host's memory while the sampler has the GPU, at ZeRO-2,
             at ZeRO-1 in float32 and with `memory.offload_optimizer`; else they stay
    shared   both on the same GPU at once, the sampler with a fixed share of it
    cpu      no GPU

A placement fits if the trainer's peak is within `USABLE` of the memory that the sampler leaves, and
the sampler's weights, overhead and cache of one longest sequence are within its share
(HONE_GPU_MEMORY_UTILIZATION). The fastest placement that fits is chosen, and of equally fast ones
the first in this list. Where none fits, the changes that make the job fit are the cheapest of all
combinations, judged by the same arithmetic.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from shared.job import Job, LoraSpec
from shared.plan import rates
from shared.plan.gpus import TABLE, Gpu, GpuGroup
from shared.plan.memory import (
    GIB,
    USABLE,
    RankMemory,
    Ranks,
    SamplerShape,
    room_on_cpu,
    sampler_memory,
    trainer_memory,
)
from shared.plan.model import Model
from shared.plan.rates import PlanInput
from shared.settings import Settings
from shared.wire.records import Change, Placement, SamplerMemory, StepTime, TrainerMemory
from shared.wire.records import PlacementKind as Kind

SHARED_UTILIZATION = 0.35
"""Share of a GPU's memory that vLLM takes beside a trainer. In bfloat16 with float32 masters and
Adam's moments the trainer needs eight times vLLM's weights."""

TURNS_UTILIZATION = 0.6
"""The share where the two take turns: the rest is for the trainer's weights, which stay."""

ASLEEP_GIB = 1.0
"""GiB of a GPU that a sleeping sampler keeps: CUDA's context and graphs. Assumed."""


def placements(needs: PlanInput, pools: tuple[GpuGroup, ...]) -> list[Placement]:
    """Returns every placement, the best first: placements that fit before the others, faster ones
    first; placements that do not fit by how much memory they lack, the least first."""
    return sorted((each.judge() for each in _candidates(needs, pools)), key=_rank)


def _rank(placement: Placement) -> tuple[bool, float]:
    if placement.fits:
        return False, placement.time.step_s if placement.time else 0.0
    lacking = placement.trainer.peak_gib - placement.trainer_room_gib
    return True, max(lacking, 0.0) + max(
        placement.sampler.least_gib - placement.sampler_room_gib, 0
    )


def _candidates(needs: PlanInput, pools: tuple[GpuGroup, ...]) -> Iterator[Candidate]:
    pool, gpu = pools[0], pools[0].gpu
    if gpu.is_cpu:
        yield _on_cpu(needs, gpu)
    elif len(pools) == 2:
        yield _split(needs, *pools)
    else:
        for num_ranks in range(1, pool.count):
            yield _split(needs, GpuGroup(num_ranks, gpu), GpuGroup(pool.count - num_ranks, gpu))
        if _may_take_turns(needs.job):
            yield _turns(needs, pool)
        if pool.count == 1:
            share = _utilization(needs.settings, SHARED_UTILIZATION)
            rooms = max(USABLE - share, 0.0) * gpu.memory_gib, share * gpu.memory_gib
            yield Candidate(needs, "shared", pool, gpu, 1, 1, *rooms)


def _may_take_turns(job: Job) -> bool:
    stays = job.memory.zero_stage == 3 and not job.memory.offload_optimizer
    return job.max_staleness == 0 and job.weight_sync not in ("reload", "restart") and not stays


def _utilization(settings: Settings, default: float) -> float:
    chosen = "gpu_memory_utilization" in settings.model_fields_set
    return settings.gpu_memory_utilization if chosen else default


@dataclass(frozen=True)
class Candidate:
    """A placement to be judged: the trainer's ranks on `trainer`, and samplers whose models are
    split over `split` of the GPUs `sampler` each, with so many GiB of each GPU for each.
    `settings` choose it; `why_not` is why it does not fit in any case."""

    needs: PlanInput
    kind: Kind
    trainer: GpuGroup
    sampler: Gpu
    num_samplers: int = 1
    split: int = 1
    trainer_room: float = 0.0
    sampler_room: float = 0.0
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    why_not: tuple[str, ...] = ()

    @property
    def ranks(self) -> Ranks:
        gpu = self.trainer.gpu
        host_bytes = gpu.memory_gib * GIB if gpu.is_cpu else None
        itemsize = self.needs.itemsize(gpu)
        return Ranks(self.trainer.count, itemsize, gpu.device, self.kind == "turns", host_bytes)

    @cached_property
    def trained(self) -> PlanInput:
        """The needs, with `memory.gradient_checkpointing` decided: "auto" is on unless a step fits
        without."""
        without = self._recomputing(False)
        room, ranks = self.trainer_room, self.ranks
        if ranks.host_bytes is not None:
            room = min(room, room_on_cpu(ranks.host_bytes) / GIB / ranks.num)
        peak_gib = self._memory(without, replace(ranks, host_bytes=None)).peak_gib
        return without if peak_gib <= room else self._recomputing(True)

    @cached_property
    def trainer_memory(self) -> TrainerMemory:
        return self._memory(self.trained, self.ranks)

    def _recomputing(self, is_on: bool) -> PlanInput:
        job = self.needs.job
        memory = job.memory.recomputing(is_on)
        return replace(self.needs, job=job.model_copy(update={"memory": memory}))

    def _memory(self, needs: PlanInput, ranks: Ranks) -> TrainerMemory:
        step_tokens = needs.rank_tokens(ranks.num)
        return trainer_memory(needs.model, needs.job, ranks, needs.longest, step_tokens)

    @cached_property
    def sampler_memory(self) -> SamplerMemory:
        needs, settings = self.needs, self.needs.settings
        shape = SamplerShape(
            tensor_parallel=self.split,
            max_sequences=settings.max_num_seqs or self.sampler.max_sequences,
            sequences=-(-needs.completions // self.num_samplers),
            sequence_tokens=needs.longest,
            max_adapters=settings.rollout_adapters + 1,
            itemsize=needs.itemsize(self.sampler),
            device=self.sampler.device,
        )
        return sampler_memory(needs.model, needs.job, shape)

    def judge(self) -> Placement:
        """Returns the placement with its needs, and why it does not fit."""
        on_each = "" if self.trainer.gpu.is_cpu else " on each GPU"
        lacking = [
            f"the {who} needs {needed:.1f} GiB{on_each} and has {room:.1f}"
            for who, needed, room in (
                ("trainer", self.trainer_memory.peak_gib, self.trainer_room),
                ("sampler", self.sampler_memory.least_gib, self.sampler_room),
            )
            if needed > room
        ]
        why_not = (*lacking, *self.why_not)
        return Placement(
            kind=self.kind,
            trainer_ranks=self.trainer.count,
            num_samplers=self.num_samplers,
            tensor_parallel=self.split,
            fits=not why_not,
            why_not=why_not,
            trainer_room_gib=round(self.trainer_room, 3),
            sampler_room_gib=round(self.sampler_room, 3),
            trainer=self.trainer_memory,
            recomputes=bool(self.trained.job.memory.gradient_checkpointing),
            sampler=self.sampler_memory,
            time=None if why_not else self._time(),
            settings=dict(self.settings),
        )

    def _time(self) -> StepTime | None:
        """Returns the time of a step by the rates of the GPUs or of the CPU; None if one has
        none."""
        needs, sampler = self.needs, self.sampler_memory
        if not (self.trainer.gpu.has_rates and self.sampler.has_rates):
            return None
        free = (self.sampler_room - sampler.weights_gib - sampler.overhead_gib) * GIB
        at_longest = int(free // (sampler.cache_bytes_per_token * needs.longest))
        at_once = max(1, min(sampler.sequences, at_longest))
        sample_s = rates.sample_s(needs, self.sampler, self.num_samplers, self.split, at_once)
        train_s = rates.train_s(self.trained, self.trainer, self.kind)
        sync_s = rates.sync_s(needs, self.trainer.gpu)
        is_beside = needs.job.max_staleness > 0 and self.kind == "split"
        source = "benchmarked" if self.trainer.gpu.is_cpu else "tabled"
        return rates.step_time(sample_s, train_s, sync_s, is_beside=is_beside, source=source)


def _splits(model: Model, num_gpus: int) -> list[int]:
    """Returns over how many GPUs vLLM can split the model: powers of 2 that divide its heads."""
    return [size for size in COUNTS if size <= num_gpus and model.heads % size == 0]


def _settings(num_ranks: int, split: int) -> dict[str, str]:
    found = {"HONE_TRAINER_RANKS": str(num_ranks)}
    return found | ({"HONE_TENSOR_PARALLEL_SIZE": str(split)} if split > 1 else {})


def _split(needs: PlanInput, trainer: GpuGroup, samplers: GpuGroup) -> Candidate:
    """As many samplers as possible, each over as few GPUs as it fits onto: GPUs that share a model
    must communicate, samplers need not."""
    room = needs.settings.gpu_memory_utilization * samplers.gpu.memory_gib
    found = [
        Candidate(
            needs,
            "split",
            trainer,
            samplers.gpu,
            samplers.count // size,
            size,
            USABLE * trainer.gpu.memory_gib,
            room,
            _settings(trainer.count, size),
        )
        for size in _splits(needs.model, samplers.count)
    ]
    return next((each for each in found if each.sampler_memory.least_gib <= room), found[-1])


def _turns(needs: PlanInput, pool: GpuGroup) -> Candidate:
    """One sampler over as many of the trainer's GPUs as it can be split over. Unless its memory
    share is set, the share leaves room for the trainer's part that stays, at least its weights."""
    gpu, split = pool.gpu, max(_splits(needs.model, pool.count))
    settings = {"HONE_COLOCATE": "1", **_settings(pool.count, split)}
    way = Candidate(needs, "turns", pool, gpu, 1, split, USABLE * gpu.memory_gib - ASLEEP_GIB)
    trainer = way.trainer_memory
    stays = trainer.weights_gib + trainer.reference_gib + trainer.overhead_gib
    stays += RankMemory(needs.model, needs.job, way.ranks).states.resting / GIB
    share = _utilization(needs.settings, TURNS_UTILIZATION)
    most = max(math.floor(100 * (1 - stays / gpu.memory_gib)) / 100, 0.0)
    why_not: tuple[str, ...] = ()
    if share > most and "gpu_memory_utilization" not in needs.settings.model_fields_set:
        share = most
        settings["HONE_GPU_MEMORY_UTILIZATION"] = str(share)
    elif share > most:
        why_not = (
            f"the trainer keeps {stays:.1f} GiB while the sampler has {share * gpu.memory_gib:.1f} "
            f"of the GPU's {gpu.memory_gib:.1f} GiB; lower HONE_GPU_MEMORY_UTILIZATION",
        )
    return replace(way, sampler_room=share * gpu.memory_gib, settings=settings, why_not=why_not)


def _on_cpu(needs: PlanInput, gpu: Gpu) -> Candidate:
    """Both are in the host's memory. The sampler's cache has its configured size."""
    settings = needs.settings
    pool = GpuGroup(settings.trainer_ranks, gpu)
    way = Candidate(needs, "cpu", pool, gpu, settings.rollout_replicas)
    each = way.sampler_memory.weights_gib + way.sampler_memory.overhead_gib + settings.kv_cache_gib
    room = (USABLE * gpu.memory_gib - way.num_samplers * each) / pool.count
    return replace(way, trainer_room=room, sampler_room=each)


COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Remedy:
    """A change of the job's key `key` that saves memory, with its cost: the cheapest combination
    has the least sum of costs. `values` returns the key's new values, the mildest first; none if
    the job has it already."""

    key: str
    why: str
    cost: int
    values: Callable[[PlanInput], Iterable[Any]]

    def job(self, job: Job, value: Any) -> Job:
        """Returns the job with the value."""
        section, _, name = self.key.rpartition(".")
        if not section:
            return job.model_copy(update={name: value})
        keys = getattr(job, section) or LoraSpec()  # the one section that a job may lack
        return job.model_copy(update={section: keys.model_copy(update={name: value})})

    def change(self, job: Job) -> Change:
        value = str(operator.attrgetter(self.key)(job)).lower()  # true, as in TOML
        return Change(key=self.key, value=value, why=self.why, learned=self.key == "lora.rank")


def remedies(needs: PlanInput, pools: tuple[GpuGroup, ...]) -> tuple[Change, ...]:
    """Returns the changes that together make the job fit onto the GPUs; () if no combination is
    enough."""
    # on a CPU the host's memory is what runs short
    possible = [
        each
        for each in REMEDIES
        if each.key != "memory.offload_optimizer" or not pools[0].gpu.is_cpu
    ]
    counts = range(1, len(possible) + 1)
    every = itertools.chain.from_iterable(itertools.combinations(possible, num) for num in counts)
    for chosen in sorted(every, key=lambda chosen: sum(remedy.cost for remedy in chosen)):
        for changed in _changed(needs, chosen):
            if placements(changed, pools)[0].fits:
                return tuple(remedy.change(changed.job) for remedy in chosen)
    return ()


def _changed(needs: PlanInput, chosen: Sequence[Remedy]) -> Iterator[PlanInput]:
    """Yields the needs with all of the changes, the mildest ones first."""
    if not chosen:
        yield needs
        return
    first, *rest = chosen
    for value in first.values(needs):
        yield from _changed(replace(needs, job=first.job(needs.job, value)), rest)


def enough_gpus(needs: PlanInput, pools: tuple[GpuGroup, ...]) -> tuple[str, ...]:
    """Returns GPUs that fit the job unchanged: more GPUs of the planned kind, and the smallest
    single GPU."""
    given = pools[0]
    more = [GpuGroup(count, given.gpu) for count in COUNTS if count > given.count]
    single = [GpuGroup(1, gpu) for gpu in sorted(TABLE.values(), key=lambda gpu: gpu.memory_gib)]
    found = [
        next((pool for pool in tried if placements(needs, (pool,))[0].fits), None)
        for tried in (more if len(pools) == 1 and not given.gpu.is_cpu else [], single)
    ]
    return tuple(str(pool) for pool in found if pool is not None)


def _halves(needs: PlanInput) -> Iterator[int]:
    """Half the tokens of a micro-batch and half of that, down to one longest sequence."""
    tokens = needs.job.memory.micro_batch_tokens
    while (half := max(tokens // 2, needs.longest)) < tokens:
        yield half
        tokens = half


def _shorter(needs: PlanInput) -> list[int]:
    """The longest sequence of training or evaluation, if known. A lower bound would cut
    completions, and so change what is learned."""
    job = needs.job
    needed = needs.prompt_tokens + max(job.sampling.max_tokens, job.evaluation.max_tokens or 0)
    is_less = needed < (job.max_model_len or needs.model.max_len)
    return [needed] if needs.is_longest and is_less else []


def _if_not(is_there: Callable[[Job], object], value: Any) -> Callable[[PlanInput], list[Any]]:
    return lambda needs: [] if is_there(needs.job) else [value]


REMEDIES = (
    Remedy(
        "memory.micro_batch_tokens",
        "fewer tokens in a pass, and more passes",
        1,
        _halves,
    ),
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
        _if_not(lambda job: job.memory.gradient_checkpointing, True),
    ),
    Remedy(
        "memory.zero_stage",
        "ranks share the weights too, and gather them while they compute",
        4,
        _if_not(lambda job: job.memory.zero_stage == 3, 3),
    ),
    Remedy(
        "memory.offload_optimizer",
        "master weights and Adam's moments are in the host's memory and updated there",
        8,
        _if_not(lambda job: job.memory.offload_optimizer or not job.memory.zero_stage, True),
    ),
    Remedy(
        "lora.rank",
        "only adapters are trained, which is another way to learn",
        100,
        _if_not(lambda job: job.lora, LoraSpec().rank),
    ),
)
"""The remedies, in the order in which a plan lists them."""
