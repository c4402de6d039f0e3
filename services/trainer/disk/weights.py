"""Published weights: how a version of a job gets to where samplers load it.

    shm      <shm_dir>/<job>/v<version>/            shared memory, for a sampler on this host
    http     the same files, fetched by GET /weights/<job>/v<version>/<file>
    delta    what changed since the versions before, fetched likewise (deltas.py)
    lora     <shm_dir>/<job>/a<version>/            the adapter alone (adapters.py), fetched by
                                                    samplers that do not see it
    disk     <runs_dir>/<job>/weights/v<version>/   a shared volume; `latest` beside it names the
                                                    newest folder
    reload   as disk, loaded after the engine's memory was freed
    restart  as disk, loaded by a new engine
    nccl     sent from device to device, without files (services/trainer/transfer)
    ipc      read by the sampler where they are on the GPU, without files (likewise)

One entry per method in `METHODS`; a new method is one more entry and its function. With LoRA the
weights are the merged ones, but for "lora".
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.trainer.disk.adapters import Adapters
from services.trainer.disk.deltas import Deltas
from services.trainer.disk.folders import ASIDE, reuse, size_of, written_aside
from shared.errors import Failed, NotFound
from shared.host.disk import run_for_volume, write_file
from shared.job import JOB_ID, SyncMethod
from shared.settings import Settings
from shared.weights import digest
from shared.weights.checkpoints import CONFIG, FILES
from shared.wire import (
    AdapterWeights,
    AnyWeights,
    BroadcastWeights,
    DeltaStep,
    DeltaWeights,
    FolderWeights,
    HttpWeights,
    PublishRequest,
    SharedWeights,
    WeightFile,
)

KEEP_VERSIONS = 2
"""A sampler may still be reading the version before the newest."""

SPARE = ASIDE + "spare"

Save = Callable[[Path], dict[str, str]]
"""Writes `*.safetensors` in the trainer's dtype under Hugging Face names (tied weights once) and
`config.json` into a folder; returns the digest of each tensor."""


@dataclass(frozen=True)
class Sealed:
    """What a sampler has to find of a version: the digest of each tensor, and of all."""

    tensors: dict[str, str]
    size_bytes: int

    @property
    def digest(self) -> str:
        return digest.digest(self.tensors)

    def proof(self) -> dict[str, Any]:
        return {"digest": self.digest, "tensors": self.tensors, "size_bytes": self.size_bytes}


@dataclass(frozen=True)
class Written(Sealed):
    """A version in `folder`."""

    folder: Path

    def is_whole(self) -> bool:
        """Returns whether the files still are what was written."""
        try:
            return digest.digest_of(self.folder) == self.digest
        except (OSError, Failed):
            return False


class Folders:
    """One folder per version, complete or absent; the last `KEEP_VERSIONS` published stay.
    `durable`: on a disk, and flushed to it, rather than in memory. `commit` is the command that
    shows other hosts what was written.

    In memory the one before those stays too, under the name `SPARE`: the next version is written
    over its files, for new memory takes the kernel longer than all the rest of a publish. That is
    no more than there is anyway while a version is written.
    """

    def __init__(self, folder: Path, *, durable: bool, commit: str | None = None) -> None:
        self._folder = folder
        self._durable = durable
        self._commit = commit
        self._written: dict[int, Written] = {}

    def write(self, version: int, size_bytes: int, save: Save) -> Written:
        """Returns the version, written unless it is there already and undamaged."""
        known = self._written.get(version)
        if known is None or not known.is_whole():
            known = self._write(version, size_bytes, save)
            run_for_volume(self._commit, "samplers cannot be shown the weights")
            self._written[version] = known
            self._forget_old()
        return known

    def newest_before(self, version: int) -> Written | None:
        """Returns the undamaged version that was published last before this one."""
        before = [known for number, known in self._written.items() if number != version]
        return before[-1] if before and before[-1].is_whole() else None

    def free(self) -> None:
        """Frees memory that would outlive this process."""
        if not self._durable:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._written = {}

    def _write(self, version: int, size_bytes: int, save: Save) -> Written:
        folder, spare = self._folder / f"v{version}", self._folder / SPARE
        new_bytes = max(size_bytes - size_of(spare), 0)
        with written_aside(folder, new_bytes, durable=self._durable) as aside:
            reuse(spare, aside)
            tensors = save(aside)
            size_bytes = sum(file.stat().st_size for file in aside.glob("*.safetensors"))
        if self._durable:
            write_file(self._folder / "latest", f"{folder.name}\n".encode())
        return Written(tensors, size_bytes, folder)

    def _forget_old(self) -> None:
        self._written = dict(list(self._written.items())[-KEEP_VERSIONS:])
        kept = {written.folder.name for written in self._written.values()}
        for folder in self._folder.glob("v*"):
            if folder.name in kept:
                continue
            spare = self._folder / SPARE
            shutil.rmtree(spare, ignore_errors=True)
            if self._durable:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                folder.rename(spare)


class Device:
    """The newest version where it is trained: `live` returns its tensors, by a checkpoint's names,
    which stay as they are until the next update. `host` is the address to send from."""

    def __init__(self, live: Callable[[], Mapping[str, Any]], host: str, deadline_s: float) -> None:
        self._live = live
        self._host = host
        self._sending: Any = None
        self._sealed: dict[int, Sealed] = {}
        self.deadline_s = deadline_s

    def tensors(self) -> dict[str, Any]:
        live = self._live()
        return {name: live[name] for name in sorted(live)}

    def sealed(self, version: int) -> Sealed:
        """Returns what the version is, hashed once."""
        from services.trainer.disk import tensor_file

        if version not in self._sealed:
            live = self.tensors()
            size_bytes = sum(tensor.nbytes for tensor in live.values())
            self._sealed = {version: Sealed(tensor_file.digests(live), size_bytes)}
        return self._sealed[version]

    def send(self) -> Any:
        """Returns what sends the version to whoever asks, until it is to stop."""
        from services.trainer.transfer.broadcast import Broadcast

        self.stop()
        self._sending = Broadcast(self.tensors(), self._host, self.deadline_s)
        self._sending.start()
        return self._sending

    def stop(self, *, wait: bool = True) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.stop() if wait else sending.leave()


@dataclass(frozen=True)
class Places:
    """Where one job's versions lie: in shared memory, as the changes between them, as adapters, on
    the shared volume, and on the device."""

    memory: Folders
    deltas: Deltas
    adapters: Adapters
    volume: Folders
    device: Device


Method = Callable[[Places, PublishRequest, int, Save], AnyWeights]
"""Returns the reference of the version, written by the `Save`, if it goes as files, unless it is
there already; the number is its size in bytes, about."""


def shared_memory(
    places: Places, request: PublishRequest, size_bytes: int, save: Save
) -> FolderWeights:
    return _folder(request, places.memory.write(request.version, size_bytes, save))


def shared_volume(
    places: Places, request: PublishRequest, size_bytes: int, save: Save
) -> FolderWeights:
    return _folder(request, places.volume.write(request.version, size_bytes, save))


def fetched(places: Places, request: PublishRequest, size_bytes: int, save: Save) -> HttpWeights:
    written = places.memory.write(request.version, size_bytes, save)
    return HttpWeights(
        **request.model_dump(), **written.proof(), files=files_to_fetch(request.job_id, written)
    )


def changes(places: Places, request: PublishRequest, size_bytes: int, save: Save) -> DeltaWeights:
    base = places.memory.newest_before(request.version)
    whole = places.memory.write(request.version, size_bytes, save)
    if base is not None:
        ends = (base.folder, base.digest), (whole.folder, whole.digest)
        places.deltas.add(request.version, *ends, whole.size_bytes)
    steps = tuple(
        DeltaStep(
            base_digest=step.base_digest,
            digest=step.digest,
            file=_fetchable(request.job_id, step.file),
            num_changed=step.num_changed,
            num_elements=step.num_elements,
        )
        for step in places.deltas.leading_to(whole.digest)
    )
    files = files_to_fetch(request.job_id, whole)
    return DeltaWeights(**request.model_dump(), **whole.proof(), files=files, steps=steps)


def broadcast(places: Places, request: PublishRequest, _: int, __: Save) -> BroadcastWeights:
    proof = places.device.sealed(request.version).proof()
    sending = places.device.send()
    return BroadcastWeights(
        **request.model_dump(),
        **proof,
        deadline_s=places.device.deadline_s,
        port=sending.port,
        key=sending.key,
        chunks=sending.layout,
    )


def shared(places: Places, request: PublishRequest, _: int, __: Save) -> SharedWeights:
    from services.trainer.transfer import sharing

    gpu, tensors = sharing.shared(places.device.tensors())
    return SharedWeights(
        **request.model_dump(),
        **places.device.sealed(request.version).proof(),
        deadline_s=places.device.deadline_s,
        gpu=gpu,
        shared=tensors,
    )


def adapter(places: Places, request: PublishRequest, size_bytes: int, save: Save) -> AdapterWeights:
    written = places.adapters.write(request.version, size_bytes, save)
    return AdapterWeights(
        **request.model_dump(),
        digest=digest.digest(written.tensors),
        tensors=written.tensors,
        size_bytes=written.size_bytes,
        path=str(written.folder),
        files=tuple(_fetchable(request.job_id, written.folder / name) for name in FILES),
        adapter=f"{request.job_id}/v{request.version}-{request.attempt}.{request.epoch}",
    )


METHODS: dict[SyncMethod, Method] = {
    "shm": shared_memory,
    "disk": shared_volume,
    "http": fetched,
    "delta": changes,
    "lora": adapter,
    "reload": shared_volume,
    "restart": shared_volume,
    "nccl": broadcast,
    "ipc": shared,
}


class Publisher:
    """The published weights of one job. Only rank 0 has one: it writes what all ranks gather.
    `live` returns the tensors where they are trained."""

    def __init__(
        self, settings: Settings, job_id: str, live: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        self._places = Places(
            memory=Folders(settings.shm_dir / job_id, durable=False),
            deltas=Deltas(settings.shm_dir / job_id),
            adapters=Adapters(settings.shm_dir / job_id),
            volume=Folders(
                volume_dir(settings.runs_dir, job_id),
                durable=True,
                commit=settings.runs_commit,
            ),
            device=Device(live, settings.host, settings.transfer_deadline_s),
        )

    def publish(self, request: PublishRequest, size_bytes: int, save: Save) -> AnyWeights:
        """Returns the reference of the version, written by `save(folder)` if it goes as files and
        is not published already."""
        return METHODS[request.method](self._places, request, size_bytes, save)

    def stop_sending(self) -> None:
        """Returns once no sampler reads the weights where they are trained. They may change
        then."""
        self._places.device.stop()

    def close(self) -> None:
        """Frees the shared memory of this job, whoever wrote it: an earlier life of this process
        may have been killed."""
        self._places.device.stop(wait=False)
        self._places.deltas.forget()
        self._places.adapters.forget()
        self._places.memory.free()


def volume_dir(runs_dir: Path, job_id: str) -> Path:
    """Returns where a job's versions lie on the shared volume."""
    return runs_dir.resolve() / job_id / "weights"


