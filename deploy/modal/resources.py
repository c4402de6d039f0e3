"""The CPU cores and the host's memory that containers with GPUs ask for. Without, Modal reserves an
eighth of a core and 128 MiB, and may place them where no more is free.

A GPU that is full of a model holds 18 bytes for each parameter: weights 2, gradients 4, master
weights and Adam's moments 12 (`shared/plan/memory.py`). The trainer's host holds the last 12 of
them where the optimizer is offloaded, takes turns, or makes several updates of a batch; and up to
three published versions of the weights, 3 x 2. Together that is as much as the GPUs have.

A sampler's host reads the weights once, of at most half a GPU's memory: the rest is the cache's.

Modal bills what is asked for, or more where more is used, and refuses a container that no machine
has room for. How much that is, it does not say; `hone plan` says what a job needs, and settings ask
for it.
"""

from __future__ import annotations

from typing import Any

from deploy.modal.common import SETTINGS, num_gpus
from shared.plan.gpus import TABLE

NAMES = {"A100": "A100-40GB", "H100!": "H100", "B200+": "B200"}
"""What Modal calls GPUs that have other names in the table."""

OTHER_GIB = {"B300": 268.0}
"""Memory of GPUs that are not in it."""

PROCESS_GIB = 8
"""A process with torch and CUDA: a rank, or a sampler's worker."""

MAX_GIB = 256
"""No more is asked for unless a setting does: a container that needs more has a whole machine."""

RANK_CORES, SAMPLER_CORES, WORKER_CORES = 4.0, 4.0, 1.0
"""For a rank, whose optimizer may run on the CPU; for vLLM's server and its first worker; for each
further worker."""

LOOP_CORES, LOOP_GIB = 2.0, 4
"""The training loop beside the trainer, and Redis."""

GRADING_CORES, GRADING_GIB = 4.0, 8
"""The reward service in the same container."""


def trainer(gpus: str) -> dict[str, Any]:
    """Returns what the trainer's container asks for, the training loop in it included, as Modal
    takes it: `cpu` in cores, `memory` in MiB. `gpus` are as Modal writes them."""
    num = num_gpus(gpus)
    gib = num * (_gib(gpus) + PROCESS_GIB) + LOOP_GIB
    return _asked(
        SETTINGS.modal_trainer_cpu or num * RANK_CORES + LOOP_CORES,
        SETTINGS.modal_trainer_memory_gib or min(gib, MAX_GIB),
    )


def sampler(gpus: str) -> dict[str, Any]:
    """Returns what a sampler's container asks for."""
    num = num_gpus(gpus)
    gib = num * (_gib(gpus) / 2 + PROCESS_GIB)
    return _asked(
        SETTINGS.modal_rollout_cpu or SAMPLER_CORES + (num - 1) * WORKER_CORES,
        SETTINGS.modal_rollout_memory_gib or min(gib, MAX_GIB),
    )


def everything(gpus: str) -> dict[str, Any]:
    """Returns what a container with all services asks for. A setting of the trainer counts for all
    of it."""
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
