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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared.job import Job, LoraSpec
from shared.plan import rates
from shared.plan.gpus import TABLE, Gpu, GpuGroup
from shared.plan.memory import GIB, Ranks, SamplerShape, sampler_memory, state_bytes, trainer_memory
from shared.plan.model import Model
from shared.settings import Settings
from shared.weights.architectures import choose_dtype
from shared.wire.records import Change, Placement, SamplerMemory, StepTime, TrainerMemory
from shared.wire.records import PlacementKind as Kind

USABLE = 0.95
"""Share of a GPU's memory that tensors can fill: the rest is lost to fragmentation in torch's
allocator. Assumed."""

SHARED_UTILIZATION = 0.35
"""Share of a GPU's memory that vLLM takes beside a trainer. In bfloat16 with float32 masters and
Adam's moments the trainer needs eight times vLLM's weights."""

TURNS_UTILIZATION = 0.6
"""The share where the two take turns: the rest is for the trainer's weights, which stay."""

ASLEEP_GIB = 1.0
"""GiB of a GPU that a sleeping sampler keeps: CUDA's context and graphs. Assumed."""


@dataclass(frozen=True)
class PlanInput:
    """The input of a placement: a job, its model, the tokens of its prompts and completions, and
    the settings. Time is for `completion_tokens`, memory for `sampling.max_tokens`. `is_longest`:
    no prompt has more than `prompt_tokens`; else these are a guess."""

    job: Job
    model: Model
    prompt_tokens: int
    completion_tokens: int
    settings: Settings
    is_longest: bool = False

    @property
    def load(self) -> rates.StepSize:
        group = self.job.completions_per_prompt
        return rates.StepSize(
            completions=self.job.sampling.prompts_per_step * group,
            group=group,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
        )

    @property
    def longest(self) -> int:
        """Returns the tokens of the longest prompt with its completion."""
        return self.prompt_tokens + self.job.sampling.max_tokens

    def rank_tokens(self, num_ranks: int) -> int | None:
        """Returns the most tokens of a rank before an update, a shared prompt once for its group;
        None where an environment's turns add to prompt and completion."""
        if self.job.environment is not None:
            return None
        load, longest = self.load, self.job.sampling.max_tokens
        groups = load.completions / load.group
        if not rates.may_share(self.job.memory):
            groups = load.completions
        tokens = groups * self.prompt_tokens + load.completions * longest
        return math.ceil(tokens / num_ranks)

    def itemsize(self, gpu: Gpu) -> int:
        """Returns the bytes of a weight on such a GPU."""
        return 4 if self.dtype(gpu) == "float32" else 2

    def dtype(self, gpu: Gpu) -> str:
        return choose_dtype(
            self.job.training.dtype, capability=None, cpu_multiplies_bfloat16=gpu.has_bfloat16
        )


def placements(needs: PlanInput, pools: tuple[GpuGroup, ...]) -> list[Placement]:
    """Returns every placement, the best first: placements that fit before the others, faster ones
    first; placements that do not fit by how much memory they lack, the least first."""
    found = list(_ways(needs, pools))
    order = sorted(range(len(found)), key=lambda index: (*_rank(found[index]), index))
    return [found[index] for index in order]


def _rank(placement: Placement) -> tuple[bool, float]:
    if not placement.fits:
        lacking = placement.trainer.peak_gib - placement.trainer_room_gib
        return True, max(lacking, 0.0) + max(
            _least(placement.sampler) - placement.sampler_room_gib, 0
        )
    return False, placement.time.step_s if placement.time else 0.0


def _ways(needs: PlanInput, pools: tuple[GpuGroup, ...]) -> Iterator[Placement]:
    trainer, sampler = pools[0], pools[-1]
    if trainer.gpu.is_cpu:
        yield _on_cpu(needs, trainer.gpu)
        return
    if len(pools) == 2:
        yield _split(needs, (trainer.gpu, trainer.count), (sampler.gpu, sampler.count))
        return
    for num_ranks in range(1, trainer.count):
        yield _split(needs, (trainer.gpu, num_ranks), (trainer.gpu, trainer.count - num_ranks))
    if _may_take_turns(needs.job):
        yield _turns(needs, trainer)
    if trainer.count == 1:
        yield _shared(needs, trainer)


