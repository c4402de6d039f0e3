"""Parts that the apps share: names, Volumes, Secrets, images, and their containers' environment.

Modal evaluates decorators when it imports a file, so the settings `HONE_MODAL_*` are read then, and
are part of the images: the same file is imported again in the containers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import modal

from shared.errors import BadRequest
from shared.http.urls import PORTS
from shared.plan.gpus import TABLE
from shared.settings import PREFIX, Settings, load_settings

SETTINGS = load_settings()
PYTHON = "3.11"
CUDA = (
    "nvidia/cuda:13.0.2-devel-ubuntu22.04"
    "@sha256:6b6617592b94e7dcc6ffbe6d00720eed27bc6e3b4f06b26b93b4070c31f57391"
)
"""The image with the CUDA compiler, of the version with which torch was built: FlashInfer's kernels
are built where they run. The digest is for amd64."""

ROOT = Path(__file__).parents[2]
PROJECT, PINS = ROOT / "pyproject.toml", ROOT / "requirements/cuda.txt"
SOURCES = ("deploy", "hone", "services", "shared")
PACKAGE_DATA = ("**/*.py", "**/*.lua", "**/architectures.txt", "**/findings.toml")
"""The files of SOURCES that the services read."""

RUNS, CACHES, DATA = "/volumes/runs", "/volumes/caches", "/volumes/data"
"""The paths of the Volumes in containers: the same in every container, because jobs' records
contain paths of runs."""

DAY_S = 24 * 3600
RETRIES = 3
"""How often Modal starts the trainer's Function again after a failure. It restarts it after a
preemption, and `watch` calls it again after 24 hours."""

START_S = 1800
"""Seconds for a container to start: a new machine pulls an image of 10 GB."""

IDLE_S = 300
"""Seconds without a request until a container of a Server ends, and without a job until the
trainer's does."""

GPU_TYPES = (
    "T4", "L4", "A10", "A10G", "L40S", "A100", "A100-40GB", "A100-80GB", "RTX-PRO-6000", "H100",
    "H100!", "H200", "B200", "B200+", "B300",
)  # fmt: skip
MAX_GPUS = {"A10": 4, "A10G": 4}

runs = modal.Volume.from_name(f"{SETTINGS.modal_name}-runs", create_if_missing=True, version=2)
"""Run folders: weights in versioned folders, checkpoints, rollouts, metrics; uploaded files; and
Redis's file, where Redis is in the container."""

caches = modal.Volume.from_name(f"{SETTINGS.modal_name}-caches", create_if_missing=True, version=2)
"""Models and datasets from Hugging Face, and vLLM's compiled code."""

data = modal.Volume.from_name(f"{SETTINGS.modal_name}-data", create_if_missing=True, version=2)
"""Data files that jobs name: `hone modal upload` puts them there."""

SERVICES_SECRET = modal.Secret.from_name(
    "hone", required_keys=["HONE_TOKEN", "HONE_MODAL_KEY", "HONE_MODAL_SECRET"]
)
"""The tokens for services and `hone`, and for Modal's proxy."""

REDIS_SECRET = modal.Secret.from_name("hone-redis", required_keys=["HONE_REDIS_URL"])

KEYS = {
    "huggingface": "HF_TOKEN",
    "wandb": "WANDB_API_KEY",
    "judge": "HONE_JUDGE_API_KEY",
}
"""The variable in each Secret that HONE_MODAL_SECRETS may name."""


def secrets(*names: str) -> list[modal.Secret]:
    """Returns the services' own Secret, and each Secret of `names` that the settings name."""
    wanted = [name for name in names if name in SETTINGS.modal_secrets]
    others = [modal.Secret.from_name(f"hone-{name}", required_keys=[KEYS[name]]) for name in wanted]
    return [SERVICES_SECRET, *others]


