"""A GPU's memory: whether a job fits beside the sampler, from sizes alone and before anything is
loaded; and when a step runs out of memory, how much there is and which setting to change to which
value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.errors import BadRequest
from shared.job import Job, LoraSpec
from shared.plan.gpus import host_memory_bytes
from shared.plan.memory import (
    GIB,
    TRAINER_OVERHEAD,
    TRAINERS_SHARE,
    USABLE,
    RankMemory,
    Ranks,
    SamplerShape,
    heap_factor,
    room_on_cpu,
    sampler_memory,
    trainer_memory,
)
from shared.plan.model import Model
from shared.settings import load_settings
from shared.wire import TrainerMemory

PARTS = ("weights", "reference", "gradients", "optimizer", "activations", "logits", "update")
PARTS += ("buffers", "overhead")
"""Parts of a rank's planned memory, in the order of messages."""
MESSAGE = re.compile(
    r"can't allocate memory|not enough memory|out of memory|Unable to mmap|Cannot allocate memory"
    r"|CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory for a tensor was missing. A collective that failed for lack of memory does not
    count, because peers wait in it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return (
        isinstance(error, RuntimeError)
        and MESSAGE.search(str(error)) is not None
        and "NCCL" not in str(error)
    )


def usage(device: torch.device) -> str:
    """Returns a sentence on how much memory is used and free."""
    if device.type == "cuda":
        free, total = (size / GIB for size in torch.cuda.mem_get_info(device))
        own = torch.cuda.memory_allocated(device) / GIB
        return (
            f"of {_gib(total)} on {device}, {_gib(free)} are free; this rank's tensors take "
            f"{_gib(own)}"
        )
    total, free = _gib_of(Path("/proc/meminfo"), "MemTotal", "MemAvailable")
    (own,) = _gib_of(Path("/proc/self/status"), "VmRSS")
    return f"of {_gib(total)} of this host, {_gib(free)} are free; this rank takes {_gib(own)}"


def room_bytes(device: torch.device, num_ranks: int, job: Job) -> float:
    """Returns the largest plan of this rank with which "auto" leaves gradient checkpointing off for
    the job, which is given without. On a GPU that is shared with a sampler at the same time, the
    sampler's share is not available."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # CUDA's own memory is part of the plan, and not of the free memory.
        own = free + torch.cuda.memory_reserved(device) + TRAINER_OVERHEAD["gpu"]
        settings = load_settings()
        shared = set(settings.rollout_devices) & set(settings.trainer_devices)
        samplers = settings.gpu_memory_utilization if shared and not settings.colocate else 0.0
        return min(USABLE * own, (USABLE - samplers) * total)
    return room_on_cpu(host_memory_bytes(), job) / num_ranks


WORTH_BYTES = 128 << 20
"""Least bytes of a micro-batch for which giving memory back is worth its time."""


def is_worth_giving_back(
    pass_bytes: int, planned_bytes: float, room_bytes: float, job: Job
) -> bool:
    """Returns whether freed large blocks should be returned to the system. A micro-batch takes
    `pass_bytes`, the plan of all ranks together is `planned_bytes`, and the host has `room_bytes`.
    The job says whether gradients are checkpointed.

    The system zeroes memory before it hands it out again, so a pass that returns its blocks takes
    up to 1.5 times as long at a hidden size of 512, and twice as long at 128. Blocks are therefore
    kept while all ranks need at most half of the host's memory."""
    kept_bytes = heap_factor(job) * planned_bytes
    return pass_bytes >= WORTH_BYTES and kept_bytes > TRAINERS_SHARE * room_bytes


def half_budget(shape: tuple[int, int] | None, budget_tokens: int) -> int | None:
    """Returns half the tokens of a micro-batch that did not fit, as the limit for later ones, and
    at most half of the limit so far, which a row with many short nodes exceeds; None for a single
    sequence, which cannot be divided. `shape`: its sequences and tokens."""
    if shape is None or shape[0] == 1:
        return None
    return max(1, min(shape[1], budget_tokens) // 2)


@dataclass(frozen=True)
class MemoryPlan:
    """The plan of this trainer, with the numbers of `hone plan`."""

    model: Model
    ranks: Ranks

    def memory(self, job: Job) -> TrainerMemory:
        return trainer_memory(self.model, job, self.ranks)

    def pass_bytes(self, job: Job, tokens: int) -> int:
        """Returns the memory for training on a micro-batch of so many tokens."""
        return RankMemory(self.model, job, self.ranks, tokens).pass_peak

    def peak_bytes(self, job: Job, tokens: int) -> int:
        """Returns a rank's memory if its largest micro-batch has so many tokens, which may be far
        fewer than the job allows."""
        memory = job.memory.model_copy(update={"micro_batch_tokens": tokens})
        sampling = job.sampling.model_copy(
            update={"max_tokens": min(tokens, job.sampling.max_tokens)}
        )
        smaller = job.model_copy(update={"memory": memory, "sampling": sampling})
        return round(self.memory(smaller).peak_gib * GIB)

    def sentence(self, job: Job) -> str:
        """Returns a rank's planned memory, part by part."""
        memory = self.memory(job)
        parts = {name: float(getattr(memory, f"{name}_gib")) for name in PARTS}
        shown = ", ".join(f"{name} {size:.2f}" for name, size in parts.items() if size >= 0.005)
        return f"planned are {memory.peak_gib:.2f} GiB for each rank ({shown})"

    def saving(self, before: Job, after: Job) -> str:
        """Returns how much less memory `after` needs, as text; "" if it does not lower the peak."""
        saved = self.memory(before).peak_gib - self.memory(after).peak_gib
        return f" ({saved:.2f} GiB less)" if saved >= 0.005 else ""


def knobs(
    job: Job,
    num_ranks: int,
    shape: tuple[int, int] | None,
    planned: MemoryPlan | None = None,
    *,
    device: str = "cuda",
    may_recompute: bool = True,
) -> str:
    """Returns the settings that would save memory, the cheapest first, with the `planned` saving.
    Settings that save nothing are left out, unless none saves anything, as with a model of a few
    megabytes. `shape`: sequences and tokens, padding included, of the micro-batch that did not fit,
    if one did not. On the `device` "cpu" offloading to the host does not help. Gradient
    checkpointing is among them if `may_recompute`."""
    memory, turns = job.memory, list[tuple[str, str]]()

    def turn(text: str, after: Job) -> None:
        turns.append((text, planned.saving(job, after) if planned else ""))

    def turn_memory(key: str, value: int | bool, remark: str = "", **also: int) -> None:
        before = getattr(memory, key)
        text = f"memory.{key} from {_toml(before)} to {_toml(value)}{remark}"
        after = memory.model_copy(update={key: value, **also})
        turn(text, job.model_copy(update={"memory": after}))

    half = half_budget(shape, memory.micro_batch_tokens)
    if half:
        turn_memory("micro_batch_tokens", half)
    if memory.chunk_tokens > 1:
        turn_memory("chunk_tokens", memory.chunk_tokens // 2)
    if may_recompute and not memory.gradient_checkpointing:
        turn_memory("gradient_checkpointing", True)
    if num_ranks > 1 and memory.zero_stage < 3:
        turn_memory("zero_stage", max(2, memory.zero_stage + 1))
    if not memory.offload_optimizer and device != "cpu":
        if memory.zero_stage:
            turn_memory("offload_optimizer", True)
        else:
            turn_memory("offload_optimizer", True, " with memory.zero_stage 2", zero_stage=2)
    if job.lora is None:
        after = job.model_copy(update={"lora": LoraSpec()})
        turn("[lora], which trains adapters only", after)
    settings = [text + saving for text, saving in turns if saving] or [text for text, _ in turns]
    if shape and not half:
        settings.append(
            f"sampling.max_tokens: a micro-batch was one sequence of {shape[1]} tokens already"
        )
    return "; ".join(settings)


def _toml(value: int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def first_line(error: BaseException) -> str:
    """Returns the allocator's message, without its advice."""
    lines = str(error).splitlines()
    return (
        f"{type(error).__name__}: {lines[0].split('. See documentation')[0]}"
        if lines
        else type(error).__name__
    )


def _gib_of(file: Path, *names: str) -> list[float]:
    """Returns the named values of a file of "Name: 123 kB" lines, in GiB; 0 for missing ones."""
    values = dict(re.findall(r"^(\w+):\s+(\d+) kB$", file.read_text(), re.MULTILINE))
    return [int(values.get(name, 0)) * 1024 / GIB for name in names]


# --- does a job fit beside the sampler? ----------------------------------------------------------


@dataclass(frozen=True)
class SharedGpu:
    """A GPU: its memory in GiB, the sampler's share, and whether sampler and trainer take turns on
    it."""

    total_gib: float
    sampler_share: float
    takes_turns: bool


@dataclass(frozen=True)
class GpuNeeds:
    """GiB on each GPU: the trainer's weights, its training states, and the sampler's weights with
    the cache of one sequence. `resting` is the part of the training states that stays while the
    sampler has its turn."""

    weights: float
    training: float
    sampler: float
    resting: float = 0


def needs_of(model: Model, job: Job, ranks: Ranks, tensor_parallel: int) -> GpuNeeds:
    """Returns the job's needs, by the numbers of `hone plan`."""
    trainer = trainer_memory(model, job, ranks)
    shape = SamplerShape(ranks.itemsize, ranks.device, tensor_parallel)
    sampler = sampler_memory(model, job, shape)
    return GpuNeeds(
        weights=trainer.weights_gib,
        training=trainer.gradients_gib + trainer.optimizer_gib,
        sampler=sampler.weights_gib + sampler.least_cache_gib,
        resting=RankMemory(model, job, ranks).states.resting / GIB,
    )


def check_fits(needs: GpuNeeds, gpu: SharedGpu) -> None:
    """Raises BadRequest, with the numbers, if trainer and sampler cannot share the GPU. Activations
    and CUDA's own memory are not counted, so a refused job could not have worked."""
    sampler_gib = gpu.total_gib * gpu.sampler_share
    trainer = (
        f"the trainer needs {_gib(needs.weights)} for weights and {_gib(needs.training)} for "
        "gradients, master weights and Adam's moments"
    )
    if needs.sampler > sampler_gib:
        raise BadRequest(
            f"the sampler needs {_gib(needs.sampler)} for weights and the cache of one sequence, "
            f"and has {_gib(sampler_gib)} of the GPU's {_gib(gpu.total_gib)} "
            "(HONE_GPU_MEMORY_UTILIZATION); raise that, or lower max_model_len"
        )
    if gpu.takes_turns:
        if needs.weights + needs.training > gpu.total_gib:
            raise BadRequest(
                f"{trainer}, and the GPU has {_gib(gpu.total_gib)}; use more GPUs, "
                "memory.offload_optimizer or lora"
            )
        if needs.weights + needs.resting + sampler_gib > gpu.total_gib:
            states = f" and {_gib(needs.resting)} of optimizer states" if needs.resting else ""
            way_out = ", or use memory.zero_stage 2" if needs.resting else ""
            raise BadRequest(
                f"the trainer keeps {_gib(needs.weights)} of weights{states} while the sampler has "
                f"{_gib(sampler_gib)} of the GPU's {_gib(gpu.total_gib)}; lower "
                f"HONE_GPU_MEMORY_UTILIZATION{way_out}"
            )
    elif needs.weights + needs.training > gpu.total_gib - sampler_gib:
        raise BadRequest(
            f"{trainer}, and the sampler leaves {_gib(gpu.total_gib - sampler_gib)} of the "
            f"GPU's {_gib(gpu.total_gib)}; lower HONE_GPU_MEMORY_UTILIZATION, let the two take "
            "turns (HONE_COLOCATE=1), or give them GPUs of their own"
        )


def _gib(size: float) -> str:
    return f"{size:.2f} GiB"
