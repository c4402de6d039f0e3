"""Uploaded files, each in a folder of its own, which is complete or absent:

    <runs_dir>/.files/file-<24 hex>/file.json    what it is, as `GET /v1/files/{id}` shows it
                                    content.csv  its bytes, with the extension of its name
                                    by.<name>    empty: the name of the API key that uploaded it
                      .lock-file-<24 hex>        locked by who stores or removes that file

Orchestrators that share `runs_dir` share them.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import shutil
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from services.orchestrator.writable import kept_secret, writing
from shared.errors import BadRequest, Conflict, NotFound, TooLarge
from shared.host import disk
from shared.host.logs import get_logger
from shared.http import codec
from shared.job import UPLOADED
from shared.wire import Purpose, UploadedFile

ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
"""Suffixes of the files that a job can read."""

LOCK = ".files.lock"
"""The file that is locked while space for an upload is reserved. It is beside the folder of
files."""

GIB = 1 << 30

BLOCK_BYTES = 1 << 20

REMOVE_SOME = "remove some by DELETE /v1/files/{id}"

OWNER = "by."
"""Prefix of the name of an empty file. The rest is the API key that uploaded the file beside it."""

UNFINISHED, REMOVED = ".file-", ".removed-"
"""Prefixes of folders that are being written, and of folders that are being removed."""

LEFT_S = 3600.0
"""Seconds without a write after which such a folder counts as left by a crash."""


@dataclass(frozen=True)
class Quota:
    """The limits on all files together."""

    max_files: int
    max_gib: float

    def check(self, num_files: int, size_bytes: int, new_bytes: int) -> None:
        """Raises TooLarge if one more file of `new_bytes` would exceed the limits."""
        if num_files >= self.max_files:
            raise TooLarge(
                f"there are {num_files} uploaded files; expected at most {self.max_files}: "
                f"{REMOVE_SOME}"
            )
        if size_bytes + new_bytes > self.max_gib * GIB:
            raise TooLarge(
                f"a file of {new_bytes} bytes beside {num_files} uploaded ones of {size_bytes} "
                f"bytes, those under way included; expected at most {int(self.max_gib * GIB)} "
                f"bytes in all (setting HONE_MAX_FILES_GIB): {REMOVE_SOME}, or raise it"
            )

    def check_share(self, by: str, num_files: int, size_bytes: int, new_bytes: int) -> None:
        """Raises TooLarge if the files of an API key would exceed these limits. They are what is
        left for all keys, so one takes at most half of the total, and two a third each."""
        if num_files >= self.max_files or size_bytes + new_bytes > self.max_gib * GIB:
            raise TooLarge(
                f"a file of {new_bytes} bytes beside {num_files} of {size_bytes} bytes that API "
                f"key {by!r} uploaded; expected at most as many as are left for all: "
                f"{self.max_files} files and {int(self.max_gib * GIB)} bytes (setting "
                f"HONE_MAX_FILES_GIB): {REMOVE_SOME}"
            )


class Uploads:
    """The files below `runs_dir`, within `quota`, if there is one."""

    def __init__(self, runs_dir: Path, quota: Quota | None = None) -> None:
        self._root = runs_dir / ".files"
        self._quota = quota

    @contextlib.contextmanager
    def alone_with(self, id: str) -> Generator[None]:
        """Locks the file of this id against storing and removing by any orchestrator. Raises
        NotFound for an invalid id, Busy if the lock stays taken, Failed if the disk refuses the
        lock."""
        lock = self._folder(id).with_name(f".lock-{id}")
        with contextlib.ExitStack() as held:
            with writing("folder", self._root):
                disk.make_folder(self._root)
                held.enter_context(disk.locked(lock))
            held.callback(lock.unlink, missing_ok=True)
            yield

    def secret(self) -> bytes:
        """Returns the secret that `new_id` uses for this folder of runs."""
        return kept_secret(self._root.parent / ".keys" / "files.secret")

    def add(
        self, content: BinaryIO, filename: str, purpose: Purpose, id: str, by: str = ""
    ) -> UploadedFile:
        """Stores a file under this id (`new_id`) for the API key `by`, "" for HONE_TOKEN; it is on
        disk when this returns. Call it within `alone_with`. An existing file is kept. Raises
        Conflict if that has other content, BadRequest for an empty file, TooLarge beyond the quota,
        Busy if a lock stays taken, Failed if the disk refuses it."""
        size = _size_of(content)
        if not size:
            raise BadRequest(f"the file {filename!r} is empty; expected at least one row")
        made = UploadedFile(
            id=id,
            bytes=size,
            created_at=int(time.time()),
            filename=filename,
            purpose=purpose,
        )
        with writing("folder", self._root):
            if self._folder(id).exists():
                return self._same(made, content)
            disk.make_folder(self._root)
            aside = self._reserve(made, by)
            try:
                return self._written(aside, made, content)
            finally:
                shutil.rmtree(aside, ignore_errors=True)

    def get(self, id: str) -> UploadedFile:
        """Raises NotFound."""
        try:
            return codec.decode_tolerantly(UploadedFile, self.described_in(id).read_bytes())
        except FileNotFoundError as error:
            raise _no_file(id) from error

    def described_in(self, id: str) -> Path:
        """Returns the path of a file's description, which exists as long as the file."""
        return self._folder(id) / "file.json"

    def path_of(self, file: UploadedFile) -> Path:
        """Returns the path of a file's bytes; the file may be removed by now."""
        return self._folder(file.id) / _content_name(file.filename)

    def list(self) -> list[UploadedFile]:
        """Returns all files, oldest first."""
        ids = [path.name for path in self._root.glob("file-*")]
        files: list[UploadedFile] = []
        for id in ids:
            with contextlib.suppress(NotFound):  # removed since
                files.append(self.get(id))
        return sorted(files, key=lambda file: (file.created_at, file.id))

    def remove(self, id: str) -> None:
        """Removes the file. Call it within `alone_with`. Raises NotFound."""
        folder = self._folder(id)
        aside = self._root / f"{REMOVED}{id}.{secrets.token_hex(4)}"
        with writing("folder", self._root):
            try:
                folder.rename(aside)
            except FileNotFoundError as error:
                raise _no_file(id) from error
            disk.flush(self._root)
            shutil.rmtree(aside, ignore_errors=True)

    def _reserve(self, made: UploadedFile, by: str) -> Path:
        """Reserves space: returns a folder aside with a file of the full size, which counts from
        now on. Raises TooLarge."""
        for left in self._root.glob(f".{made.id}.*"):
            # left by a crash: this process holds the lock of the file's id
            shutil.rmtree(left, ignore_errors=True)
        aside = self._root / f".{made.id}.{secrets.token_hex(4)}"
        with disk.locked(self._root.parent / LOCK):
            self._sweep()
            self._check_limits(made, by)
            aside.mkdir()
            (aside / f"{OWNER}{by}").touch()
            with (aside / _content_name(made.filename)).open("xb") as file:
                file.truncate(made.bytes)
        return aside

    def _written(self, aside: Path, made: UploadedFile, content: BinaryIO) -> UploadedFile:
        path = aside / _content_name(made.filename)
        with path.open("r+b") as file:
            shutil.copyfileobj(content, file, BLOCK_BYTES)
            file.flush()
            os.fsync(file.fileno())
        disk.write_file(aside / "file.json", codec.encode(made))
        aside.rename(self._root / made.id)
        disk.flush(self._root)
        return made

    def _check_limits(self, made: UploadedFile, by: str) -> None:
        """Raises TooLarge if the file would exceed the quota of all files, uploads in progress
        included, or the share of its API key."""
        if self._quota is None:
            return
        # first: else an upload that ends between the two is missed
        under_way = [*self._root.glob(f"{UNFINISHED}*")]
        files = [_size_and_key(folder) for folder in (*under_way, *self._root.glob("file-*"))]
        sizes, own = [size for size, _ in files], [size for size, key in files if key == by]
        self._quota.check(len(sizes), sum(sizes), made.bytes)
        if by:
            left = Quota(self._quota.max_files - len(sizes), self._quota.max_gib - sum(sizes) / GIB)
            left.check_share(by, len(own), sum(own), made.bytes)

    def _same(self, made: UploadedFile, content: BinaryIO) -> UploadedFile:
        """Returns the file that is stored under the same key already."""
        stored = self.get(made.id)
        again = made.model_copy(update={"created_at": stored.created_at})
        if again != stored or not _has_bytes(self.path_of(stored), content):
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
        """Removes folders that a crash left half written or half removed."""
        for folder in (*self._root.glob(f"{UNFINISHED}*"), *self._root.glob(f"{REMOVED}*")):
            with contextlib.suppress(FileNotFoundError):
                written_at = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
                if time.time() - written_at > LEFT_S:
                    shutil.rmtree(folder, ignore_errors=True)
                    get_logger().info("unfinished upload removed", folder=folder.name)


