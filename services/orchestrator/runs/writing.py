"""Errors of writing to a disk that is full or refuses."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Generator
from pathlib import Path

from shared.errors import Failed


@contextlib.contextmanager
def writing(what: str, path: Path) -> Generator[None]:
    """Raises Failed with the remedy if the disk refuses a write in the block; messages call `path`
    `what`. A full disk has the code "disk_full"."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free_mib = shutil.disk_usage(_existing(path)).free >> 20
            raise Failed(
                f"the disk of {what} {str(path)!r} is full ({free_mib} MiB free); free some space",
                code="disk_full",
            ) from error
        raise Failed(
            f"cannot write to {what} {str(path)!r}: {error.strerror or error}; check HONE_RUNS_DIR"
        ) from error


def _existing(path: Path) -> Path:
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())
