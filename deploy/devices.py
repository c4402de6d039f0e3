"""Which GPUs sampler and trainer see when they run on one machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from shared.errors import BadRequest
from shared.host import nvidia
from shared.plan.placement import SHARED_UTILIZATION, TURNS_UTILIZATION
from shared.settings import Settings


@dataclass(frozen=True)
class Plan:
    """The devices of each service, as CUDA_VISIBLE_DEVICES names them, and the share of a device's
    memory that the sampler takes."""

    rollout: tuple[str, ...]
    trainer: tuple[str, ...]
    gpu_memory_utilization: float

    def environment(self, service: str) -> dict[str, str]:
        """Returns the environment variables for a service."""
        devices = {"rollout": self.rollout, "trainer": self.trainer}.get(service)
        if devices is None:
            return {}
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(devices),
            "HONE_GPU_MEMORY_UTILIZATION": str(self.gpu_memory_utilization),
            "HONE_ROLLOUT_DEVICES": ",".join(self.rollout),
            "HONE_TRAINER_DEVICES": ",".join(self.trainer),
        }


def plan(visible: tuple[str, ...], settings: Settings) -> Plan | None:
    """Returns who gets which of the `visible` devices; None on a machine without any.

    Devices that the settings name are taken. Else the sampler gets the first `tensor_parallel_size`
    and the trainer the `trainer_ranks` after them, or the last ones if there are too few for both.
    Only a sampler that shares a device takes less of its memory, unless the setting says how much.
    With `colocate` both get the same devices. Raises BadRequest if a service needs more devices
    than exist, or if services that take turns name different devices.
    """
    if not visible:
        return None
    num_rollout, num_trainer = settings.tensor_parallel_size, settings.trainer_ranks
    rollout = settings.rollout_devices
    trainer = settings.trainer_devices
    if settings.colocate:
        rollout = trainer = _same(rollout, trainer) or visible[: max(num_rollout, num_trainer)]
    if not rollout:
        free = tuple(device for device in visible if device not in trainer)
        rollout = (free if len(free) >= num_rollout else visible)[:num_rollout]
    if not trainer:
        free = tuple(device for device in visible if device not in rollout)
        trainer = free[:num_trainer] if len(free) >= num_trainer else visible[-num_trainer:]
    _check_enough(rollout, num_rollout, "HONE_ROLLOUT_DEVICES", "HONE_TENSOR_PARALLEL_SIZE")
    _check_enough(trainer, num_trainer, "HONE_TRAINER_DEVICES", "HONE_TRAINER_RANKS")
    return Plan(rollout, trainer, _utilization(rollout, trainer, settings))


def plan_sampler(own: tuple[str, ...], settings: Settings) -> Plan:
    """Returns the plan of a sampler with its `own` part of HONE_ROLLOUT_DEVICES.

    It shares devices that are in HONE_TRAINER_DEVICES too; that is not set on a machine without a
    trainer. With `colocate` it takes turns on its own devices. Raises BadRequest if it needs more
    than it has.
    """
    _check_enough(
        own, settings.tensor_parallel_size, "HONE_ROLLOUT_DEVICES", "HONE_TENSOR_PARALLEL_SIZE"
    )
    trainer = settings.trainer_devices
    if settings.colocate:
        _same(settings.rollout_devices, trainer)
        trainer = own
    return Plan(own, trainer, _utilization(own, trainer, settings))


def _utilization(rollout: tuple[str, ...], trainer: tuple[str, ...], settings: Settings) -> float:
    if "gpu_memory_utilization" in settings.model_fields_set or not set(rollout) & set(trainer):
        return settings.gpu_memory_utilization
    return TURNS_UTILIZATION if settings.colocate else SHARED_UTILIZATION


def _same(rollout: tuple[str, ...], trainer: tuple[str, ...]) -> tuple[str, ...]:
    if rollout and trainer and rollout != trainer:
        raise BadRequest(
            f"HONE_COLOCATE is set, and HONE_ROLLOUT_DEVICES ({','.join(rollout)}) are not "
            f"HONE_TRAINER_DEVICES ({','.join(trainer)}): who takes turns has the same ones"
        )
    return rollout or trainer


def _check_enough(devices: tuple[str, ...], needed: int, names: str, count: str) -> None:
    if len(devices) < needed:
        raise BadRequest(
            f"{count} is {needed}, and there are {len(devices)} device(s) for it "
            f"({', '.join(devices)}); lower it, or name more in {names}"
        )


def visible_devices(folder: Path = nvidia.DEVICES) -> tuple[str, ...]:
    """Returns the NVIDIA devices that a process started now would see."""
    named = os.environ.get(nvidia.VISIBLE)
    if named in nvidia.HIDDEN:
        return ()
    if named is not None:
        return tuple(name.strip() for name in named.split(",") if name.strip())
    return tuple(map(str, range(nvidia.num_cards(folder))))
