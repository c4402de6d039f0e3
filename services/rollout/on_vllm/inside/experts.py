"""A mixture's experts, read back from the two tensors in which vLLM keeps all experts of a layer.
Imported in vLLM's process.

`w13_weight` `[E, 2 * I, H]` has the gate's and the up matrix of each expert, and `w2_weight`
`[E, H, I]` its down matrix. A kernel may keep them in an order of its own. On a CPU they are packed
in blocks: where each element went is found by packing the numbers of the elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

SUFFIX = ".routed_experts"
"""What vLLM adds to the checkpoint's name of a layer's experts."""

AS_LOADED = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels that take the matrices as they were loaded."""

BITS = {2: torch.int16, 4: torch.int32}
DIGIT = 7
"""Bits of an element's number that are packed at a time: so few are a finite number in any dtype.
"""


def tensors(
    path: str, layer: Any, gather: Callable[[Tensor, int], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the experts' matrices by the checkpoint's names; none where the kernel's order is not
    known here, or each device has other experts."""
    matrices = _matrices(layer)
    if matrices is None:
        return
    gates, ups, downs = matrices
    parts = (
        (layer.ckpt_gate_proj_name, gather(gates, 1)),
        (layer.ckpt_up_proj_name, gather(ups, 1)),
        (layer.ckpt_down_proj_name, gather(downs, 2)),
    )
    name = path.replace(".base_layer", "").removesuffix(SUFFIX)
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
    """Returns both tensors in the order in which they were loaded; None if it is not known."""
    method, w13, w2 = layer.quant_method, layer.w13_weight, layer.w2_weight
    if not isinstance(method, UnquantizedFusedMoEMethod):
        return None
    if method.unquantized_backend in AS_LOADED:
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
    """Returns which element of a matrix each element of the packed one is."""
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