def files_to_fetch(job_id: str, written: Written) -> tuple[WeightFile, ...]:
    """Returns the version's files as `GET /weights` serves them."""
    files = sorted(written.folder.glob("*.safetensors"))
    return tuple(_fetchable(job_id, file) for file in files)


def published_file(settings: Settings, job_id: str, version: str, name: str) -> Path:
    """Returns the file behind `GET /weights/<job_id>/<version>/<name>`. Raises NotFound for
    anything but a file of a published version in shared memory."""
    path = settings.shm_dir / job_id / version / name
    plain = (
        re.fullmatch(JOB_ID, job_id)
        and re.fullmatch(r"[vda]\d+", version)
        and (name == CONFIG or re.fullmatch(r"[\w-][\w.-]*\.safetensors", name))
    )
    if not plain or path.is_symlink() or not path.is_file():
        raise NotFound(
            f"there is no file {name!r} of version {version!r} of job {job_id!r} to fetch; the "
            f"newest {KEEP_VERSIONS} versions are kept"
        )
    return path


def _fetchable(job_id: str, file: Path) -> WeightFile:
    path = f"/weights/{job_id}/{file.parent.name}/{file.name}"
    return WeightFile(path=path, size_bytes=file.stat().st_size)


def _folder(request: PublishRequest, written: Written) -> FolderWeights:
    return FolderWeights(**request.model_dump(), **written.proof(), path=str(written.folder))