def _may_take_turns(job: Job) -> bool:
    stays = job.memory.zero_stage == 3 and not job.memory.offload_optimizer
    return job.max_staleness == 0 and job.weight_sync not in ("reload", "restart") and not stays


def _tensor_parallels(model: Model, num_gpus: int) -> list[int]:
    """Returns over how many GPUs vLLM can split the model: powers of 2 that divide its heads."""
    return [size for size in (1, 2, 4, 8) if size <= num_gpus and model.heads % size == 0]


def _split(needs: PlanInput, trainer: tuple[Gpu, int], samplers: tuple[Gpu, int]) -> Placement:
    """As many samplers as possible, each over as few GPUs as it fits onto: GPUs that share a model
    must communicate, samplers need not."""
    gpu, num_ranks = trainer
    sampler_gpu, num_free = samplers
    room = needs.settings.gpu_memory_utilization * sampler_gpu.memory_gib
    sizes = _tensor_parallels(needs.model, num_free)
    ways = [
        PlacementCandidate(
            "split", num_ranks, num_free // size, size, gpu, sampler_gpu, _settings(num_ranks, size)
        )
        for size in sizes
    ]
    way = next((way for way in ways if _least(_memory(needs, way)[1]) <= room), ways[-1])
    return _judged(needs, way, trainer_room=USABLE * gpu.memory_gib, sampler_room=room)


def _settings(num_ranks: int, split: int) -> dict[str, str]:
    found = {"HONE_TRAINER_RANKS": str(num_ranks)}
    return found | ({"HONE_TENSOR_PARALLEL_SIZE": str(split)} if split > 1 else {})


def _turns(needs: PlanInput, pool: GpuGroup) -> Placement:
    """One sampler over as many of the trainer's GPUs as it can be split over. Unless its memory
    share is set, the share leaves room for the trainer's part that stays, at least its weights."""
    gpu = pool.gpu
    split = max(_tensor_parallels(needs.model, pool.count))
    settings = {"HONE_COLOCATE": "1", **_settings(pool.count, split)}
    way = PlacementCandidate("turns", pool.count, 1, split, gpu, gpu, settings)
    trainer, _ = _memory(needs, way)
    stays = trainer.weights_gib + trainer.reference_gib + trainer.overhead_gib
    stays += state_bytes(needs.model, needs.job, _ranks(needs, way)).resting / GIB
    share = _utilization(needs.settings, TURNS_UTILIZATION)
    most = max(math.floor(100 * (1 - stays / gpu.memory_gib)) / 100, 0.0)
    if share > most and "gpu_memory_utilization" not in needs.settings.model_fields_set:
        share = most
        settings["HONE_GPU_MEMORY_UTILIZATION"] = str(share)
    placed = _judged(
        needs,
        way,
        trainer_room=USABLE * gpu.memory_gib - ASLEEP_GIB,
        sampler_room=share * gpu.memory_gib,
    )
    if share <= most:
        return placed
    why = (
        f"the trainer keeps {stays:.1f} GiB while the sampler has {share * gpu.memory_gib:.1f} of "
        f"the GPU's {gpu.memory_gib:.1f} GiB; lower HONE_GPU_MEMORY_UTILIZATION"
    )
    update = {"fits": False, "why_not": (*placed.why_not, why), "time": None}
    return placed.model_copy(update=update)


def _shared(needs: PlanInput, pool: GpuGroup) -> Placement:
    share = _utilization(needs.settings, SHARED_UTILIZATION)
    return _judged(
        needs,
        PlacementCandidate("shared", 1, 1, 1, pool.gpu, pool.gpu, {}),
        trainer_room=max(USABLE - share, 0.0) * pool.gpu.memory_gib,
        sampler_room=share * pool.gpu.memory_gib,
    )


def _on_cpu(needs: PlanInput, gpu: Gpu) -> Placement:
    """Both are in the host's memory. The sampler's cache has its configured size."""
    settings = needs.settings
    way = PlacementCandidate(
        "cpu", settings.trainer_ranks, settings.rollout_replicas, 1, gpu, gpu, {}
    )
    _, sampler = _memory(needs, way)
    each = sampler.weights_gib + sampler.overhead_gib + settings.kv_cache_gib
    return _judged(
        needs,
        way,
        trainer_room=(USABLE * gpu.memory_gib - way.num_samplers * each) / way.num_ranks,
        sampler_room=each,
    )


