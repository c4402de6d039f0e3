"""`python -m services.orchestrator`: the jobs API and its worker, at HONE_ORCHESTRATOR_PORT.

A watchdog ends a process whose event loop stands still. Such a process cannot renew its lease and
answers no request, though its port is open. `hone up`, Kubernetes or systemd restarts it, and the
job continues. The watchdog is a thread, because the loop runs nothing then. It counts its own ticks
and reads no clock, so a pause of the whole process (SIGSTOP, a suspended machine) does not count.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from shared.errors import BadRequest
from shared.host.logs import get_logger
from shared.host.processes import run_main
from shared.settings import Settings

SHARE = 0.8
"""Share of the lease after which the worker's own heartbeat gives up the lease."""

MIN_S = 10.0
"""Least limit, for short leases: a shorter standstill may be a busy machine."""

NUM_TICKS = 20

EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h."""

SAY_S = 5.0
"""Seconds for logging, which takes long on an overloaded machine. A blocked log (a pipe without a
reader, a full disk) may be the reason for the standstill."""

STDERR = 2

WATCHING, LOGGING = "watchdog", "watchdog-log"
"""Names of threads."""


def limit_s(settings: Settings) -> float:
    """Returns the seconds for which the event loop may stand still."""
    return max(settings.lease_s * SHARE, MIN_S)


def watch(
    loop: asyncio.AbstractEventLoop, limit_s: float, end: Callable[[int], object] = os._exit
) -> threading.Thread:
    """Returns the thread that calls `end` once the loop ran nothing for `limit_s` seconds. After
    half of that it logs the stacks of all threads. It ends with the loop."""
    thread = threading.Thread(
        target=_watch, args=(loop, limit_s / NUM_TICKS, end), name=WATCHING, daemon=True
    )
    thread.start()
    return thread


def _watch(loop: asyncio.AbstractEventLoop, tick_s: float, end: Callable[[int], object]) -> None:
    ran = threading.Event()
    while True:
        ran.clear()
        try:
            loop.call_soon_threadsafe(ran.set)
        except RuntimeError:  # the loop is closed
            return
        num_ticks = 0
        while not ran.wait(tick_s):
            num_ticks += 1
            if num_ticks == NUM_TICKS // 2:
                _say("the event loop stands still", num_ticks * tick_s)
            if num_ticks == NUM_TICKS:
                _say(f"the event loop stands still; exit code {EXIT_CODE}", num_ticks * tick_s)
                end(EXIT_CODE)
                return
        time.sleep(tick_s)


def _say(message: str, seconds: float) -> None:
    """Logs the message, and returns within SAY_S."""
    saying = threading.Thread(target=_log, args=(message, seconds), name=LOGGING, daemon=True)
    saying.start()
    saying.join(SAY_S)


def _log(message: str, seconds: float) -> None:
    os.write(STDERR, f"{message} (for {seconds:.1f} s)\n".encode())  # needs no lock and no stacks
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {
        name: "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
        if (name := names.get(ident, str(ident))) not in (WATCHING, LOGGING)
    }
    get_logger().error(message, seconds=round(seconds, 1), stacks=stacks)


def main(settings: Settings) -> None:
    from services.orchestrator.app import create_service
    from services.orchestrator.store.store import Store
    from services.orchestrator.writable import RunsDirCheck

    if settings.redis_url is None:
        raise BadRequest(
            "HONE_REDIS_URL is not set: expected for example redis://127.0.0.1:6379/0 (`hone up` "
            "starts one itself)"
        )
    try:
        url = settings.redis_url.get_secret_value()
        store = Store(url, max_key_jobs=settings.max_key_jobs)
    except ValueError as error:  # the URL is not shown: it may hold a password
        raise BadRequest(
            f"HONE_REDIS_URL is not the URL of a Redis: {error}; expected for example "
            "redis://127.0.0.1:6379/0"
        ) from error

    async def opening() -> None:
        await store.open()
        await RunsDirCheck(settings.runs_dir).open()
        watch(asyncio.get_running_loop(), limit_s(settings))

    create_service(settings, store).run(settings.orchestrator_port, opening=opening)


if __name__ == "__main__":
    run_main("orchestrator", main)