def new_id(key: str | None, secret: bytes = b"") -> str:
    """Returns the id for an upload; the same idempotency key and secret always give the same id.
    The id is enough to read the file, so a guess of the idempotency key must not reveal it."""
    if key:
        return f"file-{hmac.new(secret, key.encode(), hashlib.sha256).hexdigest()[:24]}"
    return f"file-{secrets.token_hex(12)}"


def _size_of(content: BinaryIO) -> int:
    at = content.tell()
    size = content.seek(0, os.SEEK_END)
    content.seek(at)
    return size - at


def _size_and_key(folder: Path) -> tuple[int, str]:
    """Returns the size of a file in bytes, 0 if it was removed since, and the API key that uploaded
    it: "" for HONE_TOKEN."""
    size, key = 0, ""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            if entry.name.startswith("content"):
                size += entry.stat().st_size
            elif entry.name.startswith(OWNER):
                key = entry.name.removeprefix(OWNER)
    return size, key


def _has_bytes(path: Path, content: BinaryIO) -> bool:
    """Returns whether the content, from its present position on, equals the file's."""
    with path.open("rb") as file:
        while (block := file.read(BLOCK_BYTES)) == content.read(BLOCK_BYTES):
            if not block:
                return True
    return False


def _content_name(filename: str) -> str:
    ending = Path(filename).suffix.lower()
    return "content" + (ending if ending in ENDINGS else "")


def _no_file(id: str) -> NotFound:
    return NotFound(f"no uploaded file {id!r}; GET /v1/files lists them")
