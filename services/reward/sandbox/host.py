"""What a slot has of the host: the paths that it may read, the packages that it may import, and
its share of memory, processes and CPU time.

A slot may read the paths that Python needs, the packages of HONE_SANDBOX_PACKAGES, and for a job's
own functions all installed packages. Nothing else of the host exists inside: no home, no /etc but
the linker's cache, no /proc, no /sys, no sockets. A path appears under its own name, also where the
folders above it (`/root`, 0700) would not let the slot's user through; only the packages appear
under /packages, because a virtual environment may lie below /tmp, where the slot has a folder of
its own.

Each slot has a control group, if the host lets the service make one. It limits the memory and the
number of all processes in the slot together, meters their CPU time, and gives each slot the same
share of the cores. Without it, each process has its own memory limit and its own share of the
cores, and the slot's user has a limit of processes.

    version 2   the service's own group must be writable and hold no other process (systemd:
                Delegate=yes; or a container whose /sys/fs/cgroup is writable): the service moves
                itself to `<own>/hone-service`, slots are `<own>/hone-slot-*`
    version 1   root only: `<own>/hone-slot-*` under each of the controllers memory, pids, cpuacct
                and, for shares of the cores, cpu where that can be had

A slot's process enters its group before it forks anything. Nothing is ever moved again: that costs
more than a program.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from services.reward.sandbox.inside.child import ooms
from shared.errors import BadRequest
from shared.explain import closest

ROOT = Path("/sys/fs/cgroup")
MAX_PROCESSES = 64
"""Most processes of a slot. It is above a program's RLIMIT_NPROC, which takes effect first."""

_CONTROLLERS_1 = ("memory", "pids", "cpuacct")
_NEEDED_2 = {"memory", "pids"}
_SHARES = "cpu"
SERVICE_WEIGHT = "1000"
"""The service's share of the cores, where each slot has 100, so that it answers and judges whatever
programs do."""

_numbers = itertools.count()


@dataclass(frozen=True)
class Group:
    """One slot's group. `folders` are its folders by controller; on version 2 they are all the same
    folder."""

    folders: dict[str, Path]
    version: int

    def entrances(self) -> list[str]:
        """Returns the files that a process writes its pid into."""
        return sorted({str(folder / "cgroup.procs") for folder in self.folders.values()})

    def meters(self) -> list[str]:
        """Returns the files with the CPU time used, and with the number of times that memory ran
        out."""
        names = (
            ("cpu.stat", "memory.events")
            if self.version == 2
            else ("cpuacct.usage", "memory.oom_control")
        )
        return [str(self.folders["cpuacct"] / names[0]), str(self.folders["memory"] / names[1])]

    def limit_memory(self, size_bytes: int) -> None:
        """Bounds the slot's memory, swap included where that is counted."""
        memory = self.folders["memory"]
        if self.version == 2:
            (memory / "memory.max").write_text(str(size_bytes))
            return
        names = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
        now = int((memory / names[0]).read_text())
        # The first must never be above the second.
        for name in names if size_bytes < now else names[::-1]:
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                (memory / name).write_text(str(size_bytes))

    def used_bytes(self) -> int:
        name = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        return int((self.folders["memory"] / name).read_text())

    def reached_limit(self) -> bool:
        """Returns whether the kernel ever killed a process in the group at the group's own limit of
        memory. Version 1 does not say at whose limit, so every kill counts."""
        return ooms(Path(self.meters()[1]).read_bytes())[0] > 0

    def remove(self) -> bool:
        """Removes the group; returns False while something in it still runs."""
        for folder in set(self.folders.values()):
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True


