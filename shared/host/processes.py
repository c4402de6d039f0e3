"""This machine's processes, ports and threads: processes that end with their parent, free ports,
and work in a thread of its own. And how each of the four services begins."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Generic, TypeVar

from shared.errors import BadRequest, HoneError
from shared.host import logs, tracing
from shared.settings import Settings, load_settings

PR_SET_PDEATHSIG = 1


def ending_with_parent() -> Callable[[], None]:
    """Returns a `preexec_fn` for `Popen`: the child gets SIGTERM when the thread that started it
    ends, so start it from a thread that lives as long as the process."""
    return _asker(os.getpid())  # made before the fork, after which little may run


def end_with_parent(parent: int) -> None:
    """Makes the kernel send this process SIGTERM when its parent, process `parent`, ends; sends it
    now if the parent has ended already."""
    _asker(parent)()


def die_with(pid: int) -> None:
    """Kills this process as soon as process `pid` ends, or now if it has ended. `pid` may be any
    process of this user."""

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            ended = select.poll()
            ended.register(os.pidfd_open(pid), select.POLLIN)
            ended.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name=f"die-with-{pid}", daemon=True).start()


def how_it_ended(exit_code: int) -> str:
    """Returns how a process ended, by what `Popen` says: "ended with exit code 2", or "was killed
    by SIGKILL (signal 9), probably because memory ran out"."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    names = {number.value: number.name for number in signal.Signals}
    name = names.get(-exit_code, "a signal")
    why = ", probably because memory ran out" if -exit_code == signal.SIGKILL else ""
    return f"was killed by {name} (signal {-exit_code}){why}"


def _asker(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None, use_errno=True)

    def ask() -> None:
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) == -1:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return ask


def resident_bytes() -> float:
    """Returns the resident memory of this process and its descendants; shared memory counts for
    each. NaN where the system does not report it, as on macOS."""
    if not Path("/proc/self/statm").exists():
        return math.nan
    total, left = 0, [os.getpid()]
    while left:
        pid = left.pop()
        with contextlib.suppress(OSError):  # the process has ended
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            for thread in Path(f"/proc/{pid}/task").iterdir():
                left += map(int, (thread / "children").read_text().split())
    return float(total * os.sysconf("SC_PAGE_SIZE"))


FREE = range(10_000, 32_768)
"""Below Linux's ephemeral port range. Linux may give a port of that range to another process before
a service listens on it."""


def free_port(in_a_row: int = 1) -> int:
    """Returns the first of `in_a_row` consecutive ports on which nothing of this machine listens.
    It is drawn at random."""
    while True:
        port = FREE[secrets.randbelow(len(FREE) - in_a_row)]
        with contextlib.ExitStack() as probes:
            try:
                for number in range(in_a_row):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port + number))
            except OSError:  # one of the ports is taken
                continue
            return port


def check_port(host: str, port: int, service: str) -> None:
    """Raises BadRequest naming the service, the port and the setting if nothing can listen
    there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise BadRequest(
                f"the {service} service cannot listen on {host}:{port}: {error.strerror}; stop "
                "what uses the port, or set "
                f"HONE_{service.upper()}_PORT to a free one"
            ) from error


T = TypeVar("T")


async def run_in_thread(act: Callable[[], T]) -> T:
    """Returns the result of `act`. For work that may hang: it does not occupy a thread of the pool,
    and the process can end before it."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(act())
        except BaseException as error:  # raised again where the result is awaited
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(result)


class BoundedProbe(Generic[T]):
    """Runs a check that may hang, such as of a disk; the caller waits for at most `within_s`. Only
    one check runs at a time, and all callers share its deadline. So a disk that hangs occupies one
    thread, and does not delay later callers further."""

    def __init__(self, within_s: float) -> None:
        self.within_s = within_s
        self._under_way: asyncio.Task[T] | None = None
        self._ends = 0.0

    async def at(self, look: Callable[[], T], late: T) -> T:
        """Returns the result of `look`, or of the check that is running already; `late` if it takes
        too long."""
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.create_task(run_in_thread(look))
            self._ends = time.monotonic() + self.within_s
        asked = self._under_way  # another caller may start the next check first
        done, _ = await asyncio.wait({asked}, timeout=max(self._ends - time.monotonic(), 0.0))
        return asked.result() if done else late


def run_main(name: str, main: Callable[[Settings], int | None]) -> None:
    """Loads the settings, sets up logs, runs `main` and ends the process with its exit code, 130
    after Ctrl-C. If it cannot start, it prints one sentence to stderr and exits with code 2."""
    try:
        settings = load_settings()
        logs.configure(name, settings)
        tracing.configure(name)
        sys.exit(main(settings))
    except HoneError as error:
        sys.stderr.write(f"{error.detail}\n")
        sys.exit(2)
    except KeyboardInterrupt:  # the server raises it again after a graceful end
        sys.exit(130)
