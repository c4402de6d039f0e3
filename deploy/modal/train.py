"""One job on Modal, with nothing left afterwards: `modal run [--detach] deploy/modal/train.py
--model ...`. Several may run at once, as far as there are GPUs.

Without `--simple-mode` the trainer's container has everything but the samplers, which are Servers
of `rollout.py` with GPUs of their own. With it, one container has everything: trainer and sampler
take turns on its GPUs, or the sampler has a GPU of its own (`--vllm-mode serve`).
"""

from __future__ import annotations

import secrets as random
import sys
from typing import Any

import modal

from deploy.modal import inside, rollout
from deploy.modal.common import (
    CACHES,
    DATA,
    DAY_S,
    RUNS,
    SETTINGS,
    START_S,
    TRAINER_GPU,
    all_resources,
    caches,
    check_one_machine,
    data,
    gpu,
    image,
    runs,
    secrets,
)
from deploy.modal.flags import Flags, Placement, job_of, placement_of
from shared.errors import BadRequest
from shared.job import Job

app = modal.App(f"{SETTINGS.modal_name}-train").include(rollout.app)


@app.function(
    image=image("orchestrator", "rollout", "trainer", "reward", "modal", "redis", cuda=True),
    gpu=TRAINER_GPU,
    **all_resources(TRAINER_GPU),
    volumes={RUNS: runs, CACHES: caches, DATA: data.with_mount_options(read_only=True)},
    secrets=secrets("huggingface", "wandb", "judge"),
    timeout=DAY_S,
    startup_timeout=START_S,
    retries=modal.Retries(max_retries=10, initial_delay=0.0),
    single_use_containers=True,
)
def train(
    run: str, job: dict[str, Any], placement: Placement, samplers: list[str]
) -> dict[str, Any]:
    """Trains the job to its end, or to a pause, and returns how it ended. Started again, it
    continues from the newest checkpoint in the run's folder of the Volume."""
    folder = f"{RUNS}/{run}"
    environment = placement.environment | {
        "HONE_RUNS_DIR": folder,
        "HONE_REDIS_DIR": f"{folder}/.redis",
    }
    if samplers:
        environment["HONE_ROLLOUT_URL"] = ",".join(samplers)
    if why := inside.why_away(samplers, START_S):
        return {"id": run, "status": "paused", "error": why, "summary": None}
    with inside.stack(placement.services, environment) as client:
        return inside.train(client, Job.model_validate(job), run)


def checked(flags: Flags, trainer_gpu: str) -> tuple[Job, Placement]:
    """Returns what to train and where. Ends with a sentence if the flags do not allow it."""
    try:
        check_one_machine("a run")
        job, placement = job_of(flags), placement_of(flags, trainer_gpu)
        gpu(placement.gpu, "--vllm-mode serve takes one more than HONE_MODAL_TRAINER_GPU, which")
    except BadRequest as error:
        sys.exit(f"hone: {error.detail}")
    return job, placement


@app.local_entrypoint()
def main(
    job: str = "deploy/jobs/gsm8k.toml",
    model: str | None = None,
    max_steps: int | None = None,
    batch_size: int | None = None,
    num_generations: int | None = None,
    num_rollout_workers: int | None = None,
    max_tokens: int | None = None,
    max_model_len: int | None = None,
    learning_rate: float | None = None,
    save_steps: int | None = None,
    sync_weights_every: int | None = None,
    weight_sync_method: str | None = None,
    use_lora: bool = False,
    simple_mode: bool = False,
    vllm_mode: str | None = None,
    resume: str | None = None,
) -> None:
    given = dict(locals())
    del given["resume"]
    flags = Flags(**given)
    chosen, placement = checked(flags, TRAINER_GPU)
    samplers = [str(server.get_url()) for server in rollout.servers[: placement.num_samplers]]
    run = resume or f"{chosen.name}-{random.token_hex(4)}"
    function = train.with_options(gpu=placement.gpu, **all_resources(placement.gpu))
    call = function.spawn(run, chosen.model_dump(mode="json"), placement, samplers)
    print(f"run {run} on {placement.gpu}, {len(samplers)} samplers beside it: {call.object_id}")
    ended = call.get()
    print(f"{ended['status']}: {ended['error'] or ended['summary']}")
    print(f"files: modal volume get {SETTINGS.modal_name}-runs {run}")
