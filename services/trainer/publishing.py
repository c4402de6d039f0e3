"""Publishes a job's weights: brings a version to a place from which samplers load it.

    shm      <shm_dir>/<job>/v<version>/            shared memory, for a sampler on this host
    http     the same files, fetched by GET /weights/<job>/v<version>/<file>
    delta    the changes since earlier versions, fetched likewise (`Deltas`)
    lora     <shm_dir>/<job>/a<version>/            the adapter alone; samplers that do not see the
                                                    folder fetch it
             <runs_dir>/<job>/snapshots/s<number>/  an adapter that is kept: a snapshot
    disk     <runs_dir>/<job>/weights/v<version>/   a shared volume; the file `latest` beside it
                                                    names the newest folder
    reload   as disk; the sampler frees its engine's memory before it loads
    restart  as disk; the sampler loads by a new engine
    nccl     sent from device to device, without files (services/trainer/transfer.py)
    ipc      read by the sampler in the GPU's memory, without files (the same)

`METHODS` has a row for each method; a new method is a row and its function. For a job with LoRA the
weights are the merged ones, except for "lora".
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from services.trainer.disk.folders import ASIDE, reuse, size_of, write_atomically
from shared.errors import Failed, NotFound
from shared.host.disk import run_for_volume, write_file
from shared.job import JOB_ID, SyncMethod
from shared.settings import Settings
from shared.weights import delta, folders
from shared.weights.folders import (
    CONFIG,
    FILES,
    SNAPSHOT,
    SNAPSHOTS,
    StoredTensor,
    adapter_digests,
    stored_tensors,
)
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
"""How many versions are kept: a sampler may still be reading the version before the newest."""

SPARE = ASIDE + "spare"

TRANSFER_S = 60.0
"""Seconds that trainer and sampler wait for each other while weights go from GPU to GPU ("nccl" and
"ipc"); then the version goes by "http". Longer than the largest model takes, but not much: sampling
waits meanwhile."""

Save = Callable[[Path], dict[str, str]]
"""Writes `*.safetensors` in the trainer's dtype under Hugging Face names (tied weights once) and
`config.json` into a folder; returns the digest of each tensor."""


def model_digests(folder: Path) -> dict[str, str]:
    return folders.tensor_digests(folders.stored_tensors(folder))


@dataclass(frozen=True)
class FolderKind:
    """A kind of published folders: the first letter of their names, how the digests of their
    tensors are computed, and which files count in their size. `has_spare`: see `Folders`."""

    letter: str
    digests: Callable[[Path], dict[str, str]]
    counted: str
    has_spare: bool = False


MODEL = FolderKind("v", model_digests, "*.safetensors", has_spare=True)
ADAPTER = FolderKind("a", adapter_digests, "*")


@dataclass(frozen=True)
class Digests:
    """The proof of a version, which a sampler compares: the digest of each tensor, and of all."""

    tensors: dict[str, str]
    size_bytes: int

    @property
    def digest(self) -> str:
        return folders.digest(self.tensors)

    def proof(self) -> dict[str, Any]:
        return {"digest": self.digest, "tensors": self.tensors, "size_bytes": self.size_bytes}


@dataclass(frozen=True)
class WrittenVersion(Digests):
    """A version in `folder`."""

    folder: Path
    kind: FolderKind

    def is_whole(self) -> bool:
        """Returns whether the files are unchanged since they were written."""
        try:
            return self.kind.digests(self.folder) == self.tensors
        except (OSError, Failed):
            return False


class Folders:
    """One folder for each version, complete or absent; the last `KEEP_VERSIONS` published stay.
    `durable`: on a disk, and flushed to it, instead of in memory. `commit` is the command that
    makes new files visible to other hosts.

    In memory an older version stays too, as `SPARE`, if the kind `has_spare`: the next version is
    written over its files, because new memory costs the kernel more time than the rest of a
    publish. This takes no more memory than writing a version does anyway."""

    def __init__(
        self,
        folder: Path,
        kind: FolderKind = MODEL,
        *,
        durable: bool = False,
        commit: str | None = None,
    ) -> None:
        self._folder = folder
        self._kind = kind
        self._durable = durable
        self._commit = commit
        self._written: dict[int, WrittenVersion] = {}

    def write(self, version: int, size_bytes: int, save: Save) -> WrittenVersion:
        """Returns the version. It is written unless it exists and is undamaged."""
        known = self._written.get(version)
        if known is None or not known.is_whole():
            known = self._write(version, size_bytes, save)
            run_for_volume(self._commit, "samplers cannot be shown the weights")
            self._written[version] = known
            self._forget_old()
        return known

    def newest_before(self, version: int) -> WrittenVersion | None:
        """Returns the undamaged version that was published last before this one."""
        before = [known for number, known in self._written.items() if number != version]
        return before[-1] if before and before[-1].is_whole() else None

    def free(self) -> None:
        """Frees memory that would outlive this process."""
        if not self._durable:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._written = {}

    def _write(self, version: int, size_bytes: int, save: Save) -> WrittenVersion:
        folder, spare = self._folder / f"{self._kind.letter}{version}", self._folder / SPARE
        spare_bytes = size_of(spare) if self._kind.has_spare else 0
        new_bytes = max(size_bytes - spare_bytes, 0)
        with write_atomically(folder, new_bytes, durable=self._durable) as aside:
            if self._kind.has_spare:
                reuse(spare, aside)
            tensors = save(aside)
            size_bytes = sum(file.stat().st_size for file in aside.glob(self._kind.counted))
        if self._durable:
            write_file(self._folder / "latest", f"{folder.name}\n".encode())
        return WrittenVersion(tensors, size_bytes, folder, self._kind)

    def _forget_old(self) -> None:
        self._written = dict(list(self._written.items())[-KEEP_VERSIONS:])
        kept = {written.folder.name for written in self._written.values()}
        for folder in self._folder.glob(f"{self._kind.letter}*"):
            if folder.name in kept:
                continue
            if self._durable or not self._kind.has_spare:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            spare = self._folder / SPARE
            shutil.rmtree(spare, ignore_errors=True)
            folder.rename(spare)


class Device:
    """The newest version on the device where it is trained. `live` returns its tensors by the
    checkpoint's names; they do not change until the next update. `host` is the address to send
    from."""

    def __init__(self, live: Callable[[], Mapping[str, Any]], host: str) -> None:
        self._live = live
        self._host = host
        self._sending: Any = None
        self._sealed: dict[int, Digests] = {}

    def tensors(self) -> dict[str, Any]:
        live = self._live()
        return {name: live[name] for name in sorted(live)}

    def sealed(self, version: int) -> Digests:
        """Returns the proof of the version, which is hashed once."""
        from services.trainer.transfer import digests

        if version not in self._sealed:
            live = self.tensors()
            size_bytes = sum(tensor.nbytes for tensor in live.values())
            self._sealed = {version: Digests(digests(live), size_bytes)}
        return self._sealed[version]

    def send(self) -> Any:
        """Begins to send the version to every sampler that asks, until `stop`, and returns the
        sender."""
        from services.trainer.transfer import Broadcast

        self.stop()
        self._sending = Broadcast(self.tensors(), self._host, TRANSFER_S)
        self._sending.start()
        return self._sending

    def stop(self, *, wait: bool = True) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.stop() if wait else sending.leave()


class Publisher:
    """The published weights of one job. Only rank 0 has a publisher, and writes tensors that all
    ranks gather. `live` returns the tensors on the device where they are trained. Its versions are
    in shared memory, with the changes between them, as adapters, on the shared volume, and on the
    device."""

    def __init__(
        self, settings: Settings, job_id: str, live: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        in_memory, on_volume = settings.shm_dir / job_id, volume_dir(settings.runs_dir, job_id)
        self.snapshots = snapshots_dir(settings.runs_dir, job_id)
        self.commit = settings.runs_commit
        self.memory = Folders(in_memory)
        self.deltas = Deltas(in_memory)
        self.adapters = Folders(in_memory, ADAPTER)
        self.volume = Folders(on_volume, durable=True, commit=settings.runs_commit)
        self.device = Device(live, settings.host)

    def publish(self, request: PublishRequest, size_bytes: int, save: Save) -> AnyWeights:
        """Returns the reference of the version. `save(folder)` writes it, if it goes as files and
        is not written already."""
        return METHODS[request.method](self, request, size_bytes, save)

    def stop_sending(self) -> None:
        """Returns once no sampler receives weights from the device. Then they may change."""
        self.device.stop()

    def close(self) -> None:
        """Frees the shared memory of this job, also what a killed process has left."""
        self.device.stop(wait=False)
        self.deltas.forget()
        self.adapters.free()
        self.memory.free()


Publish = Callable[[Publisher, PublishRequest, int, Save], AnyWeights]
"""Returns the reference of a version of about so many bytes. `Save` writes it, if it goes as files
and is not written already."""


def _common(request: PublishRequest) -> dict[str, Any]:
    """Returns the fields that a request and its reference share."""
    return request.model_dump(exclude={"snapshot"})


def publish_folder(place: Callable[[Publisher], Folders]) -> Publish:
    def publish(
        job: Publisher, request: PublishRequest, size_bytes: int, save: Save
    ) -> FolderWeights:
        written = place(job).write(request.version, size_bytes, save)
        return FolderWeights(**_common(request), **written.proof(), path=str(written.folder))

    return publish


def publish_http(
    job: Publisher, request: PublishRequest, size_bytes: int, save: Save
) -> HttpWeights:
    written = job.memory.write(request.version, size_bytes, save)
    return HttpWeights(
        **_common(request), **written.proof(), files=files_to_fetch(request.job_id, written)
    )


def publish_delta(
    job: Publisher, request: PublishRequest, size_bytes: int, save: Save
) -> DeltaWeights:
    base = job.memory.newest_before(request.version)
    whole = job.memory.write(request.version, size_bytes, save)
    if base is not None:
        ends = (base.folder, base.digest), (whole.folder, whole.digest)
        job.deltas.add(request.version, *ends, whole.size_bytes)
    steps = tuple(
        DeltaStep(
            base_digest=step.base_digest,
            digest=step.digest,
            file=_fetchable(request.job_id, step.file),
            num_changed=step.num_changed,
            num_elements=step.num_elements,
        )
        for step in job.deltas.leading_to(whole.digest)
    )
    files = files_to_fetch(request.job_id, whole)
    return DeltaWeights(**_common(request), **whole.proof(), files=files, steps=steps)


def publish_broadcast(
    job: Publisher, request: PublishRequest, _: int, __: Save
) -> BroadcastWeights:
    proof = job.device.sealed(request.version).proof()
    sending = job.device.send()
    return BroadcastWeights(
        **_common(request),
        **proof,
        deadline_s=TRANSFER_S,
        port=sending.port,
        key=sending.key,
        chunks=sending.layout,
    )


def publish_shared(job: Publisher, request: PublishRequest, _: int, __: Save) -> SharedWeights:
    from services.trainer.transfer import share

    gpu, tensors = share(job.device.tensors())
    return SharedWeights(
        **_common(request),
        **job.device.sealed(request.version).proof(),
        deadline_s=TRANSFER_S,
        gpu=gpu,
        shared=tensors,
    )


def publish_adapter(
    job: Publisher, request: PublishRequest, size_bytes: int, save: Save
) -> AdapterWeights:
    def saved(folder: Path) -> dict[str, str]:
        save(folder)
        return adapter_digests(folder)

    if request.snapshot is None:
        written = job.adapters.write(request.version, size_bytes, saved)
    else:
        written = _snapshot(job, request.snapshot, size_bytes, saved)
    return AdapterWeights(
        **_common(request),
        **written.proof(),
        path=str(written.folder),
        files=tuple(_fetchable(request.job_id, written.folder / name) for name in FILES),
        adapter=f"{request.job_id}/v{request.version}-{request.attempt}.{request.epoch}",
    )


def _snapshot(job: Publisher, number: int, size_bytes: int, save: Save) -> WrittenVersion:
    folder = job.snapshots / f"{SNAPSHOT}{number}"
    with write_atomically(folder, size_bytes, durable=True) as aside:
        tensors = save(aside)
    run_for_volume(job.commit, "samplers cannot be shown the snapshot")
    return WrittenVersion(tensors, size_of(folder), folder, ADAPTER)


shared_volume = publish_folder(lambda job: job.volume)

METHODS: dict[SyncMethod, Publish] = {
    "shm": publish_folder(lambda job: job.memory),
    "disk": shared_volume,
    "http": publish_http,
    "delta": publish_delta,
    "lora": publish_adapter,
    "reload": shared_volume,
    "restart": shared_volume,
    "nccl": publish_broadcast,
    "ipc": publish_shared,
}


def volume_dir(runs_dir: Path, job_id: str) -> Path:
    """Returns the folder of a job's versions on the shared volume."""
    return runs_dir.resolve() / job_id / "weights"


