"""Hone's methods in vLLM's model worker, which the service calls by name through `collective_rpc`;
and the code that reads back the weights that the engine computes with, from vLLM's modules, by the
checkpoint's names.

vLLM keeps several matrices of a checkpoint in one. On a CPU it also packs them for its kernels and
drops the originals. There a matrix is read by multiplication: a layer turns the rows of an identity
matrix into the columns of its own matrix. This is exact, because all products but one are 0. (Only
the sign of a zero is lost.)

If the model is split over several devices, each holds a part of most matrices. All devices gather
the parts together, tensor by tensor, and the first one hashes them.

The work is done in turns of `TURN_BYTES`, and the engine samples between two turns.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm import _custom_ops
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
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
from vllm.platforms import current_platform

from services.rollout.on_vllm import inside_transfer
from services.rollout.on_vllm.inside_executors import leave_out_whole_rows
from shared.weights.folders import CONFIG, MAX_THREADS, PREFIX, WEIGHTS, digest_of_bytes

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

TURN_BYTES = 64 << 20
"""Bytes that are read back in a turn, or one layer if it has more: about 20 ms on a GPU."""

EXPERTS = ".routed_experts"
"""The suffix that vLLM adds to the checkpoint's name of a layer's experts."""

KEPT_AS_LOADED = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels that keep the order in which the matrices were loaded."""

BITS = {2: torch.int16, 4: torch.int32}
DIGIT = 7
"""Bits of an element's number that are packed at a time. That few bits are a finite number in every
dtype."""

Gather = Callable[[Tensor, int], Tensor]
"""Returns a whole tensor: the parts of all devices, joined along an axis."""


def alone(tensor: Tensor, _: int) -> Tensor:
    """The `Gather` of a single device, which has the whole tensor."""
    return tensor


def digests(
    model: nn.Module, begin: int = 0, gather: Gather = alone, *, hashes: bool = True
) -> tuple[dict[str, str], int | None]:
    """Returns the digests (`shared/weights/folders.py`) of the tensors in a turn's modules, from
    module number `begin` on, by their names in the checkpoint, and the first module of the next
    turn; None after the last. Only one device `hashes`; the others gather with it."""
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
    digest_of = {name: future.result() for name, future in hashing.items()}
    return digest_of, num_read if num_read < len(modules) else None


def tensors(
    model: nn.Module, packed: Mapping[str, list[str]], gather: Gather = alone
) -> Iterator[tuple[str, Tensor]]:
    """Yields the whole tensors. `packed` names the matrices that vLLM keeps in one."""
    for path, module in model.named_modules():
        yield from of_module(path, module, packed, gather)


def of_module(
    path: str, module: nn.Module, packed: Mapping[str, list[str]], gather: Gather
) -> Iterator[tuple[str, Tensor]]:
    """Yields the whole tensors of a module, without its submodules' tensors."""
    layer: Any = module
    name = path.replace(".base_layer", "")
    with torch.no_grad():
        if isinstance(module, LinearBase):
            yield from _of_linear(name, layer, packed, gather)
        elif isinstance(module, VocabParallelEmbedding):
            own = _matrix(layer) if isinstance(module, ParallelLMHead) else layer.weight
            yield f"{name}.weight", gather(own, 0)[: layer.org_vocab_size]
        elif isinstance(module, RoutedExperts):
            yield from _of_experts(path, layer, gather)
        else:
            for last, tensor in module.named_parameters(recurse=False):
                yield f"{name}.{last}", tensor


def _of_linear(
    name: str, layer: Any, packed: Mapping[str, list[str]], gather: Gather
) -> Iterator[tuple[str, Tensor]]:
    parent, _, last = name.rpartition(".")
    parts = packed.get(last, [last])
    for kind, own in (("weight", _matrix(layer)), ("bias", _bias(layer))):
        if own is None:
            continue
        for part, tensor in zip(parts, own.split(_sizes(layer, len(parts))), strict=True):
            yield f"{parent}.{part}.{kind}", _whole(layer, part, kind, tensor, gather)


