"""The trainer on Modal: `modal deploy deploy/modal/trainer.py`.

A long Function. The orchestrator spawns it when a job waits, and it ends when none does. Its
container has the trainer and the training loop, because a Function has no address at which a loop
elsewhere could call it. With HONE_MODAL_TRAINER_NODES it is a cluster of containers, and the first
one has the loop. When Modal preempts it, or 24 hours are over, it is started again on another
machine, loads the newest checkpoint from the Volume, and the job continues.
"""

from __future__ import annotations

from typing import Any

import modal

from deploy.modal import calls, inside
from deploy.modal.calls import places
from deploy.modal.common import (
    CACHES,
    DATA,
    DAY_S,
    IDLE_S,
    REDIS_SECRET,
    RETRIES,
    RUNS,
    SETTINGS,
    START_S,
    TRAINER_GPU,
    TRAINER_NODES,
    caches,
    data,
    image,
    runs,
    secrets,
    trainer_resources,
)

app = modal.App(f"{SETTINGS.modal_name}-trainer")
IN_CLUSTER = TRAINER_NODES > 1
RDMA = ("libibverbs1",) if IN_CLUSTER else ()
"""The library with which NCCL finds the network between a cluster's machines."""


def in_cluster(function: Any) -> Any:
    return modal.clustered(size=TRAINER_NODES, rdma=True)(function) if IN_CLUSTER else function


@app.function(
    image=image("trainer", "orchestrator", "modal", cuda=True, packages=RDMA),
    gpu=TRAINER_GPU,
    **trainer_resources(TRAINER_GPU),
    volumes={RUNS: runs, CACHES: caches, DATA: data.with_mount_options(read_only=True)},
    secrets=[*secrets("huggingface", "wandb"), REDIS_SECRET],
    timeout=DAY_S,
    startup_timeout=START_S,
    retries=modal.Retries(max_retries=RETRIES, initial_delay=0.0),
    single_use_containers=True,
    max_containers=TRAINER_NODES,
)
@in_cluster
def work() -> None:
    """Trains until no job waits or runs. Ends if a service elsewhere does not answer. Then `watch`
    of the orchestrator's app, which costs no GPU, wakes the service and calls this again, or pauses
    the jobs."""
    with calls.as_hone_errors():
        _work()


def _work() -> None:
    node = inside.own_node()
    if node.number:
        inside.follow(node, node.environment())
        return
    with inside.leading(node):
        found = places()
        if inside.why_away(",".join(found.values()).split(","), inside.AWAKE_S):
            return
        with inside.stack(["trainer", "orchestrator"], found | node.environment()) as client:
            inside.work_until_idle(client, IDLE_S)