def snapshots_dir(runs_dir: Path, job_id: str) -> Path:
    return runs_dir.resolve() / job_id / SNAPSHOTS


def files_to_fetch(job_id: str, written: WrittenVersion) -> tuple[WeightFile, ...]:
    """Returns the version's files as `GET /weights` serves them."""
    files = sorted(written.folder.glob("*.safetensors"))
    return tuple(_fetchable(job_id, file) for file in files)


def published_file(settings: Settings, job_id: str, version: str, name: str) -> Path:
    """Returns the file behind `GET /weights/<job_id>/<version>/<name>`. Raises NotFound for
    anything but a file of a published version in shared memory, or of a snapshot."""
    is_snapshot = version.startswith(SNAPSHOT)
    of_job = snapshots_dir(settings.runs_dir, job_id) if is_snapshot else settings.shm_dir / job_id
    path = of_job / version / name
    plain = (
        re.fullmatch(JOB_ID, job_id)
        and re.fullmatch(r"[vdas]\d+", version)
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


# --- deltas ---------------------------------------------------------------------------------------


KEEP_STEPS = 4
"""The most versions that a sampler may miss and still catch up by deltas."""

MAX_SHARE = 0.5
"""The largest delta, as a share of the whole version. Instead of a larger one the whole is sent."""

MAX_THREADS = 8

DELTA_FILE = "delta.safetensors"


@dataclass(frozen=True)
class Delta:
    """The file with the change from the version of one digest to the next version."""

    file: Path
    base_digest: str
    digest: str
    num_changed: int
    num_elements: int


class Deltas:
    """The newest deltas of one job, in order; each is the change from one published version to the
    next:

        <shm_dir>/<job>/d<version>/delta.safetensors    a packed frame per tensor that changed

    Both versions are read from their published files. So a delta gives samplers exactly the weights
    of the whole version, and rounding errors do not accumulate.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps: list[Delta] = []

    def add(
        self, version: int, base: tuple[Path, str], whole: tuple[Path, str], size_bytes: int
    ) -> None:
        """Adds the step from `base` to `whole`, each a version's folder and digest, unless it is
        there already. If the delta would be too large, forgets all deltas, so that the whole
        version is sent."""
        (base_folder, base_digest), (whole_folder, digest) = base, whole
        if digest in (base_digest, self._end()):
            return
        if self._end() not in (None, base_digest):
            self.forget()
        target = self._folder / f"d{version}"
        with write_atomically(target, size_bytes, durable=False) as aside:
            num_changed, num_elements = write_delta(
                stored_tensors(base_folder), stored_tensors(whole_folder), aside / DELTA_FILE
            )
        file = target / DELTA_FILE
        if file.stat().st_size > MAX_SHARE * size_bytes:
            self.forget()
            shutil.rmtree(target, ignore_errors=True)
            return
        self._steps.append(Delta(file, base_digest, digest, num_changed, num_elements))
        for old in self._steps[:-KEEP_STEPS]:
            shutil.rmtree(old.file.parent, ignore_errors=True)
        self._steps = self._steps[-KEEP_STEPS:]

    def leading_to(self, digest: str) -> tuple[Delta, ...]:
        """Returns the deltas up to that version, oldest first; empty if it is sent whole."""
        return tuple(self._steps) if self._end() == digest else ()

    def forget(self) -> None:
        for step in self._steps:
            shutil.rmtree(step.file.parent, ignore_errors=True)
        self._steps = []

    def _end(self) -> str | None:
        return self._steps[-1].digest if self._steps else None


def write_delta(
    old: dict[str, StoredTensor], new: dict[str, StoredTensor], file: Path
) -> tuple[int, int]:
    """Writes the frames of the tensors that differ; returns how many elements do, of how many.
    Both versions are of one model: the same names, dtypes and shapes."""

    def frame(name: str) -> tuple[bytes, int, int]:
        new_N = _elements(new[name])
        return *delta.pack(_elements(old[name]), new_N), len(new_N)

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        frames = dict(zip(new, pool.map(frame, new), strict=True))
    packed = {
        name: np.frombuffer(data, np.uint8) for name, (data, count, _) in frames.items() if count
    }
    save_file(packed, file)
    return sum(c for _, c, _ in frames.values()), sum(n for _, _, n in frames.values())


def _elements(tensor: StoredTensor) -> delta.Array:
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.begin)
        return delta.elements(stream.read(tensor.size_bytes), tensor.dtype)
