"""Child processes of a worker of a job's own code, each with a socket to the worker. Standard
library only."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Child:
    pid: int
    channel: socket.socket

    def end(self) -> int:
        """Ends it with its process group. Returns its exit code, or the negative number of the
        signal that ended it."""
        for kill in (os.killpg, os.kill):  # its group, and itself if it has not made one yet
            with suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.channel.close()
        return os.waitstatus_to_exitcode(status)


def fork(work: Callable[[int], None], on_fork: Callable[[], None]) -> Child:
    """Returns a child that calls `on_fork`, then `work` with the descriptor of its socket, and
    ends."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return Child(pid, ours)
    try:
        os.setsid()
        ours.close()
        on_fork()
        work(theirs.fileno())
    finally:
        os._exit(0)
