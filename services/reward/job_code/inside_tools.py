"""What a job's own code may use inside its worker: programs in sandboxes, functions in child
processes. Standard library only.

The service runs model-written code, in its own sandboxes: the worker's is the user's. The socket
carries one question at a time; questions of other threads meanwhile go together as the next one.

A function runs in a fresh child, a fork made for one call, whose memory already has function and
arguments; or in a warm child, which is kept, so that the function can cache. It is told the
function's name and arguments. Values come back as JSON and are never unpickled, because a child may
have read what a model wrote.
"""

from __future__ import annotations

import io
import json
import os
import select
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from services.reward.job_code.inside_children import Child, fork
from services.reward.sandbox.inside import frames
from services.reward.sandbox.inside.program import plain
from shared.rewards import Outcome

KEEP_CHARS = 2000


class Printed(io.TextIOBase):
    """A text stream of which only the end is kept."""

    def __init__(self) -> None:
        self._text = ""

    @classmethod
    def install(cls) -> Printed:
        """Returns what stands for stdout and stderr from now on."""
        printed = cls()
        sys.stdout = sys.stderr = printed  # pyright: ignore[reportAttributeAccessIssue]
        return printed

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        self._text = (self._text + text)[-KEEP_CHARS:]
        return len(text)

    def take(self) -> str:
        """Returns what was printed since the last time."""
        text, self._text = self._text, ""
        return text


MAX_TRACE_CHARS = 2000


@dataclass(frozen=True)
class _Call:
    index: int
    child: Child
    since: float


class Children:
    """`find` returns a function of the job's file by name; `on_fork` is called first in each
    child."""

    def __init__(
        self, find: Callable[[str], Callable[..., Any]], on_fork: Callable[[], None]
    ) -> None:
        self._find = find
        self._on_fork = on_fork
        self._warm: list[Child] = []

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

    def _fresh(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Child:
        return self._fork(lambda channel: frames.send(channel, _reply(function, arguments)))

    def _told(self, name: str, arguments: tuple[Any, ...]) -> Child:
        message = frames.pack({"name": name, "arguments": arguments})
        child = self._idle() or self._fork(self._serve)
        frames.send_bytes(child.channel.fileno(), message)
        return child

    def _idle(self) -> Child | None:
        while self._warm:
            child = self._warm.pop()
            if not os.waitpid(child.pid, os.WNOHANG)[0]:
                return child
            child.channel.close()  # it was killed since
        return None

    def _serve(self, channel: int) -> None:
        while (call := frames.receive(channel)) is not None:
            frames.send(channel, _reply(self._find(call["name"]), call["arguments"]))

    def _fork(self, work: Callable[[int], None]) -> Child:
        return fork(work, self._on_fork)


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


class WorkerTools:
    """Implements `shared.rewards.Tools`. `module` has the definitions of the job's file, `call` is
    the number of the message to answer next."""

    def __init__(self, channel: int, module: types.ModuleType) -> None:
        self.call = ""
        self._channel = channel
        self._turn = threading.Lock()
        self._lock = threading.Lock()  # guards the next line only
        self._asked: list[tuple[list[dict[str, Any]], Future[list[Outcome]]]] = []
        self._children = Children(lambda name: vars(module)[name], lambda: os.close(channel))

    def in_sandbox(self, programs: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        # A program that is not plain data fails here, and fails alone.
        plain = json.loads(json.dumps([dict(program) for program in programs], allow_nan=False))
        answer: Future[list[Outcome]] = Future()
        with self._lock:
            self._asked.append((plain, answer))
        with self._turn:
            if not answer.done():
                self._ask_all()
        return answer.result()

    def in_function(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        *,
        isolated: bool,
        timeout_s: float,
    ) -> list[Outcome]:
        return self._children.run(function, arguments, isolated=isolated, timeout_s=timeout_s)

    def _ask_all(self) -> None:
        with self._lock:
            asked, self._asked = self._asked, []
        execute = [programs for programs, _ in asked]
        frames.send(self._channel, {"execute": execute, "call": self.call})
        reply: dict[str, Any] = frames.receive(self._channel) or {
            "executions": ["the reward service is gone"] * len(asked),
            "call": self.call,
        }
        self.call = reply["call"]
        for (_, answer), executions in zip(asked, reply["executions"], strict=True):
            if isinstance(executions, str):
                answer.set_exception(ValueError(executions))
            else:
                answer.set_result([Outcome(**execution) for execution in executions])
