"""The plan of a job: which GPUs trainer and samplers get, whether they fit there, how long a step
takes and what the job costs. READ FIRST. Every placement is judged:

    split    N ranks on GPUs of their own, S samplers of t GPUs each on the others
    turns    N ranks and one sampler over the same N GPUs, one after the other (HONE_COLOCATE): the
             optimizer's states are in the host's memory while the sampler has the GPU, at ZeRO-2,
             at ZeRO-1 in float32 and with `memory.offload_optimizer`; else they stay
    shared   both on the same GPU at once, the sampler with a fixed share of it
    cpu      no GPU

A placement fits if the trainer's peak is within `USABLE` of the memory that the sampler leaves, and
the sampler's weights, overhead and cache of one longest sequence are within its share
(HONE_GPU_MEMORY_UTILIZATION).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shared.errors import BadRequest
from shared.job import Job
from shared.job.checks import check_groups
from shared.plan.gpus import Gpu, parse_gpus, visible_gpus
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
from shared.plan.model import Model, UnknownModelSize
from shared.settings import Settings
from shared.weights.architectures import choose_dtype
from shared.weights.model_folder import limit_of
from shared.wire.records import (
    Cost,
    Placement,
    PlacementKind,
    Plan,
    PromptLengths,
    SamplerMemory,
    StepTime,
    TrainerMemory,
)

SHARED_UTILIZATION = 0.35
"""Share of a GPU's memory that vLLM takes beside a trainer. In bfloat16 with float32 masters and
Adam's moments the trainer needs eight times vLLM's weights."""

TURNS_UTILIZATION = 0.6
"""The share where the two take turns: the rest is for the trainer's weights, which stay."""

ASLEEP_GIB = 1.0
"""GiB of a GPU that a sleeping sampler keeps: CUDA's context and graphs. Assumed."""

SPLITS = (1, 2, 4, 8)
"""GPUs over which a sampler's model may be split, if they divide its heads."""

BANDWIDTH_SHARE, SAMPLING_SHARE, TRAINING_SHARE = 0.6, 0.5, 0.35
"""What a step reaches of a GPU's rates, assumed: of the bandwidth when tokens are sampled; of the
products per second on prompts or on many sequences at once, and in an update (its model FLOPs
utilization)."""

ITERATION_S = 0.005
"""Assumed seconds of scheduling in each iteration of the sampler."""

PROMPT_TOKENS = 512
"""Assumed tokens of a prompt where the lengths of prompts are unknown."""


def planned_gpus(settings: Settings) -> Gpu:
    """Returns the GPUs to plan for: HONE_GPUS, else this machine's GPUs. Raises BadRequest."""
    return parse_gpus(settings.gpus, "HONE_GPUS") if settings.gpus else visible_gpus()


