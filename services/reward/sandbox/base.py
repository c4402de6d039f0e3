"""The sandbox as the service sees it, and a sandbox's self-test at its start. READ FIRST."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from shared.errors import Failed
from shared.turns import Path
from shared.wire import ExecuteRequest, Execution

WORKER_PROCESSES = 128

waiting: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar(
    "waiting", default=contextlib.nullcontext
)
"""The context in which a program waits for a free sandbox. The deadline of a call stops there: else
programs that use up their time would make the programs behind them late."""


class SlotDied(Exception):
    """A slot or worker ended, or stopped answering, in the middle of something; the message says
    how.

    `killed`: by its exit code, something outside its own code killed it: another process, or the
    kernel for its memory.
    """

    def __init__(self, message: str, *, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


class Worker(ABC):
    """A process that keeps a job's own code loaded and answers messages, any number in any
    order."""

    @abstractmethod
    async def tell(self, message: dict[str, Any]) -> None:
        """Sends a message, and lets the worker continue. Raises SlotDied if it ended."""

    @abstractmethod
    async def hear(self) -> Any:
        """Returns the next message of the worker, which is untrusted. Raises SlotDied if it ended;
        no two callers may wait at once."""

    @abstractmethod
    def pause(self) -> None:
        """Stops all that runs in it, until the next message."""

    @abstractmethod
    async def dismiss(self) -> None:
        """Ends it for good, with all that runs in it."""


@dataclass(frozen=True)
class Probe:
    """A program whose `expression` must give `value` and end with `verdict`."""

    name: str
    code: str
    expression: str | None = None
    value: Any = None
    verdict: str = "ok"
    cpu_s: float = 4.0
    timeout_s: float = 10.0
    memory_mib: int = 256


_TRY = """
def attempt(call, *arguments):
    try:
        call(*arguments)
        return "allowed"
    except OSError:
        return "refused"
"""

PROBES = (
    Probe(
        "runs programs",
        "import colorsys, socket, ctypes\nx = sum(range(10))\nopen('/tmp/x', 'w').write('1')",
        "x",
        45,
    ),
    Probe("no network", _TRY + "import socket", "attempt(socket.socket)", "refused"),
    Probe("runs asyncio", "import asyncio", "asyncio.run(asyncio.sleep(0, 'woken'))", "woken"),
    Probe(
        "no other processes",
        _TRY + "import os",
        "[os.getpid(), os.getppid(), attempt(os.listdir, '/proc/1')]",
        [1, 0, "refused"],
    ),
    Probe(
        "no writing outside /tmp",
        _TRY + "import os\n"
        "read_only = [os.statvfs(path).f_flag & 1 for path in ('/', '/usr', os.__file__)]",
        "read_only + [attempt(os.mkdir, path + '/probe') for path in ('', '/usr', '/etc', '/proc', "
        "'/tmp')]",
        [1, 1, 1, "refused", "refused", "refused", "refused", "allowed"],
    ),
    Probe(
        "no capabilities",
        "import ctypes\nheld = (ctypes.c_uint32 * 6)()\nctypes.CDLL(None).capget((ctypes.c_uint32 "
        "* 2)(0x20080522, 0), held)",
        "list(held)",
        [0, 0, 0, 0, 0, 0],
    ),
    Probe(
        "system calls filtered",
        "import ctypes\nlibc = ctypes.CDLL(None)",
        "[libc.unshare(0x10000000), libc.memfd_create(b'x', 0)]",
        [-1, -1],
    ),
    Probe(
        "processes limited",
        "import os, time\ncount = 0\ntry:\n    while count < 100:\n        if os.fork() == 0:\n    "
        "        time.sleep(60)\n"
        "        count += 1\nexcept OSError:\n    pass",
        "count < 45",
        True,
    ),
    Probe("memory limited", "x = bytearray(1 << 30)", verdict="memory_limit"),
    Probe("CPU time limited", "while True: pass", verdict="time_limit", cpu_s=0.1),
    Probe("time limited", "import time\ntime.sleep(60)", verdict="time_limit", timeout_s=0.2),
)


class Sandbox(ABC):
    """Runs programs once it has started and `problem()` is None."""

    self_test: Sequence[Probe] = PROBES
    _problem: str | None = "the sandbox was not started yet"
    _faults: Mapping[str, str] = {}

    @abstractmethod
    async def start(self) -> None:
        """Starts and tests itself. It does not raise on a host that cannot isolate: `problem()`
        says so then."""

    @abstractmethod
    async def close(self) -> None: ...

    def problem(self) -> str | None:
        """Returns None if it runs programs, else a sentence that says what is missing."""
        return self._problem

    def check_usable(self) -> None:
        """Raises Failed with `problem()` if there is one."""
        if self._problem:
            raise Failed(self._problem)

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """Returns how programs are isolated ("tier"), and the result of each probe of the
        self-test."""

    @abstractmethod
    async def execute(self, request: ExecuteRequest) -> Execution:
        """Returns how the program ended. Its own failures are verdicts; "sandbox_error" is a
        failure of the sandbox. Raises Failed with `problem()` if nothing can be run at all."""

    @abstractmethod
    async def open_worker(self, module: str, *, processes: int = WORKER_PROCESSES) -> Worker:
        """Returns a new worker, in a sandbox of its own, that runs `serve(channel)` of `module` and
        may have so many processes and threads. Raises Failed as `execute` does."""

    async def run(self, requests: Sequence[ExecuteRequest]) -> list[Execution]:
        """Returns one Execution per request, in order. Identical requests run once."""
        keys = [request.model_dump_json() for request in requests]
        distinct = dict(zip(keys, requests, strict=True))
        executions = await asyncio.gather(*(self.execute(request) for request in distinct.values()))
        by_key = dict(zip(distinct, executions, strict=True))
        return [by_key[key] for key in keys]

    def probed(self) -> dict[str, str]:
        """Returns the result of each probe of the self-test: "passed", or its fault."""
        return {name: fault or "passed" for name, fault in self._faults.items()}

    async def _tested(self) -> str | None:
        """Runs the self-test. Returns how its outcomes differ from the expected ones; None: they
        do not."""
        self._problem = None
        faults = await asyncio.gather(*(_fault(probe, self.execute) for probe in self.self_test))
        names = [probe.name for probe in self.self_test]
        self._faults = dict(zip(names, faults, strict=True))
        told = [f"{name}: {fault}" for name, fault in self._faults.items() if fault]
        return f"its self-test failed: {'; '.join(told)}" if told else None


async def _fault(probe: Probe, execute: Callable[[ExecuteRequest], Awaitable[Execution]]) -> str:
    limits = {"cpu_s": probe.cpu_s, "timeout_s": probe.timeout_s, "memory_mib": probe.memory_mib}
    request = ExecuteRequest(code=probe.code, expression=probe.expression, **limits)
    ended = await execute(request)
    if ended.verdict != probe.verdict:
        reason = ended.stderr.strip()[-200:]
        return f"it ended with {ended.verdict} ({reason}), expected {probe.verdict}"
    return "" if ended.value == probe.value else f"got {ended.value!r}, expected {probe.value!r}"


asking: ContextVar[Path] = ContextVar("asking", default=())
"""The job, group and completion that the running code works for."""
