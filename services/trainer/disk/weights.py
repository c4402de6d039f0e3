"""Published weights: how a version of a job gets to where samplers load it.

    shm    <shm_dir>/<job>/v<version>/            shared memory, for a sampler on this host
    disk   <runs_dir>/<job>/weights/v<version>/   a shared volume; `latest` beside it names the
                                                  newest folder

One entry per method in `METHODS`; a new method is one more entry and its class. With LoRA the
weights are the merged ones. Left out: the methods that move weights without files (ipc, nccl,
delta), and adapters apart.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from services.trainer.disk.folders import written_aside
from shared import digest
from shared.config import Settings
from shared.disk import write_file
from shared.errors import Failed
from shared.job import SyncMethod
from shared.wire import AnyWeights, FolderWeights, PublishRequest

KEEP_VERSIONS = 2
"""A sampler may still be reading the version before the newest."""

Save = Callable[[Path], None]
"""Writes `*.safetensors` in the trainer's dtype under Hugging Face names (tied weights once) and
`config.json` into a folder."""


class Method(Protocol):
    """One job's weights on one way to samplers."""

    def publish(self, request: PublishRequest, size_bytes: int, save: Save) -> AnyWeights:
        """Returns the reference of the version. One that is published already is not written
        again, unless it was damaged since."""
        ...

    def free(self) -> None:
        """Frees memory that would outlive this process."""
        ...


class Folders:
    """One folder per version, complete or absent; the last `KEEP_VERSIONS` published stay.
    `durable`: on a disk, and flushed to it, rather than in memory."""

    def __init__(self, folder: Path, *, durable: bool) -> None:
        self._folder = folder
        self._durable = durable
        self._published: dict[int, FolderWeights] = {}

    def publish(self, request: PublishRequest, size_bytes: int, save: Save) -> FolderWeights:
        known = self._published.get(request.version)
        if known is None or not _is_whole(known):
            known = self._write(request, size_bytes, save)
            self._published[request.version] = known
            self._forget_old()
        return known.model_copy(update={"attempt": request.attempt, "epoch": request.epoch})

    def free(self) -> None:
        if not self._durable:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._published = {}

    def _write(self, request: PublishRequest, size_bytes: int, save: Save) -> FolderWeights:
        folder = self._folder / f"v{request.version}"
        with written_aside(folder, size_bytes, durable=self._durable) as aside:
            save(aside)
            tensors = digest.tensor_digests(digest.stored_tensors(aside))
            size_bytes = sum(file.stat().st_size for file in aside.glob("*.safetensors"))
        if self._durable:
            write_file(self._folder / "latest", f"{folder.name}\n".encode())
        return FolderWeights(
            **request.model_dump(),
            path=str(folder),
            digest=digest.digest(tensors),
            tensors=tensors,
            size_bytes=size_bytes,
        )

    def _forget_old(self) -> None:
        newest = list(self._published.items())[-KEEP_VERSIONS:]
        self._published = dict(newest)
        kept = {Path(ref.path).name for ref in self._published.values()}
        for folder in self._folder.iterdir():
            if folder.is_dir() and folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)


def shared_memory(settings: Settings, job_id: str) -> Method:
    return Folders(settings.shm_dir / job_id, durable=False)


def shared_volume(settings: Settings, job_id: str) -> Method:
    return Folders(settings.runs_dir.resolve() / job_id / "weights", durable=True)


METHODS: dict[SyncMethod, Callable[[Settings, str], Method]] = {
    "shm": shared_memory,
    "disk": shared_volume,
}


class Publisher:
    """The published weights of one job. Only rank 0 has one: it writes what all ranks gather."""

    def __init__(self, settings: Settings, job_id: str) -> None:
        self._methods = {name: make(settings, job_id) for name, make in METHODS.items()}

    def publish(self, request: PublishRequest, size_bytes: int, save: Save) -> AnyWeights:
        """Returns the reference of the version, written by `save(folder)` unless it is published
        already."""
        return self._methods[request.method].publish(request, size_bytes, save)

    def close(self) -> None:
        """Frees the shared memory of this job, whoever wrote it: an earlier life of this process
        may have been killed."""
        for method in self._methods.values():
            method.free()


def _is_whole(ref: FolderWeights) -> bool:
    try:
        return digest.digest_of(Path(ref.path)) == ref.digest
    except (OSError, Failed):
        return False
