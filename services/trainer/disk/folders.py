"""Folders that are complete or absent, for published weights and checkpoints: written aside, then
renamed; renamed, then removed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import secrets
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from shared.errors import Failed
from shared.host import disk

ASIDE = ".tmp-"
"""The beginning of the name of a folder that is being written or removed. If no process works on
the folder, it is left over."""


@contextlib.contextmanager
def write_atomically(target: Path, size_bytes: int, *, durable: bool) -> Iterator[Path]:
    """Yields an empty folder, which replaces `target` at the end; after an error nothing of it is
    left. Several writers of the same target have a folder each: a trainer that is superseded while
    it writes continues until it is done.

    `size_bytes` is what will be written, checked against the free space first. `durable` waits for
    the disk. Raises Failed with the path, what was needed and what there was.
    """
    aside = _aside(target)
    try:
        disk.make_folder(aside.parent)
        free_bytes = shutil.disk_usage(aside.parent).free
        if free_bytes < size_bytes:
            raise _disk_full(target, size_bytes, free_bytes)
        aside.mkdir()
        yield aside
        if durable:
            for path in (*aside.rglob("*"), aside):
                disk.flush(path)
        discard(target)
        aside.replace(target)
        if durable:
            disk.flush(target.parent)
    except (OSError, SafetensorError) as error:
        if getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error):
            raise _disk_full(target, size_bytes, shutil.disk_usage(aside.parent).free) from error
        raise Failed(f"cannot write {str(target)!r}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def discard(folder: Path) -> None:
    """Removes `folder`, if it exists. It is renamed first, so readers never see half of it."""
    aside = _aside(folder)
    with contextlib.suppress(FileNotFoundError):
        folder.replace(aside)
    shutil.rmtree(aside, ignore_errors=True)


def reuse(spare: Path, folder: Path) -> None:
    """Moves the weight files of `spare`, if it exists, into `folder`, to be written over, and
    removes the rest of it. A file that a process still reads or maps is removed too, and that
    process continues with the old content. A file is moved before it is checked, so that no process
    can open it by its old name after the check."""
    for file in spare.glob("*.safetensors"):
        moved = file.rename(folder / file.name)
        if not _is_unused(moved):
            moved.unlink()
    shutil.rmtree(spare, ignore_errors=True)


def _is_unused(file: Path) -> bool:
    """Returns whether no process has the file open: only then the kernel grants a write lease on it
    (fcntl(2), F_SETLEASE). If another process opens the file during the lease, the kernel sends
    this process a signal: SIGURG, which does nothing, instead of SIGIO, which would end it."""
    with file.open("r+b") as stream:
        try:
            fcntl.fcntl(stream, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(stream, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(stream, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
    return True


def sweep(folder: Path) -> None:
    """Removes the unfinished folders of killed processes in `folder`. Only a superseded process may
    still write there: its folder is moved away first, and its write fails."""
    for leftover in folder.glob(ASIDE + "*") if folder.is_dir() else ():
        discard(leftover)


def files_in(folder: Path) -> list[Path]:
    """Returns the files in `folder` and below, in the order of their names."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def size_of(folder: Path) -> int:
    """Returns the bytes of the files in `folder` and below."""
    return sum(file.stat().st_size for file in files_in(folder))


def _aside(folder: Path) -> Path:
    return folder.parent / f"{ASIDE}{folder.name}.{secrets.token_hex(4)}"


def _disk_full(target: Path, size_bytes: int, free_bytes: int) -> Failed:
    return Failed(
        f"no space to write {str(target)!r}: about {size_bytes} bytes are needed and {free_bytes} "
        "are free; "
        "free some space, or point HONE_RUNS_DIR or HONE_SHM_DIR elsewhere",
        code="disk_full",
    )
