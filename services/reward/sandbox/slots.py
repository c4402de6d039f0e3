"""One slot process, from the outside: start it, talk to it, kill it.

It is started by fork and exec with an environment that has no secrets, so that no secret of the
service is in its memory. It ends with the service, by the kernel's parent-death signal and by end
of file on its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

from services.reward.sandbox import host
from services.reward.sandbox.base import WORKER_PROCESSES, SlotDied, Worker
from services.reward.sandbox.host import INSIDE, NO_PACKAGES, Group, Packages
from services.reward.sandbox.inside import frames, zygote
from services.reward.sandbox.verdicts import DecodeError, ProgramExit, decode
from shared.wire import ExecuteRequest

START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 2.0
MAX_MESSAGE_BYTES, MAX_MESSAGE_ITEMS = 64 << 20, 1 << 20
LONG_MESSAGE_BYTES = 256 << 10
"""Larger messages are decoded in a thread, so that the service answers others meanwhile."""

BESIDE_MIB = 128
"""Memory that a slot may use beside the program's own: its /tmp, its output, the kernel's
tables."""
_KILLED = (-signal.SIGKILL, -signal.SIGKILL & 0xFF)
"""Exit codes after SIGKILL: of the process outside, and of the process inside, which the one
outside passes on."""

OUTSIDE_UID = 60_000
"""Root's slots are users 60000, 60001, ... outside, who own nothing and are not root to the
kernel."""

_HOME = str(Path(__file__).resolve().parents[3])
_BOOT = "import sys; sys.path.insert(0, {home!r}); from {module} import main; main()"


class IsolationFailed(Exception):
    """The host refused a step of building a slot; the message names the step."""


class ImportFailed(IsolationFailed):
    """A package that graded code may import cannot be imported in a slot."""


class Slot(Worker):
    """A slot runs programs, one at a time; with `worker`, the name of a module, it runs that
    module's `serve` instead, which keeps a job's own code loaded."""

    module = "services.reward.sandbox.inside.zygote"
    """The module whose `main` the process runs."""

    def __init__(
        self,
        number: int,
        *,
        isolated: bool,
        worker: str | None = None,
        worker_processes: int = WORKER_PROCESSES,
        packages: Packages = NO_PACKAGES,
        group: Group | None = None,
    ) -> None:
        self._number = number
        self._isolated = isolated
        self._worker = worker
        self._worker_processes = worker_processes
        self._packages = packages
        self._group = group
        self._idle_bytes = 0
        self._memory_mib = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._switch: int | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def alive(self) -> bool:
        connected = self._writer is not None and not self._writer.is_closing()
        return connected and self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Starts the process and waits until it is inside. Raises IsolationFailed naming the step
        that failed."""
        await self.close()
        ours, theirs = socket.socketpair()
        log = os.memfd_create("slot-stderr")
        switched, self._switch = os.pipe()
        os.set_blocking(self._switch, False)
        try:
            self._process = self._spawn(theirs, switched, log)
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            await self._wait_until_ready(log)
            if self._group:
                self._idle_bytes, self._memory_mib = self._group.used_bytes(), 0
        except OSError as error:
            ours.close()
            raise IsolationFailed(
                f"starting {host.interpreter()}: {error.strerror or error}"
            ) from error
        finally:
            theirs.close()
            os.close(switched)
            os.close(log)

    async def tell(self, message: dict[str, Any]) -> None:
        self._switch_to(zygote.CONTINUE)
        await self._send(frames.pack(message))

    async def hear(self) -> Any:
        return await self._message()

    def pause(self) -> None:
        self._switch_to(zygote.STOP)

    def _switch_to(self, what: bytes) -> None:
        # The pipe is full only if pid 1 hangs, and broken if it died. Both show elsewhere.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            if self._switch is not None:
                os.write(self._switch, what)

    async def run(self, request: ExecuteRequest, deadline_s: float) -> ProgramExit:
        """Returns how a program ended. Anything but an answer (death, silence, cancellation) ends
        the slot: its state is unknown."""
        self._limit_memory(request.memory_mib)
        stdin = request.stdin.encode()
        program = json.dumps(request.model_dump(exclude={"stdin", "timeout_s", "idle_s"})).encode()
        opening = {
            "limits": request.model_dump(include={"timeout_s", "cpu_s", "idle_s"}),
            "stdin_size": len(stdin),
            "program_size": len(program),
        }
        message = frames.pack(opening) + stdin + program
        answered = False
        try:
            async with asyncio.timeout(deadline_s):
                await self._send(message)
                facts = await self._facts()
            answered = True
            return facts
        finally:
            if not answered:
                self._disconnect()

    def _limit_memory(self, memory_mib: int) -> None:
        """Limits the memory of all that runs in the slot together, if it has a group. Each process
        has its own limit besides."""
        if self._group and memory_mib != self._memory_mib:
            self._group.limit_memory(self._idle_bytes + ((memory_mib + BESIDE_MIB) << 20))
            self._memory_mib = memory_mib

    async def _message(self) -> Any:
        (size,) = frames.HEADER.unpack(await self._receive(frames.HEADER.size))
        if size > MAX_MESSAGE_BYTES:
            raise SlotDied(f"it answered with {size} bytes, at most {MAX_MESSAGE_BYTES} are taken")
        message = await self._receive(size)
        if size < LONG_MESSAGE_BYTES:
            return _plain(message)
        return await asyncio.to_thread(_plain, message)

    async def _facts(self) -> ProgramExit:
        answer = await self._message()
        texts = [(await self._receive(size)).decode("utf-8", "replace") for size in answer["sizes"]]
        return ProgramExit(**answer["facts"], stdout=texts[0], stderr=texts[1], result=texts[2])

    async def close(self) -> None:
        """Ends the process with all it runs, and waits for that."""
        process = self._process
        if process is None:
            return
        self._disconnect()
        try:
            await asyncio.to_thread(process.wait, STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(PermissionError):  # root without CAP_KILL may not
                process.kill()
            await asyncio.to_thread(process.wait)
        self._process = None

    async def dismiss(self) -> None:
        """Ends the slot for good."""
        await self.close()
        if self._group:
            async with asyncio.timeout(STOP_DEADLINE_S):
                # Pid 1 is dead, and the kernel is still ending the others.
                while not self._group.remove():
                    await asyncio.sleep(0.01)

    def _disconnect(self) -> None:
        """Closes the socket. Then pid 1 of the slot ends, and the kernel kills everything in the
        slot."""
        if self._writer is not None:
            self._writer.transport.abort()
        if self._switch is not None:
            os.close(self._switch)
            self._switch = None

    def _spawn(self, theirs: socket.socket, switched: int, log: int) -> subprocess.Popen[bytes]:
        config = {
            "service_pid": os.getpid(),
            "home": _HOME,
            "worker": self._worker,
            "worker_bytes": zygote.WORKER_BYTES,
            "worker_processes": self._worker_processes,
            "isolated": self._isolated,
            "control_fd": theirs.fileno(),
            "switch_fd": switched,
            "uid": _outside_uid(self._number),
            "binds": host.binds(packages=self._worker is not None) | self._packages.binds,
            "links": host.links(),
            "entrances": self._group.entrances() if self._group else [],
            "meters": self._group.meters() if self._group else [None, None],
            "package_paths": self._package_paths(),
            "modules": self._packages.modules,
        }
        boot = _BOOT.format(home=_HOME, module=self.module)
        flags = ["-P", "-s", "-S", "-X", "utf8", "-c", boot]
        command = [host.interpreter(), *flags, json.dumps(config)]
        null = subprocess.DEVNULL
        return subprocess.Popen(
            command,
            stdin=null,
            stdout=null,
            stderr=log,
            # One arena: each reserves 64 MiB of what a program may have, whatever is in it.
            env={"PYTHONHASHSEED": "0", "LD_BIND_NOW": "1", "MALLOC_ARENA_MAX": "1"},
            cwd="/",
            pass_fds=[theirs.fileno(), switched],
            start_new_session=True,
        )

    def _package_paths(self) -> list[str]:
        if not self._packages.modules:
            return []
        return [INSIDE] if self._isolated else host.package_folders()

    async def _wait_until_ready(self, log: int) -> None:
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                answer = await self._message()
        except TimeoutError as error:
            await self.close()
            raise IsolationFailed(f"a slot was not ready after {START_DEADLINE_S:g} s") from error
        except SlotDied as error:
            await self.close()
            raise IsolationFailed(
                os.pread(log, 4096, 0).decode("utf-8", "replace").strip()[-500:] or str(error)
            ) from error
        if "ready" not in answer:
            await self.close()
            if "fatal" in answer:
                raise IsolationFailed(str(answer["fatal"]))
            raise ImportFailed(
                "a package of HONE_SANDBOX_PACKAGES does not work in the sandbox: "
                f"{answer['not_importable']}"
            )

    async def _send(self, message: bytes) -> None:
        if self._writer is None:
            raise SlotDied("it was never started")
        try:
            self._writer.write(message)
            await self._writer.drain()
        except OSError as error:
            raise await self._ended() from error

    async def _receive(self, size: int) -> bytes:
        assert self._reader is not None
        try:
            return await self._reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise await self._ended() from error

    async def _ended(self) -> SlotDied:
        """Returns how the process ended, which it does once the socket is closed."""
        assert self._process is not None
        self._disconnect()
        code = await asyncio.to_thread(self._process.wait)
        if self._worker and self._group and self._group.reached_limit():
            return SlotDied("the kernel ended it at its limit of memory")
        if code == zygote.LARGE:
            return SlotDied("it was killed when it used a quarter of its memory, or more")
        if code in _KILLED:
            return SlotDied("its process was ended by SIGKILL", killed=True)
        return SlotDied(f"its process ended with code {code}")


def _plain(message: bytes) -> Any:
    try:
        return decode(message, max_items=MAX_MESSAGE_ITEMS)
    except DecodeError as error:
        raise SlotDied(f"it answered with something that is not plain data: {error}") from error


def _outside_uid(number: int) -> int | None:
    """Returns the slot's user outside: a uid that no user of the host has, if the service is
    root; else None (the same user)."""
    if os.geteuid() != 0:
        return None
    uid = OUTSIDE_UID + number
    maps = [
        [int(part) for part in line.split()]
        for line in Path("/proc/self/uid_map").read_text().splitlines()
    ]
    return uid if any(first <= uid < first + count for first, _, count in maps) else None
