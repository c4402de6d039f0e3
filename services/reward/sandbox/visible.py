"""Which paths of the host a slot may read: what Python needs, and for a job's own functions the
installed packages.

Nothing else of the host exists inside: no home, no /etc but the linker's cache, no /proc, no /sys,
no sockets. A path appears under its own name, also where the folders above it (`/root`, 0700) would
not let the slot's user through; only the packages appear under /packages, because a virtual
environment may lie below /tmp, where the slot has a folder of its own.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
_SINGLE = (
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
)


def interpreter() -> str:
    """Returns the real path of this Python; a virtual environment's is a link."""
    return os.path.realpath(sys.executable)


def package_folders() -> list[str]:
    """Returns the folders of this environment's installed packages."""
    return sorted({os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")})


def shown_packages() -> dict[str, str]:
    """Returns where each folder of packages appears inside a slot."""
    return {folder: f"/packages/{position}" for position, folder in enumerate(package_folders())}


def package_paths() -> list[str]:
    """Returns what goes on `sys.path` to import the packages: inside a slot, and without
    isolation."""
    return [*shown_packages().values(), *package_folders()]


def links() -> dict[str, str]:
    """Returns the system folders that are links on this host (`/lib` -> `usr/lib`), with their
    targets."""
    return {path: str(Path(path).readlink()) for path in _SYSTEM if Path(path).is_symlink()}


def binds(*, packages: bool) -> dict[str, str]:
    """Returns the paths to show and where each appears; none that has its own name is inside
    another one."""
    wanted = [
        path for path in (*_SYSTEM, *_SINGLE) if Path(path).exists() and not Path(path).is_symlink()
    ]
    wanted += [os.path.realpath(sys.base_prefix), str(Path(interpreter()).parent)]
    shown: list[str] = []
    for path in sorted(set(wanted), key=lambda path: (path.count("/"), path)):
        if not any(Path(path).is_relative_to(other) for other in shown):
            shown.append(path)
    return {path: path for path in shown} | (shown_packages() if packages else {})
