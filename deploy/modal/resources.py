"""The CPU cores and the host memory that containers with GPUs ask for. Otherwise Modal reserves an
eighth of a core and 128 MiB, and may choose a machine with no more free.

A GPU that is full of a model holds 18 bytes for each parameter: weights 2, gradients 4, master
weights and Adam's moments 12 (`shared/plan/memory.py`). The trainer's host holds the last 12 of
these bytes if the optimizer is offloaded, takes turns, or makes several updates of a batch; and up
to three published versions of the weights, 3 x 2. Together that is as much as the GPUs have.

A sampler's host reads the weights once, of at most half a GPU's memory: the rest is the cache's.

Modal bills the request, or the use if that is more. It refuses a container that no machine has room
for, but does not document that limit. `hone plan` says what a job needs, and settings ask for it.
"""

from __future__ import annotations

from typing import Any

from deploy.modal.common import SETTINGS, num_gpus
from shared.plan.gpus import TABLE

NAMES = {"A100": "A100-40GB", "H100!": "H100", "B200+": "B200"}
"""GPUs that Modal calls otherwise than the table."""

OTHER_GIB = {"B300": 268.0}
"""Memory of GPUs that are not in the table."""

PROCESS_GIB = 8
"""GiB of a process with torch and CUDA: a rank, or a sampler's worker."""

MAX_GIB = 256
"""The most GiB asked for without a setting: a container that needs more has a whole machine."""

RANK_CORES, SAMPLER_CORES, WORKER_CORES = 4.0, 4.0, 1.0
"""Cores for a rank, whose optimizer may run on the CPU; for vLLM's server and its first worker; for
each further worker."""

LOOP_CORES, LOOP_GIB = 2.0, 4
"""Cores and GiB of the training loop beside the trainer, and of Redis."""

GRADING_CORES, GRADING_GIB = 4.0, 8
"""Cores and GiB of the reward service in the same container."""


def trainer(gpus: str) -> dict[str, Any]:
    """Returns the resources of the trainer's container, with its training loop, in Modal's format:
    `cpu` in cores, `memory` in MiB. `gpus` are as Modal writes them."""
    num = num_gpus(gpus)
    gib = num * (_gib(gpus) + PROCESS_GIB) + LOOP_GIB
    return _asked(
        SETTINGS.modal_trainer_cpu or num * RANK_CORES + LOOP_CORES,
        SETTINGS.modal_trainer_memory_gib or min(gib, MAX_GIB),
    )


def sampler(gpus: str) -> dict[str, Any]:
    """Returns the resources of a sampler's container."""
    num = num_gpus(gpus)
    gib = num * (_gib(gpus) / 2 + PROCESS_GIB)
    return _asked(
        SETTINGS.modal_rollout_cpu or SAMPLER_CORES + (num - 1) * WORKER_CORES,
        SETTINGS.modal_rollout_memory_gib or min(gib, MAX_GIB),
    )


def everything(gpus: str) -> dict[str, Any]:
    """Returns the resources of a container with all services. The trainer's settings count for the
    whole container."""
    alone = trainer(gpus)
    cores = SETTINGS.modal_trainer_cpu or alone["cpu"] + SAMPLER_CORES + GRADING_CORES
    gib = SETTINGS.modal_trainer_memory_gib or alone["memory"] / 1024 + PROCESS_GIB + GRADING_GIB
    return _asked(cores, gib)


def _gib(gpus: str) -> float:
    """Returns the memory of one of these GPUs."""
    kind = gpus.partition(":")[0]
    return OTHER_GIB.get(kind) or TABLE[NAMES.get(kind, kind)].memory_gib


def _asked(cores: float, gib: float) -> dict[str, Any]:
    return {"cpu": cores, "memory": round(gib) * 1024}