def gpu(text: str, setting: str) -> str:
    """Returns the GPUs in Modal's notation. Raises BadRequest for GPUs that `modal deploy` accepts
    although Modal does not have them."""
    kind, _, count = text.partition(":")
    most = MAX_GPUS.get(kind, 8)
    if kind not in GPU_TYPES:
        raise BadRequest(
            f"{setting} is {text!r}; expected one of {', '.join(GPU_TYPES)}, with :2 and the like "
            "for several"
        )
    if count and not (re.fullmatch(r"[1-8]", count) and int(count) <= most):
        raise BadRequest(f"{setting} is {text!r}; expected 1 to {most} GPUs of this type")
    return text


def num_gpus(text: str) -> int:
    return int(text.partition(":")[2] or 1)


def nodes(count: int, gpus: str) -> int:
    """Returns the trainer's number of machines. Raises BadRequest for several machines that are not
    whole ones."""
    kind = gpus.partition(":")[0]
    most = MAX_GPUS.get(kind, 8)
    if count > 1 and num_gpus(gpus) != most:
        raise BadRequest(
            f"HONE_MODAL_TRAINER_NODES is {count} and HONE_MODAL_TRAINER_GPU is {gpus!r}; several "
            f"machines have to be whole ones: expected {kind}:{most}"
        )
    return count


def check_one_machine(what: str) -> None:
    """Raises BadRequest if the trainer has several machines."""
    if TRAINER_NODES > 1:
        raise BadRequest(
            f"HONE_MODAL_TRAINER_NODES is {TRAINER_NODES} and {what} has one machine; `hone modal "
            "up` makes trainers of several"
        )


TRAINER_GPU = gpu(SETTINGS.modal_trainer_gpu, "HONE_MODAL_TRAINER_GPU")
TRAINER_NODES = nodes(SETTINGS.modal_trainer_nodes, TRAINER_GPU)
ROLLOUT_GPU = gpu(SETTINGS.modal_rollout_gpu, "HONE_MODAL_ROLLOUT_GPU")


def image(*extras: str, cuda: bool = False, packages: Sequence[str] = ()) -> modal.Image:
    """Returns an image with these extras of the project, on Debian or on NVIDIA's CUDA, with more
    `packages` of the distribution, and the project's source, which is mounted when a container
    starts."""
    base = (
        modal.Image.from_registry(CUDA, add_python=PYTHON).entrypoint([])
        if cuda
        else modal.Image.debian_slim(python_version=PYTHON)
    )
    return (
        base.apt_install("build-essential", *packages)
        .add_local_file(PINS, "/pins.txt", copy=True)
        .pip_install_from_pyproject(
            str(PROJECT), optional_dependencies=[*extras], extra_options="--constraint /pins.txt"
        )
        .env(_environment())
        .add_local_python_source(*SOURCES, ignore=~modal.FilePatternMatcher(*PACKAGE_DATA))
    )


def _environment() -> dict[str, str]:
    """Returns the environment variables of every container, without Secrets."""
    return {
        "PYTHONPATH": "/root",
        "HF_HOME": f"{CACHES}/huggingface",
        "VLLM_CACHE_ROOT": f"{CACHES}/vllm",
        "HONE_RUNS_DIR": RUNS,
        "HONE_DATA_DIRS": DATA,
        "HONE_MODEL_DIRS": f"{DATA},{CACHES}",
        "HONE_SANDBOX": "modal",
        "HONE_RUNS_COMMIT": f"sync {RUNS}",
        "HONE_RUNS_REFRESH": "python -m deploy.modal.refresh",
        # A Server without a container answers 503 until one has started.
        "HONE_PATIENCE_S": str(START_S),
        "HONE_TRAINER_RANKS": str(num_gpus(TRAINER_GPU)),
        "HONE_TENSOR_PARALLEL_SIZE": str(num_gpus(ROLLOUT_GPU)),
    } | {
        f"{PREFIX}{name.upper()}": _text(value)
        for name in Settings.model_fields
        if name.startswith("modal_") and name not in ("modal_key", "modal_secret")
        if (value := getattr(SETTINGS, name)) is not None
    }


