"""Where a Trainer's job runs. A mode is asked for `stack()` once, when the job is submitted: it
starts what is missing, and returns the orchestrator's address.

| mode | the stack |
|---|---|
| `Local()` | on this machine; started if none answers |
| `Remote(url)` | anywhere: Compose, Kubernetes, another machine |
| `SingleNode(gpu)` | one container on Modal |
| `Distributed(actor, rollout)` | a container for each service on Modal |
| `Simple()` (simple.py) | none: TRL's `GRPOTrainer` trains the job |
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hone import stack
from hone.client import Client
from shared.errors import BadRequest, Unavailable
from shared.explain import elide
from shared.job import Job

GPUS = "a GPU as Modal writes it, such as 'A100' or 'H100:2'"


@dataclass(frozen=True)
class Address:
    """An orchestrator's URL and the token to send. `shares_files`: it reads this machine's
    files."""

    url: str
    token: str | None
    shares_files: bool = False

    def connect(self) -> Client:
        return Client(self.url, token=self.token)


class Mode:
    """Base class of the modes."""

    def check(self, job: Job) -> None:
        """Raises BadRequest for a job that this mode cannot run."""

    def stack(self, packages: tuple[str, ...] = ()) -> Address:
        """Returns where the jobs API is, once it answers. `packages` are what the sandbox for
        model-written code should have, where the stack is started here."""
        raise NotImplementedError


@dataclass(frozen=True)
class Local(Mode):
    """The stack at HONE_ORCHESTRATOR_URL or started in `folder`, else a new one on this machine,
    which stays up for the next job (`hone down` stops it)."""

    folder: str | Path = stack.FOLDER

    def stack(self, packages: tuple[str, ...] = ()) -> Address:
        folder = Path(self.folder)
        settings = {"HONE_SANDBOX_PACKAGES": ",".join(packages)} if packages else {}
        stack.ensure(folder, settings=settings)
        url, token = stack.orchestrator(folder)
        return Address(url, token, shares_files=True)


@dataclass(frozen=True)
class Remote(Mode):
    """An orchestrator at `url`. Without `token`, HONE_TOKEN is sent if it is set."""

    url: str
    token: str | None = None

    def check(self, job: Job) -> None:
        Address(self.url, self.token).connect().close()

    def stack(self, packages: tuple[str, ...] = ()) -> Address:
        from shared.settings import load_settings

        address = Address(self.url, self.token or load_settings().bearer())
        with address.connect() as client:
            client.ping()
        return address


@dataclass(frozen=True)
class SingleNode(Mode):
    """One container on Modal with everything. "colocate": trainer and sampler take turns on the
    GPU; "serve": the sampler has one GPU more, of the same kind."""

    gpu: str
    vllm_mode: Literal["colocate", "serve"] = "colocate"

    def check(self, job: Job) -> None:
        _, count = _gpu(self.gpu, "gpu")
        if self.vllm_mode not in ("colocate", "serve"):
            raise BadRequest(f"vllm_mode is {self.vllm_mode!r}; expected 'colocate' or 'serve'")
        if self.vllm_mode == "colocate" and count > 1:
            raise BadRequest(
                f"gpu is {self.gpu!r} and vllm_mode 'colocate', which takes turns on one GPU; "
                "expected one, or 'serve'"
            )

    def stack(self, packages: tuple[str, ...] = ()) -> Address:
        kind, count = _gpu(self.gpu, "gpu")
        gpus = f"{kind}:{count + 1}" if self.vllm_mode == "serve" else kind
        return _on_modal({"HONE_MODAL_TRAINER_GPU": gpus}, packages, "--trial")


@dataclass(frozen=True)
class Distributed(Mode):
    """Each service on Modal separately: `actor` are the trainer's GPUs, `rollout` the GPUs of each
    of `num_rollout_workers` samplers."""

    actor: str
    rollout: str
    num_rollout_workers: int = 2

    def check(self, job: Job) -> None:
        _gpu(self.actor, "actor")
        _gpu(self.rollout, "rollout")
        workers: Any = self.num_rollout_workers
        if type(workers) is not int or workers < 1:
            raise BadRequest(
                f"num_rollout_workers is {elide(workers)}; expected a whole number from 1 on"
            )

    def stack(self, packages: tuple[str, ...] = ()) -> Address:
        settings = {
            "HONE_MODAL_TRAINER_GPU": self.actor,
            "HONE_MODAL_ROLLOUT_GPU": self.rollout,
            "HONE_MODAL_ROLLOUTS": str(self.num_rollout_workers),
        }
        return _on_modal(settings, packages)


def _gpu(text: Any, what: str) -> tuple[str, int]:
    kind, _, count = str(text).partition(":")
    if not (isinstance(text, str) and kind and re.fullmatch(r"([1-9]\d*)?", count)):
        raise BadRequest(f"{what} is {elide(text)}; expected {GPUS}")
    return kind, int(count or 1)


def _on_modal(settings: dict[str, str], packages: tuple[str, ...], *arguments: str) -> Address:
    """Deploys to Modal, and returns where the jobs API is. Doing it again changes what differs."""
    from shared.settings import load_settings

    if packages:
        settings |= {"HONE_SANDBOX_PACKAGES": ",".join(packages)}
    ended = stack.run_modal_action(
        "up", *arguments, output="json", settings=settings, stdout=subprocess.PIPE
    )
    if ended.returncode:
        raise Unavailable(
            f"the deployment to Modal ended with exit code {ended.returncode}; its messages are "
            "above, and docs/modal.md says what it needs"
        )
    return Address(json.loads(ended.stdout)["url"], load_settings().bearer())
