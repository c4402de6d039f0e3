"""The self-test at start: small programs, each with the one outcome that an isolated slot gives.
Positive and negative ones, so that neither a wall with a hole nor a wall around everything
passes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shared.wire import ExecuteRequest, Execution


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


async def failures(
    execute: Callable[[ExecuteRequest], Awaitable[Execution]], probes: Sequence[Probe] = PROBES
) -> dict[str, str]:
    """Returns, for each probe, "" or what it gave instead of what it should."""
    faults = await asyncio.gather(*(_fault(probe, execute) for probe in probes))
    return {probe.name: fault for probe, fault in zip(probes, faults, strict=True)}


async def _fault(probe: Probe, execute: Callable[[ExecuteRequest], Awaitable[Execution]]) -> str:
    limits = {"cpu_s": probe.cpu_s, "timeout_s": probe.timeout_s, "memory_mib": probe.memory_mib}
    request = ExecuteRequest(code=probe.code, expression=probe.expression, **limits)
    ended = await execute(request)
    if ended.verdict != probe.verdict:
        reason = ended.stderr.strip()[-200:]
        return f"it ended with {ended.verdict} ({reason}), expected {probe.verdict}"
    return "" if ended.value == probe.value else f"got {ended.value!r}, expected {probe.value!r}"
