"""Finds the other stack of Hone that has a port which this stack needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2 as httpx

from deploy.slots import SERVICES
from shared.errors import BadRequest
from shared.host.disk import user_name
from shared.http.urls import url_at
from shared.settings import PREFIX, Settings

ANSWER_S = 2.0
"""Seconds for the program at the port to answer what it is."""

LISTENING = "0A"
"""The state of a socket that listens, in /proc/net/tcp."""

STACK_LINK = "of-stack"
"""Name of the link to a stack's folder, beside its weights in shared memory."""


def told(settings: Settings, port: int) -> BadRequest | None:
    """Returns the error for a port that a service of Hone has, with what to do; None if no service
    of Hone has it."""
    url = url_at(settings.host, port)
    service = _service_at(url)
    if service is None:
        return None
    user, folder = _user(port), _folder(settings, url)
    whose = (f" of {user}" if user else "") + (f" in {folder}" if folder else "")
    stop = f"`hone down --dir {folder}` stops it" if folder else "who started it can stop it"
    ports = ", ".join(f"{PREFIX}{name.upper()}_PORT" for name in SERVICES)
    return BadRequest(
        f"port {port} is taken by the {service} service of another Hone stack{whose}: "
        f"{_reach(settings, folder)}{stop}, or let this stack have ports of its own ({ports})"
    )


def _reach(settings: Settings, folder: Path | None) -> str:
    """Returns how to reach the other stack: its orchestrator's URL, if known."""
    url = _urls(folder).get("orchestrator") if folder else None
    own = url_at(settings.host, settings.orchestrator_port)
    if url is None and _service_at(own) == "orchestrator":
        url = own
    return f"{PREFIX}ORCHESTRATOR_URL={url} leads to it, " if url else ""


def _service_at(url: str) -> str | None:
    """Returns the service of Hone that answers there; None if none does."""
    try:
        with httpx.Client(timeout=ANSWER_S, trust_env=False) as client:
            said: Any = client.get(f"{url}/version").json()
    except (httpx.HTTPError, ValueError):
        return None
    is_hone = isinstance(said, dict) and "hone" in said and said.get("service") in SERVICES
    return said["service"] if is_hone else None


def _folder(settings: Settings, url: str) -> Path | None:
    """Returns the folder of this user's stack with the service, if its shared memory tells."""
    folders = (link.readlink() for link in settings.shm_dir.glob(f"*/{STACK_LINK}"))
    return next((folder for folder in folders if url in _urls(folder).values()), None)


def _urls(folder: Path) -> dict[str, str]:
    """Returns the services of the stack in the folder; none if it does not run."""
    try:
        return dict(json.loads((folder / "stack.json").read_text())["urls"])
    except (OSError, ValueError, KeyError):
        return {}


def _user(port: int) -> str | None:
    """Returns the user whose socket listens at the port, if the kernel tells."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, _, _, _, uid, *_ = line.split()
            if state == LISTENING and int(local.rpartition(":")[2], 16) == port:
                return user_name(int(uid))
    return None
