"""Converts the flags of `modal run deploy/modal/train.py` to the job and to the placement of its
parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deploy.machine import SERVICES
from shared.errors import BadRequest
from shared.job import Job, Source
from shared.job.file import load_job

MAX_SAMPLERS = 8
VOLUMES = "/volumes"
OVER_THE_VOLUME = ("disk", "reload", "restart")
"""Sync methods for samplers in other containers: the trainer's container cannot be called."""

OVERRIDES = {
    "model": "model",
    "max_steps": "steps",
    "batch_size": "sampling.prompts_per_step",
    "num_generations": "sampling.group_size",
    "max_tokens": "sampling.max_tokens",
    "max_model_len": "max_model_len",
    "learning_rate": "training.learning_rate",
    "save_steps": "checkpoints.every",
    "sync_weights_every": "sync_every",
    "weight_sync_method": "weight_sync",
}
"""The job's key that each flag sets."""


@dataclass(frozen=True)
class Flags:
    """The flags as given. None: not given, so the job file or the job's default counts."""

    job: str
    model: str | None = None
    max_steps: int | None = None
    batch_size: int | None = None
    num_generations: int | None = None
    num_rollout_workers: int | None = None
    max_tokens: int | None = None
    max_model_len: int | None = None
    learning_rate: float | None = None
    save_steps: int | None = None
    sync_weights_every: int | None = None
    weight_sync_method: str | None = None
    use_lora: bool = False
    simple_mode: bool = False
    vllm_mode: str | None = None


@dataclass(frozen=True)
class Placement:
    """The placement of a run's parts. The trainer's container has `gpu`, and runs `services` with
    the settings `environment`; each of `num_samplers` samplers has a container of its own."""

    gpu: str
    services: tuple[str, ...]
    environment: dict[str, str]
    num_samplers: int = 0


def job_of(flags: Flags) -> Job:
    """Returns the file's job with the flags applied. Raises BadRequest with a sentence for each
    fault, and for a job that cannot run where the flags place it."""
    path = Path(flags.job)
    given = {key: getattr(flags, name) for name, key in OVERRIDES.items()}
    overrides = [f"{key}={value}" for key, value in given.items() if value is not None]
    if flags.use_lora and load_job(path).lora is None:
        overrides.append("lora={}")
    if (every := flags.sync_weights_every) is not None:
        staleness = max(load_job(path).max_staleness, every - 1)
        overrides.append(f"max_staleness={staleness}")
    if not flags.simple_mode:
        overrides += _over_the_volume(flags, path)
    job = load_job(path, overrides)
    _check_turns(job, flags)
    _check_seen(job)
    return job


def _over_the_volume(flags: Flags, path: Path) -> list[str]:
    asked = flags.weight_sync_method or load_job(path).weight_sync
    if asked in OVER_THE_VOLUME:
        return []
    if asked != "auto":
        raise BadRequest(
            f"weight_sync is {asked!r} and the samplers are in containers of their own; expected "
            f'"auto" or one of {", ".join(OVER_THE_VOLUME)}, or --simple-mode'
        )
    return ["weight_sync=disk"]


def _check_turns(job: Job, flags: Flags) -> None:
    if job.max_staleness and flags.simple_mode and (flags.vllm_mode or "colocate") == "colocate":
        raise BadRequest(
            f"max_staleness is {job.max_staleness} and trainer and sampler take turns on a GPU; "
            "expected 0, or --vllm-mode serve"
        )


def _check_seen(job: Job) -> None:
    """Raises BadRequest for a file of this machine, because no container sees it."""
    sets = [held_out.source for held_out in job.evaluation.sets.values()]
    models = [each.model for each in job.evaluation.models]
    named: list[Source | None] = [job.model, *models, job.data.train, job.data.eval, *sets]
    for name in filter(_is_path, named):
        if not str(name).startswith(f"{VOLUMES}/"):
            raise BadRequest(
                f"{name!r} is on this machine; `hone modal upload` puts it on the Volume, where "
                f"the job has to name it: {VOLUMES}/data/{Path(str(name)).name}"
            )


def _is_path(name: Source | None) -> bool:
    return isinstance(name, str) and name.startswith("/")


def placement_of(flags: Flags, gpu: str) -> Placement:
    """Returns where the run's parts are, `gpu` being the trainer's GPUs as Modal writes them.
    Raises BadRequest for flags that contradict each other."""
    kind, _, count = gpu.partition(":")
    num = int(count or 1)
    samplers = flags.num_rollout_workers
    if flags.simple_mode:
        if samplers not in (None, 1):
            raise BadRequest(
                f"--num-rollout-workers is {samplers} with --simple-mode; expected 1: one "
                "container has one sampler"
            )
        if flags.vllm_mode == "serve":
            return Placement(f"{kind}:{num + 1}", SERVICES, _settings(ranks=num, turns=False))
        if flags.vllm_mode in (None, "colocate"):
            return Placement(gpu, SERVICES, _settings(ranks=num, turns=True))
        raise BadRequest(f"--vllm-mode is {flags.vllm_mode!r}; expected colocate or serve")
    if flags.vllm_mode is not None:
        raise BadRequest(
            f"--vllm-mode is {flags.vllm_mode!r} without --simple-mode; expected both, or neither"
        )
    num_samplers = 2 if samplers is None else samplers
    if not 1 <= num_samplers <= MAX_SAMPLERS:
        raise BadRequest(f"--num-rollout-workers is {samplers}; expected 1 to {MAX_SAMPLERS}")
    services = ("reward", "trainer", "orchestrator")
    return Placement(gpu, services, {"HONE_TRAINER_RANKS": str(num)}, num_samplers)


def one_container(num_gpus: int) -> dict[str, str]:
    """Returns the settings of a stack in one container: trainer and sampler take turns on a single
    GPU; with several GPUs the sampler has the first and the trainer the others."""
    return _settings(ranks=max(num_gpus - 1, 1), turns=num_gpus == 1)


def _settings(*, ranks: int, turns: bool) -> dict[str, str]:
    """Returns the settings of a container with all services. It does not reload the Volume: it sees
    its own files, and Modal would refuse while Redis has a file of the Volume open."""
    return {
        "HONE_RUNS_REFRESH": "true",
        "HONE_COLOCATE": str(int(turns)),
        "HONE_TRAINER_RANKS": str(ranks),
        "HONE_TENSOR_PARALLEL_SIZE": "1",
    }
