"""Packages that graded code may import, by the setting HONE_SANDBOX_PACKAGES: they and what they
need, and nothing else of this environment, which also holds the service itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from shared.errors import BadRequest
from shared.explain import closest

INSIDE = "/graded"
"""Where they appear in a slot."""


@dataclass(frozen=True)
class Packages:
    """`binds`: paths of the host and where each appears inside. `modules`: what every slot imports
    before its first program."""

    binds: dict[str, str]
    modules: tuple[str, ...]


NO_PACKAGES = Packages({}, ())


def find(names: Sequence[str]) -> Packages:
    """Returns the installed distributions of these names with all that they require. Raises
    BadRequest for one that is not installed."""
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
    installed here is one of another platform, or an option."""
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
    """Returns what the distribution put into the folder of installed packages: folders, modules,
    libraries."""
    tops = {
        file.parts[0]
        for file in found.files or []
        if file.parts[0] not in ("..", "__pycache__", "/")
    }
    return sorted(Path(str(found.locate_file(top))).resolve() for top in tops)


def _modules(name: str, found: Distribution) -> list[str]:
    """Returns the modules to import: the one that has the distribution's name, else all public
    ones."""
    stems = {path.name.partition(".")[0] for path in _entries(found) if path.suffix != ".dist-info"}
    public = sorted(stem for stem in stems if stem.isidentifier() and not stem.startswith("_"))
    own = re.sub(r"[-.]+", "_", name).lower()
    return [own] if own in public else public
