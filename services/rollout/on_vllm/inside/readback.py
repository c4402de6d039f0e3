"""What the engine computes with, read back from vLLM's modules under the names of the checkpoint.
Imported in vLLM's process.

vLLM keeps several matrices of a checkpoint in one, and on a CPU packs them for its kernels and
drops the originals. So there a matrix is read by multiplying: what a layer makes of the rows of an
identity matrix are its columns, exactly, for every product but one is 0. (Only the sign of a
zero is lost.)

Split over several devices, each holds a part of most matrices: the parts are gathered, tensor by
tensor, on all of them at once, and hashed on the first.

It is done in turns, between which the engine samples: a turn is as many layers as have
`TURN_BYTES`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from services.rollout.on_vllm.inside import experts
from shared.weights.checkpoints import CONFIG, PREFIX, WEIGHTS
from shared.weights.digest import MAX_THREADS, digest_of_bytes

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

TURN_BYTES = 64 << 20
"""So much is read back at a time, or one layer: on a GPU in about 20 ms."""

Gather = Callable[[Tensor, int], Tensor]
"""Returns the parts that all devices have of a tensor, put together along an axis."""


def alone(tensor: Tensor, _: int) -> Tensor:
    """Gathers on one device, which has all."""
    return tensor


def digests(
    model: nn.Module, begin: int = 0, gather: Gather = alone, *, hashes: bool = True
) -> tuple[dict[str, str], int | None]:
    """Returns the digests of tensors of the modules from number `begin` on, by their names in the
    checkpoint (those of `shared/weights/digest.py`), and with which module the next turn begins;
    None: all were read. A device that does not hash only gathers."""
    packed = getattr(model, "packed_modules_mapping", {})
    modules = list(model.named_modules())
    hashing: dict[str, Future[str]] = {}
    num_read, size_bytes = begin, 0
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "digest") as pool:
        while num_read < len(modules) and size_bytes < TURN_BYTES:
            path, module = modules[num_read]
            for name, tensor in of_module(path, module, packed, gather):
                size_bytes += tensor.nbytes
                if hashes:
                    hashing[name] = pool.submit(_digest, tensor.detach().cpu())
            num_read += 1
    found = {name: future.result() for name, future in hashing.items()}
    return found, num_read if num_read < len(modules) else None


def tensors(
    model: nn.Module, packed: Mapping[str, list[str]], gather: Gather = alone
) -> Iterator[tuple[str, Tensor]]:
    """Yields the whole tensors. `packed` names the matrices that vLLM keeps in one."""
    for path, module in model.named_modules():
        yield from of_module(path, module, packed, gather)


def of_module(
    path: str, module: nn.Module, packed: Mapping[str, list[str]], gather: Gather
) -> Iterator[tuple[str, Tensor]]:
    """Yields the whole tensors of a module, those of its submodules apart."""
    layer: Any = module
    name = path.replace(".base_layer", "")
    with torch.no_grad():
        if isinstance(module, LinearBase):
            yield from _of_linear(name, layer, packed, gather)
        elif isinstance(module, VocabParallelEmbedding):
            own = _matrix(layer) if isinstance(module, ParallelLMHead) else layer.weight
            yield f"{name}.weight", gather(own, 0)[: layer.org_vocab_size]
        elif isinstance(module, RoutedExperts):
            yield from experts.tensors(path, layer, gather)
        else:
            for last, tensor in module.named_parameters(recurse=False):
                yield f"{name}.{last}", tensor


def _of_linear(
    name: str, layer: Any, packed: Mapping[str, list[str]], gather: Gather
) -> Iterator[tuple[str, Tensor]]:
    parent, _, last = name.rpartition(".")
    parts = packed.get(last, [last])
    for kind, own in (("weight", _matrix(layer)), ("bias", layer.bias)):
        if own is None:
            continue
        for part, tensor in zip(parts, own.split(_sizes(layer, len(parts))), strict=True):
            yield f"{parent}.{part}.{kind}", _whole(layer, part, kind, tensor, gather)


def _sizes(layer: Any, num_parts: int) -> list[int]:
    """Returns how many rows this device has of each of the matrices that are kept in one."""
    sizes = layer.output_sizes if num_parts > 1 else [layer.output_size]
    num_devices = layer.tp_size if isinstance(layer, ColumnParallelLinear) else 1
    return [size // num_devices for size in sizes]


def _whole(layer: Any, part: str, kind: str, own: Tensor, gather: Gather) -> Tensor:
    """Returns all of a tensor. Layers are split by rows or by columns, and what is added to the
    sum over columns is not split. Heads of keys and values that are fewer than the devices are on
    several of them."""
    if isinstance(layer, RowParallelLinear) and kind == "weight":
        return gather(own, 1)
    if not isinstance(layer, ColumnParallelLinear):
        return own
    whole = gather(own, 0)
    copies = layer.num_kv_head_replicas if isinstance(layer, QKVParallelLinear) else 1
    if copies == 1 or part == "q_proj":
        return whole
    return torch.cat(whole.split(len(own))[::copies])


@torch.no_grad()
def adapter_digests(manager: Any, number: int, folder: Path) -> dict[str, str]:
    """Returns the digest of each tensor of the adapter `number`, by its name in the files of
    `folder`: that of the file's tensor where vLLM computes with the same values, another where it
    does not. vLLM rounds to the dtype it serves in, and puts alpha / rank into B."""
    places, config = manager._adapter_manager, json.loads((folder / CONFIG).read_text())
    if number not in places.lora_index_to_id:
        places.activate_adapter(number)
    slot = places.lora_index_to_id.index(number)
    found: dict[str, str] = {}
    for name, stored in load_file(folder / WEIGHTS).items():
        layer, _, which = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        held = _held(places, layer, which, slot)
        if held is None:
            continue
        wanted = stored.to(held.dtype)
        if which == "lora_B":
            wanted = wanted * (config["lora_alpha"] / config["r"])
        rows, columns = stored.shape
        rest = held[rows:].any() or held[:, columns:].any()
        same = torch.equal(held[:rows, :columns].cpu(), wanted) and not rest
        found[name] = _digest(stored if same else held[:rows, :columns].cpu())
    return found


def _held(places: Any, layer: str, which: str, slot: int) -> Tensor | None:
    """Returns the matrix of the slot that is multiplied by, padded with zeros to the largest rank;
    None for a layer that keeps it in another way."""
    for name, module in places.modules.items():
        parts = places.packed_modules.get(name, [name])
        if layer not in parts:
            continue
        stacked = module.lora_a_stacked if which == "lora_A" else module.lora_b_stacked
        return stacked[parts.index(layer)][slot, 0] if isinstance(stacked, tuple) else None
    return None


def _matrix(layer: Any) -> Tensor:
    """Returns the matrix `[out, in]` that the layer multiplies by on this device."""
    if not hasattr(layer, "cpu_linear"):
        return layer.weight
    sizes = ("input_size_per_partition", "input_size", "embedding_dim")
    num_inputs = next(getattr(layer, size) for size in sizes if getattr(layer, size, None))
    dtype = getattr(layer, "params_dtype", None) or layer.weight.dtype
    return layer.cpu_linear(torch.eye(num_inputs, dtype=dtype), layer.weight, None).T


def _digest(tensor: Tensor) -> str:
    data = tensor.contiguous().view(torch.uint8).numpy().data
    return digest_of_bytes(DTYPES[tensor.dtype], tuple(tensor.shape), data)
