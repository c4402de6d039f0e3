"""How weights get from trainer to samplers: the methods, and in what they differ for a job. Each
method is a row here, a publisher in METHODS of services/trainer/disk/weights.py, a loader in
LOADERS of services/rollout/weights/methods.py, and the `method` of a reference in
shared/wire/weights.py. When `weight_sync` is "auto", services/orchestrator/samplers/syncing.py says
which methods are tried, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SyncMethod = Literal["shm", "disk", "http", "delta", "lora", "reload", "restart", "nccl", "ipc"]

SyncChoice = Literal["auto", SyncMethod]


@dataclass(frozen=True)
class SyncTraits:
    """`published_again`: how a version is published that no sampler loaded; None: in the same way.
    `loaded_again`: how a sampler that failed loads the files of a version again; None: in the
    same way. `is_given_up`: the job does not go this way again once it failed.

    `is_live`: weights are taken where they are trained, without files, by the samplers that are up.
    `is_adapter`: only an adapter goes, and it is loaded beside the model's weights.
    `ends_requests`: loading a version ends what the sampler's engine samples."""

    published_again: SyncMethod | None = None
    loaded_again: SyncMethod | None = None
    is_given_up: bool = False
    is_live: bool = False
    is_adapter: bool = False
    ends_requests: bool = False


SYNC_METHODS: dict[SyncChoice, SyncTraits] = {
    "auto": SyncTraits(),
    "shm": SyncTraits(),
    "disk": SyncTraits(published_again="restart", loaded_again="restart"),
    "http": SyncTraits(),
    "delta": SyncTraits(),
    # after an adapter the merged weights
    "lora": SyncTraits(published_again="http", is_given_up=True, is_adapter=True),
    "reload": SyncTraits(published_again="restart", loaded_again="restart", ends_requests=True),
    "restart": SyncTraits(ends_requests=True),
    "nccl": SyncTraits(published_again="http", is_given_up=True, is_live=True),
    "ipc": SyncTraits(published_again="http", is_given_up=True, is_live=True),
}
