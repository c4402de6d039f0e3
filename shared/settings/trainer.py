"""Settings of the trainer: its ranks, its nodes, and weights that go from GPU to GPU."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shared.settings.base import FromEnvironment, Listed


class TrainerSettings(FromEnvironment):
    """What the trainer has."""

    trainers: int = Field(default=1, ge=1, le=16)
    """Trainers that `hone up` starts, on the ports from `trainer_port` on, each with
    `rollout_replicas` samplers of its own: so many jobs run at once. More than 1 only where there
    is no GPU: there each service needs GPUs of its own, and is started by hand."""

    trainer_ranks: int = Field(default=1, ge=1)
    """Processes on each node, one per GPU."""

    trainer_devices: Annotated[tuple[str, ...], Listed] = ()
    """GPUs of the trainer in the stack that `hone up` starts, as CUDA_VISIBLE_DEVICES names them:
    "2,3". Empty: `trainer_ranks` GPUs that the sampler does not use, or else the sampler's."""

    trainer_threads: int | None = Field(default=None, ge=1)
    """CPU threads per rank. None: the cores of the node, shared out."""

    trainer_restarts: int = Field(default=3, ge=0)
    """How often in ten minutes ranks that died are started again. Beyond it the trainer ends,
    because a fault that repeats would repeat again."""

    trainer_nodes: int = Field(default=1, ge=1)
    """Machines that the trainer runs on. They share `runs_dir`; HTTP is on node 0."""

    trainer_node_rank: int = Field(default=0, ge=0)
    """Number of this machine among them, from 0."""

    trainer_rendezvous: str | None = None
    """Where the nodes meet: <host>:<port> of node 0, the same setting on each. Needed from two
    nodes on."""

    trainer_interface: str | None = None
    """Network interface that the nodes reach each other by, for example eth0. It must be of a
    private network: nothing on it is encrypted or authenticated. Needed from two nodes on."""

    transfer_deadline_s: float = Field(default=60.0, gt=0)
    """Seconds that trainer and sampler wait for each other while weights go from GPU to GPU
    (`weight_sync` "nccl" and "ipc"). Then the version goes by "http". Longer than the largest model
    takes, but not much: sampling waits meanwhile. At most a fifth of `sync_deadline_s`: a sampler
    takes up to five of them, until it has met the trainer, to receive and to load. That the two
    cannot meet at all is found out in 15 s, or in one deadline if that is shorter."""
