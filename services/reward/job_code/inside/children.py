"""Runs a job's own functions in children of its worker, each with a time limit. Standard library
only.

A fresh child is a fork made for one call, which needs nothing sent: function and arguments are in
its memory. A warm child is kept, is told a function's name and arguments, and so keeps what the
function caches. Values come back as JSON, never pickled: a child may have read what a model wrote.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from services.reward.job_code.inside.printed import Printed
from services.reward.sandbox.inside import frames
from services.reward.sandbox.inside.program import plain
from shared.rewards import Outcome

MAX_TRACE_CHARS = 2000


@dataclass(frozen=True)
class _Child:
    pid: int
    channel: socket.socket

    def end(self) -> None:
        for kill in (os.killpg, os.kill):  # its group, and itself if it has not made one yet
            with suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.channel.close()


@dataclass(frozen=True)
class _Call:
    index: int
    child: _Child
    since: float


class Children:
    """`find` returns a function of the job's file by name; `on_fork` is called first in each
    child."""

    def __init__(
        self, find: Callable[[str], Callable[..., Any]], on_fork: Callable[[], None]
    ) -> None:
        self._find = find
        self._on_fork = on_fork
        self._warm: list[_Child] = []

    def run(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        *,
        isolated: bool,
        timeout_s: float,
    ) -> list[Outcome]:
        """Returns one outcome for each tuple of arguments."""
        name = "" if isolated else self._name_of(function)
        at_once = len(os.sched_getaffinity(0))
        outcomes: list[Outcome] = [Outcome("runtime_error")] * len(arguments)
        waiting = list(range(len(arguments)))[::-1]
        running: dict[int, _Call] = {}
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    index = waiting.pop()
                    child = (
                        self._fresh(function, arguments[index])
                        if isolated
                        else self._told(name, arguments[index])
                    )
                    running[child.channel.fileno()] = _Call(index, child, time.monotonic())
                for call, reply in _finished(running, timeout_s):
                    outcomes[call.index] = _outcome(call, reply, timeout_s)
                    if isolated or not isinstance(reply, dict):
                        call.child.end()
                    else:
                        self._warm.append(call.child)
        finally:
            for call in running.values():
                call.child.end()
        return outcomes

    def _name_of(self, function: Callable[..., Any]) -> str:
        name = getattr(function, "__name__", "")
        try:
            found = self._find(name)
        except LookupError:
            found = None
        if found is not function:
            raise ValueError(
                f"{function!r} is not defined at the top of your file; a warm process takes only "
                "what is (isolated=True)"
            )
        return name

    def _fresh(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> _Child:
        return self._fork(lambda channel: frames.send(channel, _reply(function, arguments)))

    def _told(self, name: str, arguments: tuple[Any, ...]) -> _Child:
        message = frames.pack({"name": name, "arguments": arguments})
        child = self._idle() or self._fork(self._serve)
        frames.send_bytes(child.channel.fileno(), message)
        return child

    def _idle(self) -> _Child | None:
        while self._warm:
            child = self._warm.pop()
            if not os.waitpid(child.pid, os.WNOHANG)[0]:
                return child
            child.channel.close()  # it was killed since
        return None

    def _serve(self, channel: int) -> None:
        while (call := frames.receive(channel)) is not None:
            frames.send(channel, _reply(self._find(call["name"]), call["arguments"]))

    def _fork(self, work: Callable[[int], None]) -> _Child:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid:
            theirs.close()
            return _Child(pid, ours)
        try:
            os.setsid()
            ours.close()
            self._on_fork()
            work(theirs.fileno())
        finally:
            os._exit(0)


def _finished(running: dict[int, _Call], timeout_s: float) -> list[tuple[_Call, Any]]:
    """Waits until calls are done or late; takes them out of `running` and returns them with their
    reply, TimeoutError for a late one, None for one whose process ended."""
    poller = select.poll()
    for fd in running:
        poller.register(fd, select.POLLIN)
    first_late = min(call.since for call in running.values()) + timeout_s
    ready = [fd for fd, _ in poller.poll(max(first_late - time.monotonic(), 0.0) * 1000)]
    done: list[tuple[_Call, Any]] = []
    for fd in ready:
        call = running.pop(fd)
        try:
            done.append((call, frames.receive(call.child.channel.fileno())))
        except (OSError, ValueError):
            done.append((call, None))
    now = time.monotonic()
    late = [fd for fd, call in running.items() if now >= call.since + timeout_s]
    return done + [(running.pop(fd), TimeoutError()) for fd in late]


def _reply(function: Callable[..., Any], arguments: Sequence[Any]) -> dict[str, Any]:
    start_cpu_s = time.process_time()
    printed = Printed.install()
    try:
        reply: dict[str, Any] = {"verdict": "ok", "value": plain(function(*arguments))}
    except MemoryError:
        reply = {"verdict": "memory_limit", "stderr": "MemoryError\n"}
    except BaseException as error:  # the job's own code: whatever it raises is its answer
        reply = {
            "verdict": "runtime_error",
            "stderr": "".join(traceback.format_exception(error))[-MAX_TRACE_CHARS:],
        }
    return reply | {"stdout": printed.take(), "cpu_s": time.process_time() - start_cpu_s}


def _outcome(call: _Call, reply: Any, timeout_s: float) -> Outcome:
    wall_s = time.monotonic() - call.since
    if isinstance(reply, TimeoutError):
        return Outcome(
            "time_limit", stderr=f"TimeLimit: stopped after {timeout_s:g} s\n", wall_s=wall_s
        )
    if not isinstance(reply, dict):
        return Outcome(
            "runtime_error", stderr="Exited: its process ended without a result\n", wall_s=wall_s
        )
    return Outcome(**reply, wall_s=wall_s)