class Groups:
    """Makes the groups of one service's slots, below `parents` by controller. `problem` says why it
    makes none."""

    def __init__(self, parents: dict[str, Path], version: int, problem: str = "") -> None:
        self.parents = parents
        self._version = version
        self.problem = problem

    @classmethod
    def find(cls, root: Path = ROOT, membership: Path = Path("/proc/self/cgroup")) -> Groups:
        """Returns the groups that this process may make, after moving the process into its own
        group where version 2 needs that, and after removing the groups of killed services."""
        try:
            version, parents = _parents(root, membership.read_text())
            _sweep(set(parents.values()))
            return cls(parents, version)
        except OSError as error:
            reason = f"{error.strerror or error}: {error.filename}" if error.filename else error
            return cls({}, 0, str(reason))

    @property
    def bounded(self) -> str:
        """Returns how memory and CPU time are limited, in words."""
        return (
            f"each process alone ({self.problem})"
            if self.problem
            else f"whole programs, by cgroups of version {self._version}"
        )

    def make(self, max_processes: int = MAX_PROCESSES) -> Group | None:
        """Returns a new group for a slot, None where there are none."""
        if self.problem:
            return None
        name = f"hone-slot-{os.getpid()}-{next(_numbers)}"
        folders = {controller: parent / name for controller, parent in self.parents.items()}
        for folder in set(folders.values()):
            folder.mkdir()
        group = Group(folders, self._version)
        (folders["pids"] / "pids.max").write_text(str(max_processes))
        if self._version == 2:
            with contextlib.suppress(FileNotFoundError):
                (folders["memory"] / "memory.swap.max").write_text("0")
        return group


def _sweep(parents: set[Path]) -> None:
    """Removes the groups of services that were killed."""
    for folder in (folder for parent in parents for folder in parent.glob("hone-slot-*")):
        if not Path("/proc", folder.name.split("-")[2]).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _parents(root: Path, membership: str) -> tuple[int, dict[str, Path]]:
    """Returns the version of cgroups on this host and, by controller, the folder below which slots
    can have groups. Raises OSError if they cannot."""
    lines = (line.split(":", 2) for line in membership.splitlines())
    own = {kinds: path for _, kinds, path in lines}
    if (root / "cgroup.controllers").exists():
        return 2, dict.fromkeys(_CONTROLLERS_1, _delegated(root / own[""].lstrip("/")))
    by_controller = {kind: path for kinds, path in own.items() for kind in kinds.split(",")}
    missing = [kind for kind in _CONTROLLERS_1 if kind not in by_controller]
    if missing:
        raise OSError(f"the kernel has no controller {missing[0]!r} of cgroups, version 1")
    parents = {kind: root / kind / by_controller[kind].lstrip("/") for kind in _CONTROLLERS_1}
    for folder in parents.values():
        _try(folder)
    # It is often the same folder as cpuacct.
    shares = (root / _SHARES / by_controller.get(_SHARES, "").lstrip("/")).resolve()
    if shares != parents["cpuacct"].resolve():
        with contextlib.suppress(OSError):
            _try(shares)
            parents[_SHARES] = shares
    return 1, parents


def _delegated(own: Path) -> Path:
    """Returns the group below which slots can have groups, after moving this process out of it: a
    group of version 2 has either processes or groups with controllers."""
    if own.name == "hone-service":
        own = own.parent  # an earlier service of this process moved here
    has = set((own / "cgroup.controllers").read_text().split())
    if not has >= _NEEDED_2:
        raise OSError(
            f"{own} has the controllers {sorted(has)}, and slots need {sorted(_NEEDED_2)}"
        )
    others = set((own / "cgroup.procs").read_text().split()) - {str(os.getpid())}
    is_root = not (own / "cgroup.type").exists()
    if others and not is_root:
        raise OSError(
            f"{own} holds {len(others)} processes beside the service, so it cannot have slots' "
            "groups below it"
        )
    _try(own)
    if not is_root:
        (own / "hone-service").mkdir(exist_ok=True)
        (own / "hone-service" / "cgroup.procs").write_text(str(os.getpid()))
    with contextlib.suppress(OSError):  # missing, or refused
        (own / "cgroup.subtree_control").write_text(f"+{_SHARES}")
        (own / "hone-service" / "cpu.weight").write_text(SERVICE_WEIGHT)
    (own / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(_NEEDED_2)))
    return own


def _try(folder: Path) -> None:
    """Raises OSError unless groups can be made in the folder."""
    trial = folder / f"hone-trial-{os.getpid()}"
    trial.mkdir()
    trial.rmdir()


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
    """Returns the entries of `sys.path` to import the packages: inside a slot, and without
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
