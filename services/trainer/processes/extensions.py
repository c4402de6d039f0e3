"""The locks of the extensions that torch compiles, which killed processes leave behind.

DeepSpeed compiles one when its first job loads. torch keeps a lock file open meanwhile, and whoever
finds one waits until it is gone: after a kill, for ever.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from shared.logs import get_logger

SECOND_LOOK_S = 0.2
"""After which a lock that nobody held is not one that is being released."""


def remove_stale_locks(environment: Mapping[str, str] = os.environ) -> None:
    """Removes the lock files that no process holds open."""
    locks = [lock for lock in _root(environment).glob("**/lock") if not _is_open(lock)]
    if locks:
        time.sleep(SECOND_LOOK_S)
    for lock in locks:
        if lock.exists() and not _is_open(lock):
            lock.unlink(missing_ok=True)
            get_logger().warning("stale lock of a compilation removed", path=str(lock))


def _root(environment: Mapping[str, str]) -> Path:
    """Returns the folder in which torch compiles."""
    if given := environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(given)
    cache = environment.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(cache) / "torch_extensions"


def _is_open(file: Path) -> bool:
    """Returns whether a process that we may look at holds the file open."""
    real = str(file.resolve())
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()) == real:
                return True
    return False
