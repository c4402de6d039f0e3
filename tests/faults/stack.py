"""The stack that is broken: Redis and the four services as `hone up` runs them, with a link before
each that the orchestrator calls, and a keeper that starts again whatever ends, as
`restart: always` of Compose does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx2 as httpx
import psutil

from deploy.supervisor import SERVICES, Child, redis_command, redis_socket
from shared.host.processes import free_port
from shared.http.client import Client
from tests.support.link import Link, Seen

ROOT = Path(__file__).parents[2]
AGENT = Path(__file__).with_name("agent.py")
LEASE_S = 6.0
"""`HONE_LEASE_S` of this stack: a fifth of the default, so that 80 faults take minutes."""

DISK_BYTES = 256 << 20
START_S = 120.0
KEEP_S = 0.2


class Stack:
    """`async with Stack(seen) as stack`: `seen` hears the orchestrator's requests. `has_own_disk`:
    the run folders are on a disk that can be filled. `settings` are the services'. With the
    `environment` "worker" a worker runs too. What is `held` is not started again. With `keeps` its
    folder, with the logs, stays."""

    def __init__(self, seen: Seen, environment: str | None = None, **settings: str) -> None:
        self._environment_kind = environment
        self._settings = settings
        self.folder = Path(tempfile.mkdtemp(prefix="hone-faults-"))
        self.runs = self.folder / "runs"
        self._shm = Path("/dev/shm") / self.folder.name
        self.ports = {name: free_port() for name in SERVICES}
        data, socket = self.folder / "redis", self.folder / "link.sock"
        self._links_at = {name: free_port() for name in ("trainer", "rollout", "reward")}
        self.links = {name: Link(self.ports[name], at, seen) for name, at in self._links_at.items()}
        self.links["redis"] = Link(redis_socket(data), socket)
        self._redis_url = f"unix://{socket}"
        self._open = contextlib.AsyncExitStack()
        self.held: set[str] = set()
        self.keeps = False
        self.has_own_disk = False
        self.client = Client("orchestrator", f"http://127.0.0.1:{self.ports['orchestrator']}")
        self._children: dict[str, Child] = {}
        self._keeper: asyncio.Task[None] | None = None

    # --- life

    async def __aenter__(self) -> Stack:
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeper:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        for names in (SERVICES[::-1], ("redis",)):
            await asyncio.to_thread(_end, [self._children[n] for n in names if n in self._children])
        await self._open.aclose()
        await self.client.close()
        if self.has_own_disk:
            subprocess.run(["umount", "-l", str(self.runs)], check=False)
        shutil.rmtree(self._shm, ignore_errors=True)
        if not self.keeps:
            shutil.rmtree(self.folder, ignore_errors=True)

    async def _start(self) -> None:
        self.runs.mkdir()
        self.has_own_disk = _mount(self.runs)
        (self.folder / "redis").mkdir()
        for link in self.links.values():
            await self._open.enter_async_context(link)
        self._add("redis", redis_command(self.folder / "redis"), dict(os.environ))
        for name in SERVICES:
            self._add(name, [sys.executable, "-m", f"services.{name}"], self._environment(name))
        if self._environment_kind == "worker":
            agent = [sys.executable, "-m", "hone.cli", "work", str(AGENT), "-c", "32"]
            self._add("worker", agent, self._environment("worker"))
        self._keeper = asyncio.create_task(self._keep())
        async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(START_S):
            for port in self.ports.values():
                while not await _is_ready(http, port):
                    await asyncio.sleep(0.1)

    def _environment(self, name: str) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("HONE_")}
        ports = self.ports | (self._links_at if name == "orchestrator" else {})
        urls = {f"HONE_{of.upper()}_URL": f"http://127.0.0.1:{at}" for of, at in ports.items()}
        own = {
            **({f"HONE_{name.upper()}_PORT": str(self.ports[name])} if name in self.ports else {}),
            "HONE_TOOL_PARSER": "hermes",
            "HONE_RUNS_DIR": str(self.runs),
            "HONE_SHM_DIR": str(self._shm),
            "HONE_REDIS_URL": self._redis_url,
            "HONE_LEASE_S": str(LEASE_S),
            "HONE_TRAINER_RANKS": "2",
            "PYTHONPATH": str(ROOT),
        }
        return clean | urls | own | self._settings

    def _add(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        log = self.folder / f"{name}.log"
        self._children[name] = Child(name, command, environment, log)
        self._children[name].start(time.monotonic())

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(KEEP_S)
            for name, child in self._children.items():
                if name not in self.held:
                    child.revive(time.monotonic())

    # --- what can be broken

    def pid(self, what: str) -> int:
        """Returns the process that is called so in the plan."""
        if what in self._children:
            process = self._children[what].process
            assert process is not None
            return process.pid
        if what == "engine":
            found = [each for each in self._below("rollout") if "EngineCore" in _command(each)]
        else:
            rank = what.removeprefix("rank ")
            found = [
                each
                for each in self._below("trainer")
                if "processes.ranks" in _command(each) and _environ(each).get("RANK") == rank
            ]
        if not found:
            raise LookupError(f"no process is the {what} just now")
        return found[0].pid

    def _below(self, name: str) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid(name)).children(recursive=True)
        return []

    def fill_disk(self) -> None:
        """Leaves nothing free on the disk of the run folders."""
        with (self.runs / "filler").open("wb", buffering=0) as filler:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while True:
                        filler.write(bytes(size))

    def free_disk(self) -> None:
        (self.runs / "filler").unlink(missing_ok=True)


async def _is_ready(http: httpx.AsyncClient, port: int) -> bool:
    try:
        return (await http.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200
    except httpx.TransportError:
        return False


def _end(children: list[Child]) -> None:
    """Ends what is left of them: asked first, then killed."""
    for child in children:
        child.signal(signal.SIGTERM)
    end = time.monotonic() + 15.0
    while any(child.exit_code() is None for child in children) and time.monotonic() < end:
        time.sleep(0.05)
    for child in children:
        child.signal(signal.SIGKILL)
        if child.process:
            child.process.wait()


def _mount(folder: Path) -> bool:
    """Puts a small disk of its own at the folder; returns whether this user may."""
    size = f"size={DISK_BYTES}"
    command = ["mount", "-t", "tmpfs", "-o", size, "hone-faults", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _environ(process: psutil.Process) -> dict[str, str]:
    with contextlib.suppress(psutil.Error):
        return process.environ()
    return {}
