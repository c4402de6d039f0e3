"""Published weights: one folder a version, which vLLM loads in place.

    shm    <shm_dir>/<job>/v<version>/                 shared memory, for a sampler on this host
    disk   <runs_dir>/<job>/weights/v<version>/        a shared volume; `latest` beside it holds the newest folder's name

Each holds one `model.safetensors` in the trainer's dtype under Hugging Face names (tied weights
once) and `config.json`. A folder is complete or absent. The last two published stay: a sampler may
still be reading the one before.

With LoRA they are the merged weights. Left out: the methods that move weights without files (ipc,
nccl, delta), and adapters apart.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast

from services.trainer.disk.folders import ASIDE, written_aside
from shared import digest
from shared.config import Settings
from shared.errors import BadRequest
from shared.wire import FolderWeights, PublishRequest

KEEP_VERSIONS = 2

Method = Literal["shm", "disk"]


class Publisher:
    """The published weights of one job. Only rank 0 has one: it writes what all ranks gather."""

    def __init__(self, settings: Settings, job_id: str) -> None:
        self._job_id = job_id
        self._folders: dict[Method, Path] = {
            "shm": settings.shm_dir / job_id,
            "disk": settings.runs_dir.resolve() / job_id / "weights",
        }
        self._published: dict[Method, list[FolderWeights]] = {"shm": [], "disk": []}
        self.close()

    def publish(
        self, request: PublishRequest, size_bytes: int, save: Callable[[Path], None]
    ) -> FolderWeights:
        """Returns the reference of the version, written by `save(folder)` unless it is published
        already. Raises BadRequest for a method that is not there."""
        version, method = request.version, cast(Method, request.method)
        if method not in self._folders:
            raise BadRequest(f"got method {method!r}, expected one of {sorted(self._folders)}")
        for ref in self._published[method]:
            if ref.version == version:
                return ref.model_copy(update={"attempt": request.attempt, "epoch": request.epoch})
        folder = self._folders[method] / f"v{version}"
        with written_aside(folder, size_bytes, durable=method == "disk") as aside:
            save(aside)
            tensors = digest.tensor_digests(digest.stored_tensors(aside))
            ref = FolderWeights(
                job_id=self._job_id,
                attempt=request.attempt,
                epoch=request.epoch,
                version=version,
                method=method,
                path=str(folder),
                digest=digest.digest(tensors),
                tensors=tensors,
                size_bytes=sum(file.stat().st_size for file in aside.glob("*.safetensors")),
            )
        if method == "disk":
            _point(folder.parent / "latest", folder.name)
        self._published[method] = [*self._published[method], ref][-KEEP_VERSIONS:]
        self._forget_old(method)
        return ref

    def close(self) -> None:
        """Frees the shared memory of this job, whoever wrote it: an earlier life of this process
        may have been killed."""
        shutil.rmtree(self._folders["shm"], ignore_errors=True)
        self._published["shm"] = []

    def _forget_old(self, method: Method) -> None:
        kept = {Path(ref.path).name for ref in self._published[method]}
        for folder in self._folders[method].iterdir():
            if folder.is_dir() and folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)


def _point(pointer: Path, name: str) -> None:
    aside = pointer.with_name(ASIDE + pointer.name)
    aside.write_text(name + "\n", encoding="utf-8")
    aside.replace(pointer)
