"""Checks whether the folder of runs can be written, and names errors of writing to a full or
read-only disk."""

from __future__ import annotations

import contextlib
import errno
import secrets
import shutil
from collections.abc import Callable, Generator
from pathlib import Path

from shared.errors import Failed, Unavailable
from shared.host import disk
from shared.host.processes import BoundedProbe

ANSWERS_WITHIN_S = 3.0
"""Seconds for writing a small file. A network volume that is unreachable blocks a write as long as
it is unreachable; a probe of /readyz waits for 5 s."""

MIN_FREE_BYTES = 16 << 20
"""A disk with less is full: a step's batch may need more."""


@contextlib.contextmanager
def writing(what: str, path: Path) -> Generator[None]:
    """Raises Failed with the remedy if the disk refuses a write in the block; messages call `path`
    `what`. A full disk has the code "disk_full"."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            existing = next(each for each in (path, *path.parents) if each.exists())
            free_mib = shutil.disk_usage(existing).free >> 20
            raise Failed(
                f"the disk of {what} {str(path)!r} is full ({free_mib} MiB free); free some space",
                code="disk_full",
            ) from error
        raise Failed(
            f"cannot write to {what} {str(path)!r}: {error.strerror or error}; check HONE_RUNS_DIR"
        ) from error


def kept_secret(path: Path) -> bytes:
    """Returns the random secret in this file, which the first call makes. Orchestrators that share
    the folder have the same. Raises Failed if the disk refuses it."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    with writing("folder", path.parent):
        disk.make_folder(path.parent)
        path.parent.chmod(0o700)
        with contextlib.suppress(FileExistsError):
            disk.create_file(path, secrets.token_bytes(32))
    return path.read_bytes()


def why_not_writable(runs_dir: Path) -> str | None:
    """Returns why `runs_dir` cannot be written; None if a small file could be written, flushed and
    removed, and some space is left. Waits without limit for the disk. Does not make a missing
    folder: its volume may come back."""
    probe = runs_dir / f".probe.{secrets.token_hex(4)}"
    try:
        with writing("folder", runs_dir):
            if not runs_dir.exists():
                where = f"folder {str(runs_dir)!r} does not exist"
                return f"{where}; mount its volume, or check HONE_RUNS_DIR"
            disk.write_file(probe, b"can be written\n")
            probe.unlink()
        free = shutil.disk_usage(runs_dir).free
        if free < MIN_FREE_BYTES:
            return (
                f"the disk of folder {str(runs_dir)!r} is full ({free >> 20} MiB free, expected "
                f"{MIN_FREE_BYTES >> 20}); free some space"
            )
    except Failed as error:
        return error.detail
    return None


def make_runs_dir(runs_dir: Path) -> None:
    """Makes the folder if it is missing and its parent exists. A missing parent may be a volume
    that is not mounted. Raises Failed if it cannot."""
    with writing("folder", runs_dir):
        if not runs_dir.exists():
            runs_dir.mkdir(exist_ok=True)
            disk.flush(runs_dir.parent)


class RunsDirCheck:
    """Checks whether `runs_dir` can be written. Callers do not wait for a hanging disk."""

    def __init__(self, runs_dir: Path, answers_within_s: float = ANSWERS_WITHIN_S) -> None:
        self._runs_dir = runs_dir
        self._look = BoundedProbe[str | None](answers_within_s)

    async def open(self) -> None:
        """Makes the folder if it is missing. Raises Unavailable if it cannot be written."""
        if why := await self._within(lambda: _opened(self._runs_dir)):
            raise Unavailable(why)

    async def check(self) -> None:
        """Raises Unavailable if the folder cannot be written."""
        if why := await self.why_not():
            raise Unavailable(why)

    async def why_not(self) -> str | None:
        """Returns a sentence saying why the folder cannot be written, None if it can."""
        return await self._within(lambda: why_not_writable(self._runs_dir))

    async def _within(self, look: Callable[[], str | None]) -> str | None:
        late = (
            f"folder {str(self._runs_dir)!r} could not be written within "
            f"{self._look.within_s:g} s; check HONE_RUNS_DIR and its disk"
        )
        return await self._look.at(look, late)


def _opened(runs_dir: Path) -> str | None:
    try:
        make_runs_dir(runs_dir)
    except Failed as error:
        return error.detail
    return why_not_writable(runs_dir)
