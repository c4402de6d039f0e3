"""Processes that end with their parent, however it ends: a killed service leaves none behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def ending_with_parent() -> Callable[[], None]:
    """Returns a `preexec_fn` for `Popen`: the child gets SIGTERM when the thread that started it
    ends, so start it from a thread that lives as long as the process."""
    return _asker(os.getpid())  # made before the fork, after which little may run


def end_with_parent(parent: int) -> None:
    """Asks the kernel to send this process SIGTERM when its parent, process `parent`, ends; sends
    it now if the parent is gone already."""
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


def _asker(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None, use_errno=True)

    def ask() -> None:
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) == -1:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return ask
