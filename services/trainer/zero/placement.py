"""Whether sampler and trainer fit onto a GPU that they share, from sizes alone, before anything is
loaded. Activations and what CUDA takes for itself are not counted: what is refused here could not
have worked."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.trainer.zero.out_of_memory import gib
from shared.digest import stored_tensors
from shared.errors import BadRequest
from shared.job import Job

GRADIENT_BYTES = 4
STATE_BYTES = 12
"""Of each trained parameter: its float32 gradient, and its float32 master with Adam's two
moments."""


@dataclass(frozen=True)
class Sizes:
    """Of a model: its parameters, and the elements of attention's cache for one token."""

    num_parameters: int
    num_cached: int
    max_model_len: int


@dataclass(frozen=True)
class Gpu:
    """Its memory, the share of it that is the sampler's, and whether the two take turns on it."""

    total_bytes: int
    sampler_share: float
    takes_turns: bool


@dataclass(frozen=True)
class Needs:
    """Bytes on each GPU: of the trainer's weights, of what it has only while it trains, and of the
    sampler's weights with the cache of one sequence."""

    weights: int
    training: int
    sampler: int


def sizes_of(folder: Path, max_model_len: int | None) -> Sizes:
    """Returns the sizes of the model in this folder."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    kv_heads = config.get("num_key_value_heads") or num_heads
    return Sizes(
        num_parameters=sum(math.prod(tensor.shape) for tensor in stored_tensors(folder).values()),
        num_cached=2 * config["num_hidden_layers"] * kv_heads * head_dim,
        max_model_len=max_model_len or config["max_position_embeddings"],
    )


def needs_of(sizes: Sizes, job: Job, itemsize: int, num_ranks: int) -> Needs:
    """Returns what the job needs at its ZeRO stage (arXiv 1910.02054): gradients shared out from
    stage 2, states from 1, weights from 3. Adapters are too small to count."""
    memory = job.memory
    num_trained = 0 if job.lora else sizes.num_parameters
    gradients = GRADIENT_BYTES * num_trained // (num_ranks if memory.zero_stage >= 2 else 1)
    states = STATE_BYTES * num_trained // (num_ranks if memory.zero_stage >= 1 else 1)
    weights = sizes.num_parameters * itemsize
    return Needs(
        weights=weights // (num_ranks if memory.zero_stage == 3 else 1),
        training=gradients + (0 if memory.offload_optimizer else states),
        sampler=weights + sizes.num_cached * itemsize * sizes.max_model_len,
    )


def check_fits(needs: Needs, gpu: Gpu) -> None:
    """Raises BadRequest, with the numbers, where the two cannot share the GPU."""
    sampler_bytes = int(gpu.total_bytes * gpu.sampler_share)
    trainer = (
        f"the trainer needs {gib(needs.weights)} for weights and {gib(needs.training)} for "
        "gradients, master weights and Adam's moments"
    )
    if needs.sampler > sampler_bytes:
        raise BadRequest(
            f"the sampler needs {gib(needs.sampler)} for weights and the cache of one sequence, "
            f"and has {gib(sampler_bytes)} of the GPU's {gib(gpu.total_bytes)} "
            "(HONE_GPU_MEMORY_UTILIZATION); raise that, or lower max_model_len"
        )
    if gpu.takes_turns:
        if needs.weights + needs.training > gpu.total_bytes:
            raise BadRequest(
                f"{trainer}, and the GPU has {gib(gpu.total_bytes)}; use more GPUs, "
                "memory.offload_optimizer or lora"
            )
        if needs.weights + sampler_bytes > gpu.total_bytes:
            raise BadRequest(
                f"the trainer keeps {gib(needs.weights)} of weights while the sampler has "
                f"{gib(sampler_bytes)} of the GPU's {gib(gpu.total_bytes)}; lower "
                "HONE_GPU_MEMORY_UTILIZATION"
            )
    elif needs.weights + needs.training > gpu.total_bytes - sampler_bytes:
        raise BadRequest(
            f"{trainer}, and the sampler leaves {gib(gpu.total_bytes - sampler_bytes)} of the "
            f"GPU's {gib(gpu.total_bytes)}; lower HONE_GPU_MEMORY_UTILIZATION, let the two take "
            "turns (HONE_COLOCATE=1), or give them GPUs of their own"
        )
