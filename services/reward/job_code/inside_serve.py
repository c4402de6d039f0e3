"""What every worker does inside its sandbox: loads the job's file, then takes the messages of the
service. Runs with no rights. Standard library only.

    service: {call, ask: {source, file, paths, ...}}    worker: {call, answer}, {error} if it failed
    then any number of messages in any order, of all calls:
    service: {call, ask}                                worker: {call, answer} or {call, lost}
             {call, end}                                        {call, lost}

A call is what the service opens with a name of its own: one batch to score (`inside_score.py`), or
one episode to play (`inside_play.py`), where the fields of `ask` and `answer` are. `lost` says why
a call is over. Everything is checked again on the trusted side.

Also here: the faults of a job's file with their line, and child processes, each with a socket.
"""

from __future__ import annotations

import linecache
import math
import os
import select
import signal
import socket
import sys
import traceback
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from services.reward.sandbox.inside import frames
from shared.rewards import FunctionConfig, Outcome, Reward, SandboxConfig

MAX_ERROR_CHARS = 500
IN_SANDBOX = (Reward, Outcome, SandboxConfig, FunctionConfig)
"""What `import hone` has in here."""


class Handler(ABC):
    """Answers the calls of one worker. `module` has the definitions of the job's file."""

    module_name = ""

    def __init__(self, channel: int) -> None:
        self.channel = channel
        self.poller = select.poll()
        self.module = types.ModuleType(self.module_name)
        self.file = ""

    @abstractmethod
    def load(self, opening: dict[str, Any]) -> dict[str, Any]:
        """Returns what the service is told of the file. Raises whatever the file raises."""

    @abstractmethod
    def take(self, message: dict[str, Any]) -> None:
        """Takes an `ask` or `end`."""

    def attend(self, fd: int, events: int) -> None:
        """Takes events of another descriptor that it has registered with `poller`."""
        raise NotImplementedError

    def send(self, call: str, **answer: Any) -> None:
        frames.send(self.channel, {"call": call, **answer})

    def run_file(self, source: str) -> None:
        """Fills `module` with what the file defines. Raises whatever the file raises."""
        self.module.__file__ = self.file
        sys.modules[self.module.__name__] = self.module
        sys.modules["hone"] = _hone()
        lines = source.splitlines(keepends=True)
        linecache.cache[self.file] = (len(source), None, lines, self.file)
        exec(compile(source, self.file, "exec", dont_inherit=True), self.module.__dict__)

    def serve(self) -> None:
        """Loads the file and answers until the service closes the channel."""
        os.chdir("/tmp")
        message = frames.receive(self.channel)
        if message is None:
            return
        call, opening = message["call"], message["ask"]
        sys.path += opening["paths"]
        self.file = opening["file"]
        try:
            loaded = self.load(opening)
        except BaseException as error:  # the job's file, run here for the first time
            self.send(call, answer={"error": explain(error, self.file)})
            return
        self.send(call, answer=loaded)
        self.poller.register(self.channel, select.POLLIN)
        while True:
            for fd, events in self.poller.poll():
                if fd != self.channel:
                    self.attend(fd, events)
                elif (message := frames.receive(self.channel)) is not None:
                    self.take(message)
                else:
                    return


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
    if isinstance(error, ModuleNotFoundError) or "relative import" in message:
        message += (
            f"; of your own files {file} alone travels with the job. Write what it imports from a "
            "module of yours into it, or install a package where the reward service runs"
        )
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