def _text(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def server_options(service: str, **options: Any) -> dict[str, Any]:
    """Returns a service's options: one container, which ends when there are no requests, behind
    Modal's proxy, which requires a token. Without `target_concurrency` there is only one."""
    return {
        "port": PORTS[service],
        "unauthenticated": False,
        "startup_timeout": START_S,
        "scaledown_window": IDLE_S,
        "exit_grace_period": 0,
    } | options


# --- CPU cores and host memory -------------------------------------------------------------------
#
# Containers with GPUs ask for both. Otherwise Modal reserves an eighth of a core and 128 MiB, and
# may choose a machine with no more free.
#
# A GPU that is full of a model holds 18 bytes for each parameter: weights 2, gradients 4, master
# weights and Adam's moments 12 (`shared/plan/memory.py`). The trainer's host holds the last 12 of
# these bytes if the optimizer is offloaded, takes turns, or makes several updates of a batch; and
# up to three published versions of the weights, 3 x 2. Together that is as much as the GPUs have.
#
# A sampler's host reads the weights once, of at most half a GPU's memory: the rest is the cache's.
#
# Modal bills the request, or the use if that is more: a request is no limit. It refuses a container
# that no machine has room for, but does not document that limit.

GPU_NAMES = {"A100": "A100-40GB", "H100!": "H100", "B200+": "B200"}
"""GPUs with other names at Modal than in the table."""

OTHER_GPUS_GIB = {"B300": 268.0}
"""Memory of GPUs that are not in the table."""

PROCESS_GIB = 8
"""GiB of a process with torch and CUDA: a rank, or a sampler's worker."""

MAX_GIB = 256
"""The most GiB asked for: a container that needs more has a whole machine."""

RANK_CORES, SAMPLER_CORES, WORKER_CORES = 4.0, 4.0, 1.0
"""Cores for a rank, whose optimizer may run on the CPU; for vLLM's server and its first worker; for
each further worker."""

LOOP_CORES, LOOP_GIB = 2.0, 4
"""Cores and GiB of the training loop beside the trainer, and of Redis."""

GRADING_CORES, GRADING_GIB = 4.0, 8
"""Cores and GiB of the reward service in the same container."""


def trainer_resources(gpus: str) -> dict[str, Any]:
    """Returns the resources of the trainer's container, with its training loop, in Modal's format:
    `cpu` in cores, `memory` in MiB. `gpus` are as Modal writes them."""
    num = num_gpus(gpus)
    gib = num * (_gib(gpus) + PROCESS_GIB) + LOOP_GIB
    return _asked(num * RANK_CORES + LOOP_CORES, min(gib, MAX_GIB))


def sampler_resources(gpus: str) -> dict[str, Any]:
    """Returns the resources of a sampler's container."""
    num = num_gpus(gpus)
    gib = num * (_gib(gpus) / 2 + PROCESS_GIB)
    return _asked(SAMPLER_CORES + (num - 1) * WORKER_CORES, min(gib, MAX_GIB))


def all_resources(gpus: str) -> dict[str, Any]:
    """Returns the resources of a container with all services."""
    alone = trainer_resources(gpus)
    cores = alone["cpu"] + SAMPLER_CORES + GRADING_CORES
    return _asked(cores, alone["memory"] / 1024 + PROCESS_GIB + GRADING_GIB)


def _gib(gpus: str) -> float:
    """Returns the memory of one of these GPUs."""
    kind = gpus.partition(":")[0]
    return OTHER_GPUS_GIB.get(kind) or TABLE[GPU_NAMES.get(kind, kind)].memory_gib


def _asked(cores: float, gib: float) -> dict[str, Any]:
    return {"cpu": cores, "memory": round(gib) * 1024}
