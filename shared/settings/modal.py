"""Settings of a deployment on Modal: what `modal deploy` of the files in deploy/modal makes, and
how it is reached."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr

from shared.settings.base import FromEnvironment, Listed


class ModalSettings(FromEnvironment):
    """What is made on Modal."""

    modal_name: str = Field(default="hone", pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")
    """Begins the names of the apps and Volumes on Modal. Another name is another deployment."""

    modal_trainer_gpu: str = "A100-80GB"
    """GPUs of the trainer on Modal, as Modal writes them, such as "H100:2": a rank for each. The
    default trains models up to 3B with all their weights."""

    modal_trainer_cpu: float | None = Field(default=None, gt=0)
    """CPU cores that the trainer's container on Modal asks for, the training loop's included. None:
    4 for each GPU and 2 more. A container with all services has it too, for all of them."""

    modal_trainer_memory_gib: int | None = Field(default=None, ge=1)
    """GiB of host memory that the trainer's container on Modal asks for. None: as much as its GPUs
    have, and 8 for each rank, at most 256: enough for a full GPU's master weights and Adam's
    moments, and three versions of the weights. `hone plan` says what a job needs with
    `memory.offload_optimizer`."""

    modal_trainer_nodes: int = Field(default=1, ge=1, le=32)
    """Machines of the trainer on Modal, from 1 to 32, each with the GPUs of `modal_trainer_gpu`.
    Several must be whole machines, such as "H100:8": Modal calls them a cluster."""

    modal_rollout_gpu: str = "A10G"
    """GPUs of each sampler on Modal, as Modal writes them: its model is split over them. The
    default serves models up to 7B."""

    modal_rollout_cpu: float | None = Field(default=None, gt=0)
    """CPU cores that each sampler on Modal asks for. None: 4, and 1 for each GPU after the
    first."""

    modal_rollout_memory_gib: int | None = Field(default=None, ge=1)
    """GiB of the host's memory that each sampler on Modal asks for. None: half as much as its GPUs
    have, and 8 for each."""

    modal_rollouts: int = Field(default=1, ge=1, le=8)
    """Samplers on Modal, from 1 to 8, each a Server with GPUs of its own."""

    modal_secrets: Annotated[tuple[Literal["huggingface", "wandb", "judge"], ...], Listed] = ()
    """Secrets of third parties that the services on Modal get, with commas between several: each is
    the Modal Secret called "hone-" and its name. Empty: none, because a deployment that refers to a
    missing Secret fails."""

    modal_key: SecretStr | None = None
    """Id of the proxy token ("wk-...") that Modal asks of callers of a service there. It is sent
    only to hosts below modal.run and modal.direct. Needs `modal_secret`."""

    modal_secret: SecretStr | None = None
    """The secret of that proxy token ("ws-...")."""
