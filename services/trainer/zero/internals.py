"""Reaching into DeepSpeed where it offers no way: whole weights, forgetting half an update, taking
an update back.

All of this knows DeepSpeed's insides, at the pinned version; the tests run it at every stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from services.trainer.zero.host_copies import HostCopies, HostCopy
from services.trainer.zero.masters import gather_persistent, masters, masters_to_weights
from services.trainer.zero.random_numbers import restore_random_state

INITIAL_MICRO_STEP = -1
"""What ZeRO-1 and 2 count micro-batches from: the first one's gradient is copied, later ones' are
added."""


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


RESTING = (OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states)
"""What DeepSpeed moves off the device between two updates: 12 bytes for each trained parameter."""


def offload(zero: Any) -> None:
    """Moves master weights and optimizer states into the host's memory: at ZeRO-1 to 3, where they
    are not there for good."""
    if _can_offload(zero) and not zero.optimizer.offloaded_states:
        zero.offload_states(include=RESTING, pin_memory=torch.cuda.is_available())


def bring_back(zero: Any) -> None:
    if _can_offload(zero) and zero.optimizer.offloaded_states:
        zero.reload_states()


def _can_offload(zero: Any) -> bool:
    optimizer = zero.optimizer
    is_spread = isinstance(optimizer, DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3)
    return is_spread and not zero.zero_use_cpu_optimizer()


@torch.no_grad()
def drop_gradients(zero: Any) -> None:
    """Forgets every gradient since the last step, those of a forward or backward pass that broke
    off included."""
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
class Undo:
    """What takes an update back: this rank's random numbers and, if it steps more than once, its
    weights and optimizer. A step that was never taken, or that DeepSpeed refused, has changed
    neither."""

    random: dict[str, Any]
    snapshot: Snapshot | None = None

    def apply(self, zero: Any) -> None:
        """Makes all as if the update had never come: with several ranks and a snapshot, a
        collective."""
        drop_gradients(zero)
        if self.snapshot is not None:
            self.snapshot.restore(zero)
        restore_random_state(self.random)


@dataclass(frozen=True)
class Snapshot:
    """This rank's master weights and optimizer state, in the host's memory: 12 bytes for each
    parameter that it keeps."""

    masters: list[HostCopy]
    states: list[dict[str, Any]]

    @staticmethod
    @torch.no_grad()
    def take(zero: Any, copies: HostCopies) -> Snapshot:
        """Returns it in the memory of `copies`, in the place of the one before."""
        copies.begin()
        tensors = masters(zero)
        states = [zero.basic_optimizer.state.get(master, {}) for master in tensors]

        def copied(value: Any) -> Any:
            return copies.copy(value) if isinstance(value, Tensor) else value

        snapshot = Snapshot(
            [copies.copy(master) for master in tensors],
            [{key: copied(value) for key, value in state.items()} for state in states],
        )
        _wait(tensors)
        return snapshot

    @torch.no_grad()
    def restore(self, zero: Any) -> None:
        """Makes weights and optimizer what they were: a collective."""
        tensors = masters(zero)
        for master, saved, state in zip(tensors, self.masters, self.states, strict=True):
            saved.restore(master)
            current = zero.basic_optimizer.state[master]
            for key, value in current.items():
                if not isinstance(value, Tensor):
                    current[key] = state.get(key, 0)
                elif key in state:
                    state[key].restore(value)
                else:
                    value.zero_()
        _wait(tensors)
        masters_to_weights(zero)


def _wait(tensors: list[Tensor]) -> None:
    """Returns once they are copied: DeepSpeed uses streams of its own."""
    if tensors and tensors[0].is_cuda:
        torch.cuda.synchronize(tensors[0].device)
