"""The float32 master weights, where DeepSpeed keeps them: which tensors this rank's optimizer steps
on, which run of which parameter each holds, and how they become the model's weights again.

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
    """The elements `[start, start + numel)` of the parameter `name`, flattened, that this rank's
    optimizer steps on. They are `[offset, offset + numel)` of the master `flat`, and of each tensor
    that the optimizer keeps for it."""

    name: str
    start: int
    numel: int
    flat: Tensor
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """Returns this fragment's view of `flat` or of a tensor of its shape."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.numel]


def masters(zero: Any) -> list[Tensor]:
    """Returns the tensors that this rank's optimizer steps on: float32, flat where ZeRO cuts them
    up."""
    optimizer = zero.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return list(optimizer.fp32_partitioned_groups_flat)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return list(optimizer.single_partition_of_fp32_groups)
    return [
        parameter for group in zero.basic_optimizer.param_groups for parameter in group["params"]
    ]


def every_rank_has_all(zero: Any) -> bool:
    """Whether the masters are the same on every rank (ZeRO stage 0), and not shared out."""
    return not isinstance(
        zero.optimizer, DeepSpeedZeroOptimizer_Stage3 | DeepSpeedZeroOptimizer | BF16_Optimizer
    )


def fragments(zero: Any) -> Iterator[Fragment]:
    """Yields what this rank's masters hold, parameter by parameter."""
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
    """Returns the masters of parameters that have one of their own, by the parameter's id."""
    if not isinstance(optimizer, FP16_UnfusedOptimizer):
        return {}
    return {
        id(weight): master
        for weights, group in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        for weight, master in zip(weights, group, strict=True)
    }


def masters_to_weights(zero: Any) -> None:
    """Makes the model's weights what the masters are: a collective."""
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
    """What every rank holds of small parameters, in spite of ZeRO-3, is gathered again."""
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
