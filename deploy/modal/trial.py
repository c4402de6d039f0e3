"""Hone on Modal for a trial: `modal deploy deploy/modal/trial.py`.

One container has all: Redis, whose file is on the Volume, and the four services on the GPUs of
HONE_MODAL_TRAINER_GPU. With one GPU trainer and sampler take turns; with several the first is the
sampler's. Only the jobs API can be reached from outside. It runs, and costs, until the app is
stopped.
"""

from __future__ import annotations

import modal

from deploy.machine import SERVICES
from deploy.modal import inside
from deploy.modal.common import (
    CACHES,
    DATA,
    RUNS,
    SETTINGS,
    TRAINER_GPU,
    all_resources,
    caches,
    data,
    image,
    num_gpus,
    runs,
    secrets,
    server_options,
)
from deploy.modal.flags import one_container

FOLDER = f"{RUNS}/trial"
OWN = {
    "HONE_HOST": "0.0.0.0",
    "HONE_RUNS_DIR": FOLDER,
    "HONE_REDIS_DIR": f"{FOLDER}/.redis",
}

app = modal.App(f"{SETTINGS.modal_name}-trial")


@app.server(
    image=image("orchestrator", "rollout", "trainer", "reward", "modal", "redis", cuda=True),
    gpu=TRAINER_GPU,
    **all_resources(TRAINER_GPU),
    volumes={RUNS: runs, CACHES: caches, DATA: data.with_mount_options(read_only=True)},
    secrets=secrets("huggingface", "wandb", "judge"),
    min_containers=1,
    **server_options("orchestrator"),
)
class Stack:
    @modal.enter()
    def start(self) -> None:
        inside.start(SERVICES, one_container(num_gpus(TRAINER_GPU)) | OWN)

    @modal.exit()
    def stop(self) -> None:
        inside.stop()
