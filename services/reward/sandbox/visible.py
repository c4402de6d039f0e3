"""Which paths of the host a slot may read: the paths that Python needs, the packages of
HONE_SANDBOX_PACKAGES, and for a job's own functions all installed packages.

Nothing else of the host exists inside: no home, no /etc but the linker's cache, no /proc, no /sys,
no sockets. A path appears under its own name, also where the folders above it (`/root`, 0700) would
not let the slot's user through; only the packages appear under /packages, because a virtual
environment may lie below /tmp, where the slot has a folder of its own.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from shared.errors import BadRequest
from shared.explain import closest

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
    """Returns the paths to show and where each appears. A path inside another shown path is left
    out."""
    wanted = [
        path for path in (*_SYSTEM, *_SINGLE) if Path(path).exists() and not Path(path).is_symlink()
    ]
    wanted += [os.path.realpath(sys.base_prefix), str(Path(interpreter()).parent)]
    shown: list[str] = []
    for path in sorted(set(wanted), key=lambda path: (path.count("/"), path)):
        if not any(Path(path).is_relative_to(other) for other in shown):
            shown.append(path)
    return {path: path for path in shown} | (shown_packages() if packages else {})


INSIDE = "/graded"
"""Where the packages of HONE_SANDBOX_PACKAGES appear in a slot."""


@dataclass(frozen=True)
class Packages:
    """Packages that graded code may import. `binds`: paths of the host and where each appears
    inside. `modules`: the modules that every slot imports before its first program."""

    binds: dict[str, str]
    modules: tuple[str, ...]


NO_PACKAGES = Packages({}, ())


def find(names: Sequence[str]) -> Packages:
    """Returns the installed distributions of these names with all that they require. Raises
    BadRequest for a package that is not installed."""
    wanted = {name: _installed(name) for name in names}
    binds = {
        str(path): f"{INSIDE}/{path.name}"
        for distribution in _closure(list(names))
        for path in _entries(distribution)
    }
    modules = [
        module for name, distribution in wanted.items() for module in _modules(name, distribution)
    ]
    return Packages(binds, tuple(modules))


def _installed(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError as error:
        known = sorted({str(found.metadata["Name"]) for found in distributions()})
        meant = closest(name, known)
        remedy = f"did you mean {meant!r}?" if meant else f"pip install {name} there"
        raise BadRequest(
            f"HONE_SANDBOX_PACKAGES names {name!r}, which is not installed beside the reward "
            f"service; {remedy}"
        ) from error


def _closure(names: list[str]) -> Iterator[Distribution]:
    """Yields the distributions of these names and of all they require. A requirement that is not
    installed is for another platform, or optional."""
    seen: set[str] = set()
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        yield found
        for requirement in found.requires or []:
            if "extra ==" not in requirement and (required := re.match(r"[\w.-]+", requirement)):
                names.append(required[0])


def _entries(found: Distribution) -> list[Path]:
    """Returns the paths that the distribution put into the folder of installed packages: folders,
    modules, libraries."""
    tops = {
        file.parts[0]
        for file in found.files or []
        if file.parts[0] not in ("..", "__pycache__", "/")
    }
    return sorted(Path(str(found.locate_file(top))).resolve() for top in tops)


def _modules(name: str, found: Distribution) -> list[str]:
    """Returns the modules to import: the module with the distribution's name, else all public
    modules."""
    stems = {path.name.partition(".")[0] for path in _entries(found) if path.suffix != ".dist-info"}
    public = sorted(stem for stem in stems if stem.isidentifier() and not stem.startswith("_"))
    own = re.sub(r"[-.]+", "_", name).lower()
    return [own] if own in public else public
