"""Checks from sizes alone, before anything is loaded, whether sampler and trainer fit onto a shared
GPU. Activations and CUDA's own memory are not counted, so a refused job could not have worked."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import BadRequest
from shared.job import Job
from shared.plan.memory import GIB, Ranks, Serving, sampler_memory, state_bytes, trainer_memory
from shared.plan.model import Model


@dataclass(frozen=True)
class Gpu:
    """A GPU: its memory in GiB, the sampler's share, and whether sampler and trainer take turns on
    it."""

    total_gib: float
    sampler_share: float
    takes_turns: bool


@dataclass(frozen=True)
class Needs:
    """GiB on each GPU: the trainer's weights, its training states, and the sampler's weights with
    the cache of one sequence. `resting` is the part of the training states that stays while the
    sampler has its turn."""

    weights: float
    training: float
    sampler: float
    resting: float = 0


def needs_of(model: Model, job: Job, ranks: Ranks, tensor_parallel: int) -> Needs:
    """Returns the job's needs, by the numbers of `hone plan`."""
    trainer = trainer_memory(model, job, ranks)
    one = Serving(
        tensor_parallel=tensor_parallel,
        max_sequences=1,
        sequences=1,
        sequence_tokens=1,
        max_adapters=0,
        itemsize=ranks.itemsize,
        device=ranks.device,
    )
    sampler = sampler_memory(model, job, one)
    return Needs(
        weights=trainer.weights_gib,
        training=trainer.gradients_gib + trainer.optimizer_gib,
        sampler=sampler.weights_gib + sampler.least_cache_gib,
        resting=state_bytes(model, job, ranks).resting / GIB,
    )


def check_fits(needs: Needs, gpu: Gpu) -> None:
    """Raises BadRequest, with the numbers, where the two cannot share the GPU."""
    sampler_gib = gpu.total_gib * gpu.sampler_share
    trainer = (
        f"the trainer needs {gib(needs.weights)} for weights and {gib(needs.training)} for "
        "gradients, master weights and Adam's moments"
    )
    if needs.sampler > sampler_gib:
        raise BadRequest(
            f"the sampler needs {gib(needs.sampler)} for weights and the cache of one sequence, "
            f"and has {gib(sampler_gib)} of the GPU's {gib(gpu.total_gib)} "
            "(HONE_GPU_MEMORY_UTILIZATION); raise that, or lower max_model_len"
        )
    if gpu.takes_turns:
        if needs.weights + needs.training > gpu.total_gib:
            raise BadRequest(
                f"{trainer}, and the GPU has {gib(gpu.total_gib)}; use more GPUs, "
                "memory.offload_optimizer or lora"
            )
        if needs.weights + needs.resting + sampler_gib > gpu.total_gib:
            states = f" and {gib(needs.resting)} of optimizer states" if needs.resting else ""
            way_out = ", or use memory.zero_stage 2" if needs.resting else ""
            raise BadRequest(
                f"the trainer keeps {gib(needs.weights)} of weights{states} while the sampler has "
                f"{gib(sampler_gib)} of the GPU's {gib(gpu.total_gib)}; lower "
                f"HONE_GPU_MEMORY_UTILIZATION{way_out}"
            )
    elif needs.weights + needs.training > gpu.total_gib - sampler_gib:
        raise BadRequest(
            f"{trainer}, and the sampler leaves {gib(gpu.total_gib - sampler_gib)} of the "
            f"GPU's {gib(gpu.total_gib)}; lower HONE_GPU_MEMORY_UTILIZATION, let the two take "
            "turns (HONE_COLOCATE=1), or give them GPUs of their own"
        )


def gib(size: float) -> str:
    return f"{size:.2f} GiB"
