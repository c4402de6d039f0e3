"""DeepSpeed's float32 master weights: the tensors that this rank's optimizer updates, the part of a
parameter that each holds, and how they become the model's weights again.

All of this knows DeepSpeed's insides, at the pinned version; the tests run it at every stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor


@dataclass(frozen=True)
class Fragment:
    """The elements `[start, start + numel)` of the flattened parameter `name` that this rank's
    optimizer updates. They are `[offset, offset + numel)` of the master `flat`, and of each of its
    tensors of optimizer state."""

    name: str
    start: int
    numel: int
    flat: Tensor
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """Returns this fragment's view of `flat` or of a tensor of its shape."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.numel]


def masters(zero: Any) -> list[Tensor]:
    """Returns the tensors that this rank's optimizer updates: float32, flat if ZeRO partitions
    them."""
    optimizer = zero.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return list(optimizer.fp32_partitioned_groups_flat)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return list(optimizer.single_partition_of_fp32_groups)
    return [
        parameter for group in zero.basic_optimizer.param_groups for parameter in group["params"]
    ]


def every_rank_has_all(zero: Any) -> bool:
    """Whether every rank has all masters (ZeRO stage 0), and they are not partitioned."""
    return not isinstance(
        zero.optimizer, DeepSpeedZeroOptimizer_Stage3 | DeepSpeedZeroOptimizer | BF16_Optimizer
    )


def fragments(zero: Any) -> Iterator[Fragment]:
    """Yields the fragments in this rank's masters, parameter by parameter."""
    optimizer = zero.optimizer
    trained = [(name, p) for name, p in zero.module.named_parameters() if p.requires_grad]
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        yield from _of_stage_3(optimizer, trained)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer):
        yield from _of_flat_groups(masters(zero), trained)
    else:
        own = _own_masters(optimizer)
        for name, parameter in trained:
            flat = own[id(parameter)] if own else parameter
            yield Fragment(name, 0, parameter.numel(), flat, 0)


def _of_stage_3(optimizer: Any, trained: list[tuple[str, Any]]) -> Iterator[Fragment]:
    """Each parameter is cut into as many equal parts as there are ranks, the last ones padded."""
    for name, parameter in trained:
        group, offset, part = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = part * dist.get_rank()
        numel = min(part, parameter.ds_numel - start)
        if numel > 0:
            flat = optimizer.fp32_partitioned_groups_flat[group]
            yield Fragment(name, start, numel, flat, offset)


def _of_flat_groups(flats: list[Tensor], trained: list[tuple[str, Any]]) -> Iterator[Fragment]:
    """The parameters of a group lie one after the other, and the whole is cut into equal parts."""
    for name, parameter in trained:
        place = parameter._hp_mapping
        if place is not None:
            at, of_master = place.lp_fragment_address, place.hp_fragment_address
            flat = flats[place.param_group_index]
            yield Fragment(name, at.start, at.numel, flat, of_master.start)


def _own_masters(optimizer: Any) -> dict[int, Tensor]:
    """Returns the masters of parameters with a master of their own, by the parameter's id."""
    if not isinstance(optimizer, FP16_UnfusedOptimizer):
        return {}
    return {
        id(weight): master
        for weights, group in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        for weight, master in zip(weights, group, strict=True)
    }


def masters_to_weights(zero: Any) -> None:
    """Copies the masters to the model's weights: a collective."""
    optimizer = zero.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        gather_persistent(optimizer)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer):
        optimizer.update_lp_params()
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        for group, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
            for master, weight in zip(group, weights, strict=True):
                weight.data.copy_(master.data)


def gather_persistent(optimizer: Any) -> None:
    """Gathers again the small parameters that every rank holds in spite of ZeRO-3."""
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
