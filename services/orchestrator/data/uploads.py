"""The files that were uploaded, each in a folder of its own that is there whole or not at all:

    <runs_dir>/.files/file-<24 hex>/file.json    what it is, as `GET /v1/files/{id}` shows it
                                    content.csv  its bytes, with the ending of its name

Orchestrators that share `runs_dir` share them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from services.orchestrator.record.writing import writing
from shared import codec, disk
from shared.digest import digest_of_file
from shared.errors import BadRequest, Conflict, NotFound, TooLarge
from shared.job import UPLOADED
from shared.logs import get_logger
from shared.wire import Purpose, UploadedFile

ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
"""Of files that a job can read."""

LOCK = ".files.lock"
"""Beside the folder of files: whoever adds one has it locked."""

GIB = 1 << 30

REMOVE_SOME = "remove some by DELETE /v1/files/{id}, or raise it"

UNFINISHED = "."
"""What begins the name of a folder that is being written or removed."""

LEFT_S = 24 * 3600.0
"""Seconds after which such a folder is what a crash left."""


@dataclass(frozen=True)
class Quota:
    """What all files together may come to."""

    max_files: int
    max_gib: float

    def check(self, num_files: int, size_bytes: int, new_bytes: int) -> None:
        """Raises TooLarge if one more file, of so many bytes, would be too much beside those."""
        if num_files >= self.max_files:
            raise TooLarge(
                f"there are {num_files} uploaded files; expected at most {self.max_files} (setting "
                f"HONE_MAX_FILES): {REMOVE_SOME}"
            )
        if size_bytes + new_bytes > self.max_gib * GIB:
            raise TooLarge(
                f"a file of {new_bytes} bytes beside {num_files} uploaded ones of {size_bytes} "
                f"bytes; expected at most {int(self.max_gib * GIB)} bytes in all (setting "
                f"HONE_MAX_FILES_GIB): {REMOVE_SOME}"
            )


class Uploads:
    """The files below `runs_dir`; no more are taken than `quota` allows, if there is one."""

    def __init__(self, runs_dir: Path, quota: Quota | None = None) -> None:
        self._root = runs_dir / ".files"
        self._quota = quota

    def add(
        self, content: BinaryIO, filename: str, purpose: Purpose, key: str | None
    ) -> UploadedFile:
        """Stores a file, which is on disk when this returns. With an idempotency `key` it is stored
        once. Raises Conflict for a key that came with another file before, BadRequest for one
        without content, TooLarge beyond the quota, Failed if the disk cannot take it."""
        digest = hashlib.sha256(key.encode()).hexdigest()[:24] if key else secrets.token_hex(12)
        id = f"file-{digest}"
        with writing("folder", self._root):
            disk.make_folder(self._root)
            self._sweep()
            self._check_room(id, _size_of(content))
            aside = self._root / f"{UNFINISHED}{id}.{secrets.token_hex(4)}"
            aside.mkdir()
            try:
                return self._written(aside, id, content, filename, purpose)
            finally:
                shutil.rmtree(aside, ignore_errors=True)

    def get(self, id: str) -> UploadedFile:
        """Raises NotFound."""
        path = self._folder(id) / "file.json"
        try:
            return codec.decode_stored(UploadedFile, path.read_bytes())
        except FileNotFoundError as error:
            raise _no_file(id) from error

    def content(self, id: str) -> Path:
        """Returns the path of a file's bytes. Raises NotFound."""
        return self._folder(id) / _content_name(self.get(id).filename)

    def list(self) -> list[UploadedFile]:
        """Returns all files, oldest first."""
        ids = [path.name for path in self._root.glob("file-*")]
        found: list[UploadedFile] = []
        for id in ids:
            with contextlib.suppress(NotFound):  # removed since
                found.append(self.get(id))
        return sorted(found, key=lambda file: (file.created_at, file.id))

    def remove(self, id: str) -> None:
        """Raises NotFound."""
        folder = self._folder(id)
        aside = self._root / f"{UNFINISHED}{id}.{secrets.token_hex(4)}"
        with writing("folder", self._root):
            try:
                folder.rename(aside)
            except FileNotFoundError as error:
                raise _no_file(id) from error
            disk.flush(self._root)
            shutil.rmtree(aside, ignore_errors=True)

    def _written(
        self, aside: Path, id: str, content: BinaryIO, filename: str, purpose: Purpose
    ) -> UploadedFile:
        path = aside / _content_name(filename)
        with path.open("xb") as file:
            shutil.copyfileobj(content, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
        if not (size := path.stat().st_size):
            raise BadRequest(f"the file {filename!r} is empty; expected at least one row")
        made = UploadedFile(
            id=id, bytes=size, created_at=int(time.time()), filename=filename, purpose=purpose
        )
        disk.write_file(aside / "file.json", codec.encode(made))
        with self._alone():  # or two that fit one by one would both be taken
            self._check_room(id, size)
            try:
                aside.rename(self._root / id)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                return self._same(made, path)
        disk.flush(self._root)
        return made

    def _check_room(self, id: str, size: int) -> None:
        """Raises TooLarge if one more file of that size is too much, and this one is not there."""
        if self._quota is None or (self._root / id).exists():
            return
        sizes = [_content_size(folder) for folder in self._root.glob("file-*")]
        self._quota.check(len(sizes), sum(sizes), size)

    @contextlib.contextmanager
    def _alone(self) -> Generator[None]:
        """Lets no other upload, of any orchestrator, become a file meanwhile."""
        with (self._root.parent / LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _same(self, made: UploadedFile, path: Path) -> UploadedFile:
        """Returns the file that is stored under the same key already."""
        stored = self.get(made.id)
        again = made.model_copy(update={"created_at": stored.created_at})
        if again != stored or digest_of_file(path) != digest_of_file(self.content(made.id)):
            raise Conflict(
                f"the Idempotency-Key was used for file {made.id!r} ({stored.filename!r}, "
                f"{stored.bytes} bytes) with other content; use a new key",
                code="body_differs",
            )
        return stored

    def _folder(self, id: str) -> Path:
        if not UPLOADED.fullmatch(id):
            raise _no_file(id)
        return self._root / id

    def _sweep(self) -> None:
        """Removes what a crash left half written or half removed."""
        for folder in self._root.glob(f"{UNFINISHED}*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - folder.stat().st_mtime > LEFT_S:
                    shutil.rmtree(folder, ignore_errors=True)
                    get_logger().info("unfinished upload removed", folder=folder.name)


def _size_of(content: BinaryIO) -> int:
    at = content.tell()
    size = content.seek(0, os.SEEK_END)
    content.seek(at)
    return size - at


def _content_size(folder: Path) -> int:
    """Returns the bytes of a file; 0 for one that was removed since."""
    with contextlib.suppress(FileNotFoundError):
        return sum(file.stat().st_size for file in folder.glob("content*"))
    return 0


def _content_name(filename: str) -> str:
    ending = Path(filename).suffix.lower()
    return "content" + (ending if ending in ENDINGS else "")


def _no_file(id: str) -> NotFound:
    return NotFound(f"no uploaded file {id!r}; GET /v1/files lists them")