def _bias(layer: Any) -> Tensor | None:
    """Returns the layer's bias in the dtype that was loaded. vLLM's kernels for AMX keep it in
    float32, which represents every number of the smaller dtypes."""
    dtype = getattr(layer, "params_dtype", None)
    return layer.bias if layer.bias is None or dtype is None else layer.bias.to(dtype)


def _sizes(layer: Any, num_parts: int) -> list[int]:
    """Returns how many rows this device has of each matrix that vLLM joins in this layer."""
    sizes = layer.output_sizes if num_parts > 1 else [layer.output_size]
    num_devices = layer.tp_size if isinstance(layer, ColumnParallelLinear) else 1
    return [size // num_devices for size in sizes]


def _whole(layer: Any, part: str, kind: str, own: Tensor, gather: Gather) -> Tensor:
    """Returns the whole tensor. A layer is split by rows or by columns; the bias of a layer that is
    split by columns is whole on each device. If there are fewer heads of keys and values than
    devices, several devices have the same head."""
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
    `folder`. It is the digest of the file's tensor if vLLM computes with the same values, and
    another one if not. vLLM rounds to the dtype it serves in, and multiplies B by alpha / rank."""
    places, config = manager._adapter_manager, json.loads((folder / CONFIG).read_text())
    if number not in places.lora_index_to_id:
        places.activate_adapter(number)
    slot = places.lora_index_to_id.index(number)
    digest_of: dict[str, str] = {}
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
        digest_of[name] = _digest(stored if same else held[:rows, :columns].cpu())
    return digest_of


def _held(places: Any, layer: str, which: str, slot: int) -> Tensor | None:
    """Returns the slot's matrix that vLLM multiplies by, padded with zeros to the largest rank;
    None for a layer that keeps it in another form."""
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


def _of_experts(
    path: str, layer: Any, gather: Callable[[Tensor, int], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the matrices of a mixture's experts by the checkpoint's names; nothing if the kernel's
    order is not known here, or if each device has other experts.

    vLLM keeps all experts of a layer in two tensors: `w13_weight` `[E, 2 * I, H]` has the gate and
    up matrices, `w2_weight` `[E, H, I]` the down matrices. A kernel may reorder them. On a CPU they
    are packed in blocks."""
    matrices = _matrices(layer)
    if matrices is None:
        return
    gates, ups, downs = matrices
    parts = (
        (layer.ckpt_gate_proj_name, gather(gates, 1)),
        (layer.ckpt_up_proj_name, gather(ups, 1)),
        (layer.ckpt_down_proj_name, gather(downs, 2)),
    )
    name = path.replace(".base_layer", "").removesuffix(EXPERTS)
    for part, matrix_EOI in parts:
        for expert, matrix_OI in enumerate(matrix_EOI):
            yield f"{name}.{expert}.{part}.weight", matrix_OI


def _matrices(layer: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns this device's part of the gate's, up and down matrices `[E, out, in]`, without the
    padding that a kernel adds."""
    sizes = layer.moe_config
    is_whole = sizes.num_local_experts == sizes.num_logical_experts == sizes.num_experts
    plain = _as_loaded(layer) if is_whole and sizes.is_act_and_mul else None
    if plain is None:
        return None
    w13, w2 = plain
    size = sizes.intermediate_size_per_partition_unpadded
    gates, ups = w13[:, :, : sizes.hidden_dim_unpadded].chunk(2, dim=1)
    return gates[:, :size], ups[:, :size], w2[:, : sizes.hidden_dim_unpadded, :size]


def _as_loaded(layer: Any) -> tuple[Tensor, Tensor] | None:
    """Returns both tensors in the order in which they were loaded; None if the kernel's order is
    not known."""
    method, w13, w2 = layer.quant_method, layer.w13_weight, layer.w2_weight
    if not isinstance(method, UnquantizedFusedMoEMethod):
        return None
    if method.unquantized_backend in KEPT_AS_LOADED:
        return w13, w2
    if method.unquantized_backend is UnquantizedMoeBackend.FLASHINFER_CUTLASS:
        return torch.cat(w13.chunk(2, dim=1)[::-1], dim=1), w2
    if method.unquantized_backend is UnquantizedMoeBackend.CPU:
        kernel: Any = method.moe_kernel
        experts = kernel.fused_experts
        if not experts._use_zentorch:
            return unpacked(w13, experts.isa), unpacked(w2, experts.isa)
    return None


def unpacked(packed_EOI: Tensor, isa: str) -> Tensor:
    """Returns the matrices that vLLM packed for the instruction set."""
    order = _order(tuple(packed_EOI.shape[1:]), packed_EOI.dtype, isa)
    plain = torch.empty_like(packed_EOI).flatten(1)
    plain[:, order] = packed_EOI.detach().flatten(1)
    return plain.view(packed_EOI.shape)


@functools.lru_cache(maxsize=4)
def _order(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> Tensor:
    """Returns for each packed element its index in the matrix, found by packing the indices
    themselves."""
    count = shape[0] * shape[1]
    numbers = torch.arange(count)
    order = torch.zeros_like(numbers)
    bits = BITS[dtype.itemsize]
    for shift in range(0, count.bit_length(), DIGIT):
        digits = (numbers >> shift) & ((1 << DIGIT) - 1)
        plain = digits.to(bits).view(dtype).view(1, *shape)
        packed = _custom_ops.cpu_prepack_moe_weight(plain, isa)
        order |= packed.view(bits).flatten().long() << shift
    return order


class WorkerExtension:
    """vLLM adds this class to its worker's base classes, so `self` is vLLM's worker."""

    def load_published(self: Any, folder: str) -> None:
        """Loads the safetensors files of `folder` in place."""
        self.reload_weights(weights_path=folder)
        share_packed_output(self)

    def meet_trainer(
        self: Any, backend: str, meeting: dict[str, Any], updates: list[dict[str, Any]]
    ) -> None:
        """Begins to meet the trainer, while the engine samples: `inside_transfer.TransferSpec`."""
        self.incoming = inside_transfer.Incoming(self, backend, meeting, updates)

    def trainer_met(self: Any) -> str | None:
        """Returns "" once they have met, why they cannot meet, or None while it is undecided."""
        return self.incoming.problem()

    def receive_published(self: Any) -> str | None:
        """Loads the weights that the trainer sends, in place. Returns what went wrong, or None."""
        problem = self.incoming.load()
        if problem is None:
            share_packed_output(self)
        return problem

    def gpu_uuid(self: Any) -> str | None:
        """Returns the UUID of the GPU that this worker computes on; None on a CPU."""
        if self.device.type != "cuda":
            return None
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def adapter_digests(self: Any, number: int, folder: str) -> dict[str, str]:
        """Returns the digest of each tensor of the adapter that this worker computes with."""
        return adapter_digests(self.model_runner.lora_manager, number, Path(folder))

    def loaded_digests(self: Any, begin: int) -> tuple[dict[str, str], int | None]:
        """Returns digests of the tensors that all workers together compute with, on the first
        worker only, and where the next turn begins."""
        is_split = get_tensor_model_parallel_world_size() > 1
        return digests(
            self.get_model(),
            begin,
            gather if is_split else alone,
            hashes=get_tensor_model_parallel_rank() == 0,
        )


def gather(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor_model_parallel_all_gather(tensor.contiguous(), dim)


def share_packed_output(worker: Any) -> None:
    """Makes a tied output matrix use the embedding's packed copy, which nothing else reads.

    On a CPU vLLM computes with packed copies of the matrices. A reload renews the copies of the
    matrices that it gets. A tied output matrix is not among them, so the logits would come from the
    first weights for ever."""
    if not current_platform.is_cpu():
        return
    layers: list[Any] = [
        layer
        for layer in worker.get_model().modules()
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear")
    ]
    packed = {
        layer.weight.data_ptr(): layer.cpu_linear
        for layer in layers
        if not isinstance(layer, ParallelLMHead)
    }
    for layer in layers:
        layer.cpu_linear = packed.get(layer.weight.data_ptr(), layer.cpu_linear)


if not current_platform.is_cpu():
    leave_out_whole_rows()
