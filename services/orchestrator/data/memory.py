"""How much memory a job probably needs on each GPU, from the shapes of its model's tensors: what a
dry run says.

    weights      b P                      P parameters of b bytes; shared out in ZeRO stage 3
    gradients    4 T                      T trained parameters, in float32; shared out from stage 2
    optimizer    12 T                     float32 copies and Adam's two moments; from stage 1
    activations  b m (H L + 4 I + 12 H)   m tokens of a micro-batch, hidden size H, intermediate
                                          size I: the inputs of L layers, and one layer again
                 b m L (4 I + 12 H)       without gradient checkpointing
    cache        2 b L K D per token      K heads of keys and values of size D

ZeRO: arXiv 1910.02054, section 3. Activations are those that arXiv 2205.05198 counts, with a gated
MLP and without the matrix of attention, which no attention here keeps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.config import Settings
from shared.digest import stored_tensors
from shared.job import Job, LoraSpec
from shared.models import model_folder
from shared.wire import MemoryEstimate

GIB = 1 << 30
NO_LAYERS = ("embed", "lm_head", "wte")
"""In the names of matrices that "all-linear" leaves out."""

Shapes = Mapping[str, tuple[int, ...]]


class CannotEstimate(Exception):
    """Why the memory of a job is not known here."""


def estimate(job: Job, settings: Settings) -> MemoryEstimate:
    """Returns what the job needs. Raises CannotEstimate for a model that is not a folder here, or
    of which the configuration lacks a size."""
    folder = model_folder(job.model)
    if folder is None:
        raise CannotEstimate(f"the model {job.model!r} is not a folder here")
    shapes = {name: tensor.shape for name, tensor in stored_tensors(folder).items()}
    return _estimated(job, settings, shapes, _sizes(folder))


def _estimated(
    job: Job, settings: Settings, shapes: Shapes, sizes: dict[str, int]
) -> MemoryEstimate:
    size_bytes = 4 if job.training.dtype == "float32" else 2
    ranks = settings.trainer_ranks * settings.trainer_nodes
    stage = job.memory.zero_stage
    count = sum(map(math.prod, shapes.values()))
    trained = _adapter_size(job.lora, shapes) if job.lora else count
    has_reference = job.training.beta > 0 and job.lora is None
    gradient_bytes = 4 if stage > 0 else size_bytes
    per_token = 2 * size_bytes * sizes["layers"] * sizes["kv_heads"] * sizes["head_size"]
    return MemoryEstimate(
        num_parameters=count,
        num_trainable=trained,
        weights_gib=_gib(size_bytes * count, ranks if stage == 3 else 1),
        reference_gib=_gib(size_bytes * count) if has_reference else 0.0,
        gradients_gib=_gib(gradient_bytes * trained, ranks if stage >= 2 else 1),
        optimizer_gib=_gib(12 * trained, ranks if stage >= 1 else 1),
        activations_gib=_gib(_activation_bytes(job, sizes, size_bytes)),
        sampler_weights_gib=_gib(size_bytes * count, settings.tensor_parallel_size),
        cache_bytes_per_token=per_token,
    )


def _activation_bytes(job: Job, sizes: dict[str, int], size_bytes: int) -> int:
    one_layer = 4 * sizes["intermediate"] + 12 * sizes["hidden"]
    kept = sizes["hidden"] * sizes["layers"] + one_layer
    if not job.memory.gradient_checkpointing:
        kept = sizes["layers"] * one_layer
    return size_bytes * job.memory.micro_batch_tokens * kept


def _adapter_size(lora: LoraSpec, shapes: Shapes) -> int:
    """Returns how many parameters the adapters have: rank by inputs and outputs of each layer."""
    targets = lora.target_modules
    return sum(
        lora.rank * sum(shape)
        for name, shape in shapes.items()
        if len(shape) == 2
        and not any(part in name for part in NO_LAYERS)
        and (targets == "all-linear" or name.split(".")[-2:-1] in [[each] for each in targets])
    )


def _sizes(folder: Path) -> dict[str, int]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        found = {
            "hidden": hidden,
            "layers": config["num_hidden_layers"],
            "intermediate": config["intermediate_size"],
            "kv_heads": config.get("num_key_value_heads") or heads,
            "head_size": config.get("head_dim") or hidden // heads,
        }
    except (KeyError, TypeError) as error:
        raise CannotEstimate(f"the model's config.json has no {error}") from error
    return {name: int(value) for name, value in found.items()}


def _gib(size_bytes: int, shares: int = 1) -> float:
    return round(size_bytes / shares / GIB, 3)