def make_plan(
    job: Job, model: Model, settings: Settings, gpus: Gpu, lengths: PromptLengths
) -> Plan:
    """Returns the job's plan on these GPUs, with the `lengths` of its prompts as far as they are
    known (without a number of prompts they were given). Raises BadRequest for completions that
    leave no room for a prompt, and for groups of one; UnknownModelSize for a job of 0 steps."""
    check_groups(job)
    if not job.trains:
        raise UnknownModelSize("steps is 0: the job only evaluates, and plans are of training")
    completion = job.sampling.max_tokens
    holds, what = limit_of(job.max_model_len, model.max_len) or (model.max_len, "the model")
    if job.trains_without_sampling:  # given answers have no limit of their own: half is for prompts
        completion = min(completion, max(holds // 2, 1))
        sampling = job.sampling.model_copy(update={"max_tokens": completion})
        job = job.model_copy(update={"sampling": sampling})
    if completion >= holds:
        raise BadRequest(
            f"sampling.max_tokens is {completion}, and {what} holds {holds} tokens of prompt "
            f"and completion together; expected at most {holds - 1}, and room for the prompts"
        )
    prompt = min(lengths.longest or PROMPT_TOKENS, holds - completion)
    planner = Planner(job, model, settings, gpus, prompt)
    best, *others = sorted(planner.placements(), key=_rank)
    return Plan(
        model=job.model,
        num_parameters=model.num_parameters,
        num_trainable=model.num_trainable(job.lora),
        learning_rate=job.learning_rate,
        dtype=planner.dtype,
        gpus=str(gpus),
        fits=best.fits,
        placement=best,
        others=tuple(others),
        steps=job.steps,
        prompt_tokens=prompt,
        completion_tokens=completion,
        cost=_cost(job, best, settings),
        notes=tuple(_notes(planner, lengths, best)),
    )


def _cost(job: Job, place: Placement, settings: Settings) -> Cost | None:
    if settings.price_per_hour is None or place.time is None:
        return None
    hours = place.time.step_s / 3600
    return Cost(
        currency=settings.currency,
        per_hour=settings.price_per_hour,
        per_step=round(hours * settings.price_per_hour, 6),
        total=round(job.steps * hours * settings.price_per_hour, 4) if job.steps else None,
    )


def _notes(planner: Planner, lengths: PromptLengths, place: Placement) -> Iterator[str]:
    """Yields what is unknown or assumed."""
    job = planner.job
    if lengths.longest is None:
        why = f": {lengths.why_not}" if lengths.why_not else ""
        yield f"prompts are taken to be of {planner.prompt_tokens} tokens (--prompt-tokens){why}"
    elif lengths.num:
        which = f"all {lengths.num}" if lengths.is_all else f"{lengths.num} of the"
        yield f"the longest of {which} prompts has {lengths.longest} tokens"
    if place.time is not None:
        what = "answers" if job.trains_without_sampling else "completions"
        yield (
            f"{what} are taken to be as long as sampling.max_tokens ({job.sampling.max_tokens}), "
            "and times are from data sheets"
        )
    elif place.fits:
        yield f"the time of a step is not estimated: there are no rates for {planner.gpu.name}"


# --- placements ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planner:
    """Judges the placements of a job on GPUs of one kind, or on the CPU. `prompt_tokens` are of the
    longest prompt."""

    job: Job
    model: Model
    settings: Settings
    gpu: Gpu
    prompt_tokens: int

    @property
    def dtype(self) -> str:
        has_bfloat16, asked = self.gpu.has_bfloat16, self.job.training.dtype
        return choose_dtype(asked, capability=None, cpu_multiplies_bfloat16=has_bfloat16)

    @property
    def itemsize(self) -> int:
        """The bytes of a weight."""
        return 4 if self.dtype == "float32" else 2

    @property
    def longest(self) -> int:
        """The tokens of the longest prompt with its completion."""
        return self.prompt_tokens + self.job.sampling.max_tokens

    @property
    def completions(self) -> int:
        """How many completions a step has."""
        return self.job.sampling.prompts_per_step * self.job.completions_per_prompt

    @property
    def step_tokens(self) -> int:
        """The tokens that a step trains on, a shared prompt once for its group."""
        memory, prompts = self.job.memory, self.completions
        is_apart = memory.packing == "off" and memory.shared_prefix == "auto"
        if not is_apart and memory.shared_prefix != "off" and memory.attention in ("auto", "sdpa"):
            prompts = self.job.sampling.prompts_per_step
        return prompts * self.prompt_tokens + self.completions * self.job.sampling.max_tokens

    def placements(self) -> Iterator[Placement]:
        """Yields every placement."""
        job, settings, num_gpus = self.job, self.settings, self.gpu.count
        if self.gpu.device == "cpu":
            yield self.judge("cpu", settings.trainer_ranks, settings.rollout_replicas)
            return
        splits = [size for size in SPLITS if size <= num_gpus and self.model.heads % size == 0]
        for num_ranks in range(1, num_gpus):
            for size in splits:
                if num_samplers := (num_gpus - num_ranks) // size:
                    yield self.judge("split", num_ranks, num_samplers, size)
        if num_gpus == 1:
            yield self.judge("shared", 1)
        stays = job.memory.zero_stage == 3 and not job.memory.offload_optimizer
        if job.max_staleness == 0 and job.weight_sync not in ("reload", "restart") and not stays:
            yield self.judge("turns", num_gpus, split=max(splits))

    def judge(
        self, kind: PlacementKind, num_ranks: int, num_samplers: int = 1, split: int = 1
    ) -> Placement:
        """Returns the placement of so many ranks, and of samplers whose models are split over
        `split` GPUs each, with what it needs and has, and why it does not fit."""
        sampler = self._sampler(num_samplers, split)
        trainer_room, sampler_room = self._rooms(kind, num_ranks, num_samplers, sampler)
        job = self._with_checkpointing(num_ranks, trainer_room)
        trainer = self._trainer(num_ranks, job)
        on_each = "" if self.gpu.device == "cpu" else " on each GPU"
        why_not = tuple(
            f"the {who} needs {needed:.1f} GiB{on_each} and has {room:.1f}"
            for who, needed, room in (
                ("trainer", trainer.peak_gib, trainer_room),
                ("sampler", sampler.least_gib, sampler_room),
            )
            if needed > room
        )
        settings = {"HONE_TRAINER_RANKS": str(num_ranks)} if kind in ("split", "turns") else {}
        if kind == "turns":
            share = f"{sampler_room / self.gpu.memory_gib:.2f}"
            settings |= {"HONE_COLOCATE": "1", "HONE_GPU_MEMORY_UTILIZATION": share}
        if split > 1:
            settings["HONE_TENSOR_PARALLEL_SIZE"] = str(split)
        place = Placement(
            kind=kind,
            trainer_ranks=num_ranks,
            num_samplers=num_samplers,
            tensor_parallel=split,
            fits=not why_not,
            why_not=why_not,
            trainer_room_gib=round(trainer_room, 3),
            sampler_room_gib=round(sampler_room, 3),
            trainer=trainer,
            recomputes=bool(job.memory.gradient_checkpointing),
            sampler=sampler,
            settings=settings,
        )
        if why_not or not self.gpu.bandwidth_gb_s:
            return place
        return place.model_copy(update={"time": self._time(place)})

    def _rooms(
        self, kind: PlacementKind, num_ranks: int, num_samplers: int, sampler: SamplerMemory
    ) -> tuple[float, float]:
        """Returns the GiB that each rank and each GPU of a sampler may take."""
        settings, memory_gib = self.settings, self.gpu.memory_gib
        if kind == "cpu":  # both are in the host's memory; the cache has its configured size
            each = sampler.weights_gib + sampler.overhead_gib + settings.kv_cache_gib
            return (USABLE * memory_gib - num_samplers * each) / num_ranks, each
        share = settings.gpu_memory_utilization
        if "gpu_memory_utilization" not in settings.model_fields_set:
            share = {"shared": SHARED_UTILIZATION, "turns": TURNS_UTILIZATION}.get(kind, share)
        room = USABLE * memory_gib
        if kind == "shared":
            return max(room - share * memory_gib, 0.0), share * memory_gib
        if kind == "split":
            return room, share * memory_gib
        trainer = self._trainer(num_ranks, self.job)
        stays = trainer.weights_gib + trainer.reference_gib + trainer.overhead_gib
        stays += RankMemory(self.model, self.job, self._ranks(num_ranks)).states.resting / GIB
        share = min(share, max(math.floor(100 * (1 - stays / memory_gib)) / 100, 0.0))
        return room - ASLEEP_GIB, share * memory_gib

    def _with_checkpointing(self, num_ranks: int, room_gib: float) -> Job:
        """Returns the job with `memory.gradient_checkpointing` decided: "auto" is on unless a step
        fits without."""
        with_it, without = (
            self.job.model_copy(update={"memory": self.job.memory.recomputing(is_on)})
            for is_on in (True, False)
        )
        if self.gpu.device == "cpu":
            host_bytes = self.gpu.memory_gib * GIB
            room_gib = min(room_gib, room_on_cpu(host_bytes, without) / GIB / num_ranks)
        return without if self._trainer(num_ranks, without).peak_gib <= room_gib else with_it

    def _ranks(self, num_ranks: int) -> Ranks:
        return Ranks(num_ranks, self.itemsize, self.gpu.device)

    def _trainer(self, num_ranks: int, job: Job) -> TrainerMemory:
        # an environment's turns add to prompt and completion, up to a whole micro-batch
        tokens = None if job.environment else math.ceil(self.step_tokens / num_ranks)
        return trainer_memory(self.model, job, self._ranks(num_ranks), self.longest, tokens)

    def _sampler(self, num_samplers: int, split: int) -> SamplerMemory:
        shape = SamplerShape(
            itemsize=self.itemsize,
            device=self.gpu.device,
            tensor_parallel=split,
            max_sequences=self.settings.max_num_seqs or self.gpu.max_sequences,
            sequences=math.ceil(self.completions / num_samplers),
            sequence_tokens=self.longest,
            max_adapters=self.settings.rollout_adapters + 1,
        )
        return sampler_memory(self.model, self.job, shape)

    def _time(self, place: Placement) -> StepTime:
        """Returns the seconds of a step. With `max_staleness` sampling runs while the trainer
        trains, if each has GPUs of its own. A token takes 2 operations for each parameter that it
        goes through, and 4 L A D for each token that it attends to, n / 2 on average (arXiv
        2001.08361, section 2.1)."""
        job, model = self.job, self.model
        attention = 2 * model.num_layers * model.heads * model.head_size * self.longest
        flops = passes(job, place.recomputes) * (2 * model.num_active + attention)
        rate = TRAINING_SHARE * place.trainer_ranks * self.gpu.tflops(self.itemsize) * 1e12
        train_s = flops * self.step_tokens / rate
        sample_s = 0.0 if job.trains_without_sampling else self._sample_s(place)
        is_beside = job.max_staleness > 0 and place.kind == "split"
        step_s = max(sample_s, train_s) if is_beside else sample_s + train_s
        return StepTime(
            sample_s=round(sample_s, 3), train_s=round(train_s, 3), step_s=round(step_s, 3)
        )

    def _sample_s(self, place: Placement) -> float:
        """Returns the seconds of iterations that add one token to each sequence, and of the
        prompts, each once for its group. An iteration reads all weights, and the cache of each
        sequence, which is half of its completion on average."""
        sampler, split = place.sampler, place.tensor_parallel
        free_gib = place.sampler_room_gib - sampler.weights_gib - sampler.overhead_gib
        held = int(free_gib * GIB // (sampler.cache_bytes_per_token * self.longest))
        at_once = max(1, min(sampler.sequences, held))
        token_s = 2 * self.model.num_active
        token_s /= SAMPLING_SHARE * split * self.gpu.tflops(self.itemsize) * 1e12
        length = self.prompt_tokens + self.job.sampling.max_tokens / 2
        read = self.itemsize * self.model.num_parameters / split
        read += at_once * length * sampler.cache_bytes_per_token
        read_s = read / (BANDWIDTH_SHARE * self.gpu.bandwidth_gb_s * 1e9)
        each = math.ceil(self.completions / place.num_samplers)
        iterations = math.ceil(each / at_once) * self.job.sampling.max_tokens
        prompts = each / self.job.completions_per_prompt * self.prompt_tokens
        iteration_s = max(read_s, at_once * token_s) + ITERATION_S
        return iterations * iteration_s + prompts * token_s


def _rank(place: Placement) -> tuple[bool, float]:
    """Placements that fit come first, the fastest before the others, and of equally fast ones
    the first that is yielded; then the ones that lack the least memory."""
    if place.fits:
        return False, place.time.step_s if place.time else 0.0
    lacking = max(place.trainer.peak_gib - place.trainer_room_gib, 0.0)
    return True, lacking + max(place.sampler.least_gib - place.sampler_room_gib, 0.0)


def passes(job: Job, recomputes: bool) -> int:
    """Returns how often each token goes through the model in a step. For each epoch 1 forward and 2
    backward (1 with LoRA), and 1 more with gradient checkpointing; 1 for the reference; 1 for the
    log-probs before the first update, if a batch has several updates or dropout."""
    training = job.training
    each = 1 + (1 if job.lora else 2) + recomputes
    dropout = job.lora is not None and job.lora.dropout > 0
    frozen = training.epochs * training.minibatches > 1 or dropout or training.objective == "dpo"
    return training.epochs * each + frozen + training.has_reference
