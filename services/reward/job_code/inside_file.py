"""A job's file inside its worker's sandbox: run once, as a module; its faults with their line. And
child processes of the worker, each with a socket to it. Standard library only."""

from __future__ import annotations

import linecache
import math
import os
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shared.rewards import FunctionConfig, Outcome, Reward, SandboxConfig

MAX_ERROR_CHARS = 500
IN_SANDBOX = (Reward, Outcome, SandboxConfig, FunctionConfig)
"""What `import hone` has in here."""


def run_file(module: types.ModuleType, source: str, file: str) -> None:
    """Fills `module` with what the file defines. Raises whatever the file raises."""
    module.__file__ = file
    sys.modules[module.__name__] = module
    sys.modules["hone"] = _hone()
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)


def find_definition(module: types.ModuleType, name: str, what: str) -> Any:
    """Returns the function or class of that name. Raises LookupError, which calls it `what`."""
    target = getattr(module, name, None)
    if callable(target):
        return target
    mine = [
        key
        for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    raise LookupError(
        f"{module.__file__} defines no {what} {name!r}; it defines {', '.join(mine) or 'none'}"
    )


def explain(error: BaseException, file: str) -> str:
    """Returns "rewards.py line 12: KeyError: 'answr'"."""
    message = traceback.format_exception_only(error)[-1].strip()[:MAX_ERROR_CHARS]
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == file
    ]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines = [error.lineno]
    return f"{file} line {lines[-1]}: {message}" if lines else message


def elide(value: Any) -> str:
    return f"{str(value)[:40]!r} ({type(value).__name__})"


def number(value: Any, name: str, where: str = "") -> float | None:
    """Returns the value that `name` returned. Raises TypeError or ValueError unless it is None or a
    finite number."""
    if value is None:
        return None
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} returned {elide(value)}{where}, expected a number or None")
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"{name} returned {found}{where}, expected a finite number or None")
    return found


def _hone() -> types.ModuleType:
    """Returns what `import hone` gives in here: the base class, and no client."""
    module = types.ModuleType(
        "hone", "What of Hone exists inside the sandbox: the base class of rewards."
    )
    module.__dict__.update({kind.__name__: kind for kind in IN_SANDBOX}, RewardEnvironment=Reward)
    return module


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
