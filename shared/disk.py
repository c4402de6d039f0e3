"""Files that are complete or absent, also after a power cut: written aside, flushed, renamed, and
the folder flushed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Generator
from pathlib import Path

Data = bytes | memoryview

NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS})
"""How file systems without hard links, some network volumes, answer."""


def write_file(path: Path, data: Data) -> None:
    """Writes the file, in place of what is there."""
    with _aside(path, data) as aside:
        aside.replace(path)
    flush(path.parent)


def create_file(path: Path, data: Data) -> None:
    """Writes the file; raises FileExistsError, and changes nothing, if it is there already. Where
    there are no hard links, of two writers at the same instant the later one wins."""
    with _aside(path, data) as aside:
        try:
            path.hardlink_to(aside)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
            aside.replace(path)
    flush(path.parent)


def make_folder(path: Path) -> None:
    """Makes the folder and those above it that are missing."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        flush(folder.parent)


def flush(path: Path) -> None:
    """Waits until a file's content, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _aside(path: Path, data: Data) -> Generator[Path]:
    """Yields a hidden file beside `path` that holds the data on disk; it is removed at the end."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with aside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield aside
    finally:
        aside.unlink(missing_ok=True)
