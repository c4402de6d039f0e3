"""Access to DeepSpeed's internals, for tasks that its interface lacks: whole weights, offloading
between updates, the float32 master weights, dropping gradients, and undoing an update.

This depends on the pinned version of DeepSpeed; the tests run it at every stage.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from services.trainer.zero.host_memory import HostCopies, HostCopy

INITIAL_MICRO_STEP = -1
"""The number from which ZeRO-1 and 2 count micro-batches: the gradient of the first is copied,
later ones are added."""


@torch.no_grad()
def whole_weights(
    module: nn.Module, wanted: Callable[[str], bool] = lambda _: True
) -> dict[str, Tensor]:
    """Returns parameters and saved buffers by name, those whose names are wanted; tied ones as one
    tensor under several names.

    Under ZeRO-3 a collective, and copies in CPU memory, on rank 0 only: the others get an empty
    dict.
    """
    state = {
        name: value for name, value in module.state_dict(keep_vars=True).items() if wanted(name)
    }
    if not any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        return {name: value.detach() for name, value in state.items()}
    copies: dict[int, Tensor] = {}
    for name, parameter in module.named_parameters():
        if not wanted(name):
            continue
        with deepspeed.zero.GatheredParameters([parameter]):
            if dist.get_rank() == 0:
                copies[id(parameter)] = parameter.detach().to("cpu", copy=True)
    if dist.get_rank() != 0:
        return {}
    return {
        name: copies[id(value)] if id(value) in copies else value.detach()
        for name, value in state.items()
    }


OFFLOADED = (OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states)
"""The states that DeepSpeed moves off the device between two updates: 12 bytes for each trained
parameter."""


def offload(zero: Any) -> None:
    """Moves master weights and optimizer states into the host's memory, at ZeRO-1 to 3; does
    nothing if they are offloaded permanently."""
    if _can_offload(zero) and not zero.optimizer.offloaded_states:
        zero.offload_states(include=OFFLOADED, pin_memory=torch.cuda.is_available())


def reload(zero: Any) -> None:
    """Moves offloaded states back to the device."""
    if _can_offload(zero) and zero.optimizer.offloaded_states:
        zero.reload_states()


def _can_offload(zero: Any) -> bool:
    optimizer = zero.optimizer
    is_spread = isinstance(optimizer, DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3)
    return is_spread and not zero.zero_use_cpu_optimizer()


@torch.no_grad()
def drop_gradients(zero: Any) -> None:
    """Drops every gradient since the last step, also the gradients of an interrupted pass."""
    optimizer = zero.optimizer
    for parameter in zero.module.parameters():
        parameter.grad = None
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        _drop_stage_3(optimizer)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        _drop_stage_1_2(optimizer)
    elif isinstance(optimizer, BF16_Optimizer):
        optimizer.clear_hp_grads()
        optimizer.clear_lp_grads()
    if hasattr(optimizer, "_backward_hook_state"):
        optimizer._backward_active_depth = 0
        optimizer._remaining_grad_acc_hooks = 0
        optimizer._backward_hook_state.reset_for_new_step()


def _drop_stage_1_2(optimizer: Any) -> None:
    optimizer.zero_grad()
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
    optimizer.extra_large_param_to_reduce.clear()
    optimizer._clear_previous_reduced_grads()
    optimizer._release_preflattened_grad_buffers()
    for group in list(optimizer.averaged_gradients):
        optimizer.averaged_gradients[group] = None
    for group in list(optimizer.all_grad_tensors):
        optimizer.all_grad_tensors[group] = None
    optimizer._release_ipg_buffers()
    optimizer.micro_step_id = INITIAL_MICRO_STEP
    if optimizer.cpu_offload:
        optimizer.reset_cpu_buffers()
        optimizer._offload_accumulated_param_ids = set()


def _drop_stage_3(optimizer: Any) -> None:
    for parameter in optimizer.params_already_reduced:
        optimizer.params_already_reduced[parameter] = False
    optimizer._pre_step()
    optimizer._overflow_clean_up(1.0)
    optimizer._partition_all_parameters()
    gather_persistent(optimizer)


@dataclass(frozen=True)
class Snapshot:
    """This rank's master weights and optimizer state, in the host's memory: 12 bytes for each
    parameter that it keeps."""

    masters: list[HostCopy]
    states: list[dict[str, HostCopy]]

    @staticmethod
    @torch.no_grad()
    def take(zero: Any, copies: HostCopies) -> Snapshot:
        """Returns a snapshot in the memory of `copies`, which replaces the previous one."""
        copies.begin()
        tensors = masters(zero)
        states = [zero.basic_optimizer.state.get(master, {}) for master in tensors]
        snapshot = Snapshot(
            [copies.copy(master) for master in tensors],
            [{key: copies.copy(value) for key, value in state.items()} for state in states],
        )
        _wait(tensors)
        return snapshot

    @torch.no_grad()
    def restore(self, zero: Any) -> None:
        """Restores weights and optimizer: a collective."""
        tensors = masters(zero)
        for master, saved, state in zip(tensors, self.masters, self.states, strict=True):
            saved.restore(master)
            current = zero.basic_optimizer.state[master]
            if state and not current:  # an engine that has not stepped yet
                current.update(new_state(master))
            for key, value in current.items():
                if key in state:
                    state[key].restore(value)
                else:
                    value.zero_()
        _wait(tensors)
        masters_to_weights(zero)


STEPS = "step"
MOMENTS = ("exp_avg", "exp_avg_sq")


def new_state(flat: Tensor) -> dict[str, Any]:
    """Returns a new optimizer state for `flat`, as the optimizer makes it at its first step."""
    count = torch.zeros((), dtype=torch.float32, device=flat.device)
    return {STEPS: count} | {what: torch.zeros_like(flat.detach()) for what in MOMENTS}


def _wait(tensors: list[Tensor]) -> None:
    """Returns once the tensors are copied: DeepSpeed uses streams of its own."""
    if tensors and tensors[0].is_cuda:
        torch.cuda.synchronize(tensors[0].device)


# --- master weights -------------------------------------------------------------------------------


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
    """Yields fragments at stage 3: each parameter is cut into as many equal parts as there are
    ranks, the last ones padded."""
    for name, parameter in trained:
        group, offset, part = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = part * dist.get_rank()
        numel = min(part, parameter.ds_numel - start)
        if numel > 0:
            flat = optimizer.fp32_partitioned_groups_flat[group]
            yield Fragment(name, start, numel, flat, offset)


def _of_flat_groups(flats: list[Tensor], trained: list[tuple[str, Any]]) -> Iterator[Fragment]:
    """Yields fragments at stages 1 and 2: the parameters of a group are concatenated, and the whole
    is cut into equal parts."""
    for name, parameter in trained:
        place = parameter._hp_mapping
        if place is not None:
            at, of_master = place.lp_fragment_address, place.hp_fragment_address
            flat = flats[place.param_group_index]
            yield Fragment(name, at.start, at.numel, flat, of_master.start)


def _own_masters(optimizer: Any) -> dict[int, Tensor]:
    """Returns the masters of parameters that have separate masters, by the parameter's id."""
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


@torch.no_grad()
def begin_anew(zero: Any) -> None:
    """Gives the optimizer the model's present weights before its first step, at ZeRO-0 to
    2: masters are the weights, and moments are zero."""
    weights = {name: p for name, p in zero.module.named_parameters() if p.requires_grad}
    for each in fragments(zero):
        master, weight = each.of(each.flat), weights[each.name].view(-1)
        master.copy_(weight[each.start : each.start + each.numel])
    forget_moments(zero)


@torch.no_grad()
def forget_moments(zero: Any) -> None:
    """Makes the optimizer's state the one before its first step: moments are zero."""
    for master in masters(zero):
        state = zero.basic_optimizer.state.get(master, {})
        for value in state.values():
            value.zero_()


def gather_persistent(optimizer: Any) -> None:
    """Gathers again the small parameters that every rank holds in spite of ZeRO-3."""
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


# --- random numbers -------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """Returns the state of this rank's random number generators, as plain numbers and tensors."""
    numpy_name, numpy_keys, *numpy_rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (
            str(numpy_name),
            torch.from_numpy(np.asarray(numpy_keys).astype(np.int64)),
            *numpy_rest,
        ),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Sets this rank's random number generators to a result of `random_state`. CUDA's generators
    stay if either side has none."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
