"""Downloads a checkpoint's files from the orchestrator into a folder. An interrupted download
resumes, also in a later call: a file ends in `.part` until its checksum is right."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from pydantic import BaseModel

from shared.errors import BadRequest, Failed, Unavailable
from shared.http.client import Client
from shared.weights.folders import STATE, StoredFile
from shared.wire import CheckpointFile, CheckpointFiles

Progress = Callable[[str, int, int], None]
"""Called with a file's name, its bytes so far, and its size."""

PART = ".part"

PATIENCE_S = 60.0
"""Seconds without a new byte after which a download is given up."""

PAUSE_S = 1.0


class Downloaded(BaseModel):
    """The checkpoint of `step`, whose `files` are in `folder`."""

    step: int
    folder: Path
    files: tuple[CheckpointFile, ...]


async def download(
    client: Client,
    job_id: str,
    checkpoint: CheckpointFiles,
    folder: Path,
    progress: Progress,
    *,
    state: bool,
) -> Downloaded:
    """Puts the files of a job's checkpoint into `folder`; the training state only with `state`."""
    path = f"/v1/jobs/{job_id}/checkpoints/{checkpoint.step}/files"
    wanted = tuple(file for file in checkpoint if state or not file.name.startswith(f"{STATE}/"))
    await Download(client, path, folder, progress).all(wanted)
    return Downloaded(step=checkpoint.step, folder=folder, files=wanted)


class Download:
    """Files at `path` of the orchestrator, put into `folder`."""

    def __init__(self, client: Client, path: str, folder: Path, progress: Progress) -> None:
        self._client = client
        self._path = path
        self._folder = folder
        self._progress = progress

    async def all(self, files: Sequence[CheckpointFile]) -> None:
        """Downloads all files. Raises Failed if the disk refuses them or a file arrives damaged,
        and Unavailable if the orchestrator stays away."""
        for file in files:
            _check_name(file.name)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            missing = [file for file in files if not await asyncio.to_thread(self._is_there, file)]
            self._check_space(missing)
            for file in missing:
                await self._one(file)
        except OSError as error:
            raise Failed(
                f"{str(self._folder)!r} cannot be written: {error.strerror or error}; --to names "
                "another folder"
            ) from error

    def _is_there(self, file: CheckpointFile) -> bool:
        target = self._folder / file.name
        is_there = target.is_file() and _is_same(target, file)
        if is_there:
            self._progress(file.name, file.size_bytes, file.size_bytes)
        return is_there

    def _check_space(self, missing: Sequence[CheckpointFile]) -> None:
        needed_bytes = sum(file.size_bytes - _size(self._part(file)) for file in missing)
        free_bytes = shutil.disk_usage(self._folder).free
        if needed_bytes > free_bytes:
            raise Failed(
                f"no space in {str(self._folder)!r}: {needed_bytes} bytes are missing and "
                f"{free_bytes} are free; --to names another folder",
                code="disk_full",
            )

    async def _one(self, file: CheckpointFile) -> None:
        part = self._part(file)
        part.parent.mkdir(parents=True, exist_ok=True)
        if _size(part) > file.size_bytes:
            part.unlink()
        part.touch()
        heard_at = time.monotonic()
        while (have_bytes := _size(part)) < file.size_bytes:
            try:
                await self._attempt(file, part, have_bytes)
            except Unavailable:
                if _size(part) > have_bytes:
                    heard_at = time.monotonic()
                if time.monotonic() - heard_at > PATIENCE_S:
                    raise
                await asyncio.sleep(PAUSE_S)
            else:
                if _size(part) == have_bytes:
                    raise _differs(part, f"{file.name} ended after {have_bytes} bytes", file)
        if not await asyncio.to_thread(_is_same, part, file):
            raise _differs(part, f"{file.name} arrived with other bytes", file)
        part.replace(self._folder / file.name)

    async def _attempt(self, file: CheckpointFile, part: Path, have_bytes: int) -> None:
        """Appends the orchestrator's bytes, up to the file's end or to where the connection
        breaks."""
        path = f"{self._path}/{quote(file.name)}"
        with part.open("ab") as sink:
            async for piece in self._client.pieces(path, first_byte=have_bytes):
                sink.write(piece)
                have_bytes += len(piece)
                self._progress(file.name, have_bytes, file.size_bytes)
                if have_bytes > file.size_bytes:
                    return

    def _part(self, file: CheckpointFile) -> Path:
        return self._folder / (file.name + PART)


def _check_name(name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise BadRequest(f"the checkpoint has a file {name!r:.200}; expected one within its folder")


def _differs(part: Path, what: str, file: CheckpointFile) -> Failed:
    """Removes the partial file; returns the error."""
    part.unlink()
    return Failed(
        f"{what}; the checkpoint's has {file.size_bytes}, with the checksum {file.crc32:08x}; what "
        "arrived was removed: try again",
        code="digest_differs",
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_same(path: Path, file: CheckpointFile) -> bool:
    if path.stat().st_size != file.size_bytes:
        return False
    return StoredFile.of(path).crc32 == file.crc32
