"""DeepSpeed's extensions, which torch compiles when they are first needed: their folder, whether
one is being compiled, and stale locks of killed processes.

torch keeps a lock file open while it compiles. Other processes wait until the file is gone: after a
kill, for ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from shared.host.logs import get_logger

FOLDER = "TORCH_EXTENSIONS_DIR"
"""torch's variable for the folder that extensions are compiled in."""

SECOND_LOOK_S = 0.2
"""Seconds after which an unheld lock is stale, and not just being released."""

LOADING_S = 2.0
"""A lock is held for less than this, in seconds, if the extension is compiled already."""


def own_folder(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variable that sets a folder of extensions for this Python environment.

    In a shared folder each environment would compile again what another has compiled, because their
    paths differ.
    """
    if environment.get(FOLDER):
        return {}
    names = (sys.prefix, sys.version, version("torch"), version("deepspeed"))
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]
    return {FOLDER: str(_cache(environment) / "torch_extensions" / f"hone-{digest}")}


def compiling(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns a sentence while an extension is being compiled; None otherwise."""
    names = sorted(lock.parent.name for lock in _locks(environment) if _age_s(lock) >= LOADING_S)
    if not names:
        return None
    return f"compiling DeepSpeed's {' and '.join(names)} (once, about two minutes)"


def remove_stale_locks(environment: Mapping[str, str] = os.environ) -> None:
    """Removes lock files that no process holds open."""
    # The file's identity is read first: a file made later is another process's, and held.
    locks = [(lock, _identity(lock)) for lock in _locks(environment)]
    locks = [(lock, identity) for lock, identity in locks if not _is_open(lock)]
    if locks:
        time.sleep(SECOND_LOOK_S)
    for lock, identity in locks:
        if not _is_open(lock) and identity is not None and _identity(lock) == identity:
            lock.unlink(missing_ok=True)
            get_logger().warning("stale lock of a compilation removed", path=str(lock))


def _locks(environment: Mapping[str, str]) -> list[Path]:
    given = environment.get(FOLDER)
    root = Path(given) if given else _cache(environment) / "torch_extensions"
    return list(root.glob("**/lock"))


def _cache(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())


def _identity(file: Path) -> tuple[int, int] | None:
    """Returns a key that differs for another file of the same name; None without a file."""
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_ctime_ns


def _age_s(file: Path) -> float:
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_open(file: Path) -> bool:
    """Returns whether a process that we may look at holds the file open."""
    real = str(file.resolve())
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()) == real:
                return True
    return False