def _utilization(settings: Settings, default: float) -> float:
    chosen = "gpu_memory_utilization" in settings.model_fields_set
    return settings.gpu_memory_utilization if chosen else default


@dataclass(frozen=True)
class PlacementCandidate:
    """A placement to be judged, and the settings that choose it."""

    kind: Kind
    num_ranks: int
    num_samplers: int
    split: int
    trainer: Gpu
    sampler: Gpu
    settings: dict[str, str]


def _memory(needs: PlanInput, way: PlacementCandidate) -> tuple[TrainerMemory, SamplerMemory]:
    settings = needs.settings
    serving = SamplerShape(
        tensor_parallel=way.split,
        max_sequences=settings.max_num_seqs or way.sampler.max_sequences,
        sequences=-(-needs.load.completions // way.num_samplers),
        sequence_tokens=needs.longest,
        max_adapters=settings.rollout_adapters + 1,
        itemsize=needs.itemsize(way.sampler),
        device=_device(way.sampler),
    )
    return (
        trainer_memory(
            needs.model,
            needs.job,
            _ranks(needs, way),
            needs.longest,
            needs.rank_tokens(way.num_ranks),
        ),
        sampler_memory(needs.model, needs.job, serving),
    )


def _ranks(needs: PlanInput, way: PlacementCandidate) -> Ranks:
    device, turns = _device(way.trainer), way.kind == "turns"
    host_bytes = way.trainer.memory_gib * GIB if way.trainer.is_cpu else None
    return Ranks(way.num_ranks, needs.itemsize(way.trainer), device, turns, host_bytes)


def _device(gpu: Gpu) -> str:
    return "cpu" if gpu.is_cpu else "gpu"


def _judged(
    needs: PlanInput, way: PlacementCandidate, *, trainer_room: float, sampler_room: float
) -> Placement:
    """Returns the placement with its needs, and why it does not fit into so many GiB."""
    trainer, sampler = _memory(needs, way)
    on_each = "" if way.trainer.is_cpu else " on each GPU"
    why = tuple(
        f"the {who} needs {needed:.1f} GiB{on_each} and has {room:.1f}"
        for who, needed, room in (
            ("trainer", trainer.peak_gib, trainer_room),
            ("sampler", _least(sampler), sampler_room),
        )
        if needed > room
    )
    return Placement(
        kind=way.kind,
        trainer_ranks=way.num_ranks,
        num_samplers=way.num_samplers,
        tensor_parallel=way.split,
        fits=not why,
        why_not=why,
        trainer_room_gib=round(trainer_room, 3),
        sampler_room_gib=round(sampler_room, 3),
        trainer=trainer,
        sampler=sampler,
        time=None if why else _time(needs, way, sampler, sampler_room),
        settings=way.settings,
    )


def _least(sampler: SamplerMemory) -> float:
    return sampler.weights_gib + sampler.overhead_gib + sampler.least_cache_gib


def sequences_at_once(sampler: SamplerMemory, room_gib: float, sequence_tokens: int) -> int:
    """Returns how many of the planned sequences the cache has room for, at their longest."""
    free = (room_gib - sampler.weights_gib - sampler.overhead_gib) * GIB
    each = sampler.cache_bytes_per_token * sequence_tokens
    return max(1, min(sampler.sequences, int(free // each)))


def _time(
    needs: PlanInput, way: PlacementCandidate, sampler: SamplerMemory, room_gib: float
) -> StepTime | None:
    at_once = sequences_at_once(sampler, room_gib, needs.longest)
    itemsize = needs.itemsize(way.sampler)
    sampling = rates.SamplingRate(way.num_samplers, way.split, at_once, way.sampler, itemsize)
    training = rates.TrainingRate(way.num_ranks, way.trainer, needs.itemsize(way.trainer))
    return rates.time_by_rates(needs.model, needs.job, needs.load, sampling, training, way.kind)


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
