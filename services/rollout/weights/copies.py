"""The sampler's own copies of published versions, in a folder that only it writes into.

A transfer that was cut continues where it ended, also in a later call. Files come only from the
trainer of `HONE_TRAINER_URL`: a reference names a file and never a host, and redirects are not
followed.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from shared.errors import Failed, HoneError, Unavailable
from shared.http.client import Client
from shared.weights import delta
from shared.weights.folders import FILES, StoredTensor, check_regular, stored_tensors
from shared.wire import AdapterWeights, DeltaStep, DeltaWeights, HttpWeights, WeightFile


class Fetcher:
    """Fetches from the trainer at `url`. A trainer that sends nothing for `patience_s` seconds, in
    however many attempts, is Unavailable. Blocks: call it in a thread, so that the event loop of
    the engine does not wait for the disk."""

    def __init__(self, url: str, *, token: str | None = None, patience_s: float = 90.0) -> None:
        self._url = url
        self._token = token
        self._patience_s = patience_s

    def fetch(self, files: tuple[WeightFile, ...], folder: Path) -> int:
        """Downloads the files into `folder`, which it makes, and returns how many bytes it
        received. Raises Failed for files that no longer exist or are larger, and Unavailable where
        the transfer ends early: what came is kept, and the next call continues there."""
        folder.mkdir(parents=True, exist_ok=True)
        _check_space(files, folder)
        return asyncio.run(self._fetch(files, folder))

    async def _fetch(self, files: tuple[WeightFile, ...], folder: Path) -> int:
        async with Client("trainer", self._url, token=self._token) as trainer:
            received = [await self._file(trainer, file, folder / file.name) for file in files]
        return sum(received)

    async def _file(self, trainer: Client, file: WeightFile, target: Path) -> int:
        had_bytes = _size(target)
        target.touch()
        try:
            have_bytes = await trainer.download(
                file.path, target, file.size_bytes, patience_s=self._patience_s
            )
        except Unavailable as error:
            raise Unavailable(
                f"{error.detail}; is HONE_TRAINER_URL the trainer's address, seen from the "
                "sampler?",
                code=error.code,
            ) from error
        except HoneError as error:
            raise Failed(
                f"cannot fetch the weights from the trainer at {self._url}: {error.detail}",
                code="digest_differs",
            ) from error
        if have_bytes < file.size_bytes:
            raise Unavailable(
                f"the trainer at {self._url} ended {file.path} after {have_bytes} of "
                f"{file.size_bytes} bytes",
                code="unreachable",
            )
        if have_bytes > file.size_bytes:
            target.unlink()
            raise Failed(
                f"{file.path} has {have_bytes} bytes or more, expected {file.size_bytes}",
                code="digest_differs",
            )
        return have_bytes - had_bytes


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check_space(files: tuple[WeightFile, ...], folder: Path) -> None:
    needed_bytes = sum(file.size_bytes - _size(folder / file.name) for file in files)
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise Failed(
            f"no space to fetch weights into {str(folder)!r}: {needed_bytes} bytes are needed and "
            f"{free_bytes} are free; free some space, or point HONE_SHM_DIR elsewhere",
            code="disk_full",
        )


ADAPTERS = "adapters"
"""The folder of adapters, with a copy for each load."""

DELTAS = "deltas"
"""The folder of fetched deltas."""


@dataclass(frozen=True)
class Copy:
    """The files of a version that is not verified yet, and the bytes that came over the network."""

    folder: Path
    received_bytes: int


class Copies:
    """Copies of the whole version, at most one at a time, in a folder named by its digest, so that
    a transfer that was cut continues when the same version is fetched again. A verified version can
    be kept as the base of deltas. Adapters are small, and each has a copy until it is unloaded."""

    def __init__(self, folder: Path, fetcher: Fetcher) -> None:
        self._folder = folder
        self._fetcher = fetcher
        self._kept: tuple[str, Path] | None = None

    def clear(self) -> None:
        """Removes all copies, also copies of an earlier process of this sampler."""
        self._kept = None
        shutil.rmtree(self._folder, ignore_errors=True)

    async def fetched(self, ref: HttpWeights | DeltaWeights) -> Copy:
        """Fetches all files of the version from the trainer."""
        self._kept = None
        folder = self._folder / ref.digest[:32]
        return Copy(folder, await asyncio.to_thread(self._fetch, ref, folder))

    async def adapter(self, ref: AdapterWeights, source: Path | None) -> Copy:
        """Returns a new copy of the adapter's files, copied from `source` or fetched."""
        folder = self._folder / ADAPTERS / secrets.token_hex(8)
        if source is None:
            try:
                return Copy(folder, await asyncio.to_thread(self._fetcher.fetch, ref.files, folder))
            except BaseException:  # raised again; the next load has a folder of its own
                shutil.rmtree(folder, ignore_errors=True)
                raise
        try:
            await asyncio.to_thread(_copy, source, folder)
        except (OSError, Failed) as error:  # removed while it was read
            shutil.rmtree(folder, ignore_errors=True)
            raise Failed(
                f"adapter {ref.adapter!r} in {str(source)!r} cannot be read: {error}",
                code="digest_differs",
            ) from error
        return Copy(folder, 0)

    def keep(self, copy: Copy, digest: str) -> None:
        """Keeps a copy that was verified to have this digest."""
        self._kept = digest, copy.folder

    def remove(self, copy: Copy) -> None:
        shutil.rmtree(copy.folder, ignore_errors=True)

    def remove_adapters(self) -> None:
        """Removes the copies of all adapters. Call it when no engine holds them."""
        shutil.rmtree(self._folder / ADAPTERS, ignore_errors=True)

    def can_update(self, ref: DeltaWeights) -> bool:
        """Returns whether the kept copy is this version, or a version from which the reference's
        deltas lead to this one."""
        return self._kept is not None and self._steps(ref, self._kept[0]) is not None

    async def updated(self, ref: DeltaWeights) -> Copy:
        """Turns the kept copy into this version, in place, and returns it; it is no longer kept.
        Raises Failed for deltas that are missing or damaged, and may leave a broken copy."""
        assert self._kept is not None, "can_update"
        digest, folder = self._kept
        steps = self._steps(ref, digest) or ()
        received_bytes = await asyncio.to_thread(self._fetch_deltas, steps)
        self._kept = None
        made = self._folder / ref.digest[:32]
        await asyncio.to_thread(self._update, folder, made, steps)
        return Copy(made, received_bytes)

    @staticmethod
    def _steps(ref: DeltaWeights, digest: str) -> tuple[DeltaStep, ...] | None:
        """Returns the steps that lead from the version of this digest to `ref`, or None."""
        if digest == ref.digest:
            return ()
        for position, step in enumerate(ref.steps):
            if step.base_digest == digest:
                return ref.steps[position:]
        return None

    def _fetch(self, ref: HttpWeights | DeltaWeights, folder: Path) -> int:
        for other in self._folder.iterdir() if self._folder.is_dir() else ():
            if other != folder and other.name != ADAPTERS:
                shutil.rmtree(other, ignore_errors=True)
        return self._fetcher.fetch(ref.files, folder)

    def _fetch_deltas(self, steps: tuple[DeltaStep, ...]) -> int:
        return sum(self._fetcher.fetch((step.file,), self._delta(step)) for step in steps)

    def _update(self, folder: Path, made: Path, steps: tuple[DeltaStep, ...]) -> None:
        folder = folder.rename(made)
        for step in steps:
            update(stored_tensors(folder), stored_tensors(self._delta(step)))
        shutil.rmtree(self._folder / DELTAS, ignore_errors=True)

    def _delta(self, step: DeltaStep) -> Path:
        return self._folder / DELTAS / step.digest[:32]


def update(tensors: dict[str, StoredTensor], frames: dict[str, StoredTensor]) -> None:
    """Applies each frame to the tensor of its name, in its file. Raises Failed for a damaged
    frame, or a frame of an unknown tensor."""
    for name, frame in frames.items():
        if name not in tensors:
            raise Failed(f"a delta changes the tensor {name!r}, which the previous version lacks")
        tensor = tensors[name]
        data = bytearray(_read(tensor))
        try:
            delta.apply(_read(frame), delta.elements(data, tensor.dtype))
        except Failed as error:
            raise Failed(f"the delta of tensor {name!r}: {error.detail}") from error
        with tensor.file.open("r+b") as stream:
            stream.seek(tensor.begin)
            stream.write(data)


def _copy(source: Path, folder: Path) -> None:
    """Copies an adapter's files, and nothing else that is in `source`."""
    folder.mkdir(parents=True)
    for name in FILES:
        check_regular(source / name)
        shutil.copyfile(source / name, folder / name)


def _read(tensor: StoredTensor) -> bytes:
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.begin)
        return stream.read(tensor.size_bytes)
