"""Keeps a job's own reward loaded and calls it. Runs with no rights, in its own sandbox. Standard
library only.

    service: {source, file, function, paths}   worker: {parameters, any_keyword, calls} or {error}
    service: {arguments, count, timeout_s}     worker: {results, stdout} or {error, stdout}
             {executions}                      before that, any number of times: {execute}

`arguments` are lists with one entry per completion. A result is `{value, detail}`, value None for
not applicable, or `{error}`. `execute` is a list of lists of programs, and `executions` has for
each of these a list of outcomes, or why it is refused. Each message of the service has a number,
`call`, which its answer repeats. Everything is checked again on the trusted side.

What a job's own code may use: programs in sandboxes, functions in child processes. The service runs
model-written code, in its own sandboxes: the worker's is the user's. The socket carries one
question at a time; questions of other threads meanwhile go together as the next one.

A function runs in a fresh child, a fork made for one call, whose memory already has function and
arguments; or in a warm child, which is kept, so that the function can cache. It is told the
function's name and arguments. Values come back as JSON and are never unpickled, because a child may
have read what a model wrote.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import os
import select
import sys
import threading
import time
import traceback
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from services.reward.job_code.inside_file import (
    Child,
    elide,
    explain,
    find_definition,
    fork,
    number,
    run_file,
)
from services.reward.sandbox.inside import frames
from services.reward.sandbox.inside.program import plain
from shared.rewards import Outcome, Reward

KEEP_CHARS = 2000


class OutputTail(io.TextIOBase):
    """A text stream of which only the end is kept."""

    def __init__(self) -> None:
        self._text = ""

    @classmethod
    def install(cls) -> OutputTail:
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
                for call, reply in _replies_of_finished(running, timeout_s):
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


def _replies_of_finished(running: dict[int, _Call], timeout_s: float) -> list[tuple[_Call, Any]]:
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
    printed = OutputTail.install()
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


ENDED = "__ended__"
"""The one key of an environment's attributes, which tells them from a column."""


class FinishedEnvironment:
    """An environment as it was at the end of a conversation: the attributes that are plain data."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(self.__dict__) or "none"
        raise AttributeError(
            f"the environment's attribute {name!r} is not plain data, or missing; a reward "
            f"function gets: {known}"
        )


SINGULAR = {"prompts": "prompt", "completions": "completion"}


@dataclass(frozen=True)
class LoadedFunction:
    """What the job's file defines. `call` takes whole lists if `batch`, else one completion's."""

    call: Callable[..., Any]
    batch: bool
    file: str

    def signature(self) -> dict[str, Any]:
        parameters = inspect.signature(self.call).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return {
            "parameters": {p.name: p.default is p.empty for p in named},
            "any_keyword": any(p.kind is p.VAR_KEYWORD for p in parameters),
            "calls": "batch"
            if self.batch
            else "together"
            if inspect.iscoroutinefunction(self.call)
            else "one by one",
        }


def serve(channel: int) -> None:
    os.chdir("/tmp")
    opening = frames.receive(channel)
    if opening is None:
        return
    sys.path += opening["paths"]
    printed = OutputTail.install()
    module = types.ModuleType("reward_functions")
    Reward.tools = tools = WorkerTools(channel, module)
    own: LoadedFunction | None = None
    reply: dict[str, Any]
    try:
        own = _load(module, opening)
        reply = own.signature()
    except BaseException as error:  # the job's file, run here for the first time
        reply = {"error": explain(error, opening["file"])}
    frames.send(channel, reply | {"call": opening["call"]})
    while (message := frames.receive(channel)) is not None and own is not None:
        tools.call = message["call"]
        try:
            reply = {"results": _results(own, message)}
        except BaseException as error:  # the job's function
            reply = {"error": explain(error, own.file)}
        frames.send(channel, reply | {"stdout": printed.take(), "call": tools.call})


def _load(module: types.ModuleType, opening: dict[str, Any]) -> LoadedFunction:
    """Returns the function or class of that name, after running the file."""
    file, name = opening["file"], opening["function"]
    run_file(module, opening["source"], file)
    target = find_definition(module, name, "function or class")
    if not inspect.isclass(target):
        return LoadedFunction(target, True, file)
    instance = target()
    methods = [name for name in ("score", "score_batch") if callable(getattr(instance, name, None))]
    if len(methods) > 1:
        raise LookupError(
            f"class {name!r} in {file} has both score and score_batch, and only one would be "
            "called; give the other another name"
        )
    for method in methods:
        return LoadedFunction(getattr(instance, method), method == "score_batch", file)
    raise LookupError(
        f"class {name!r} in {file} has neither score(prompt, completion, ...) nor "
        "score_batch(prompts, completions, ...)"
    )


def _results(own: LoadedFunction, message: dict[str, Any]) -> list[dict[str, Any]]:
    arguments, count = message["arguments"], message["count"]
    if "environments" in arguments:
        arguments["environments"] = list(map(_environment, arguments["environments"]))
    if own.batch:
        values = _finished(own.call(**arguments))
        if isinstance(values, str | bytes | dict) or not hasattr(values, "__iter__"):
            raise TypeError(f"it returned {elide(values)}, expected a list of numbers")
        return [
            _result(lambda value=value: value, position, own.file)
            for position, value in enumerate(values)
        ]
    items = [_item(arguments, position) for position in range(count)]
    if inspect.iscoroutinefunction(own.call):
        return asyncio.run(_together(own, items, message["timeout_s"]))
    return [
        _result(lambda item=item: own.call(**item), position, own.file)
        for position, item in enumerate(items)
    ]


def _environment(given: Any) -> Any:
    is_one = isinstance(given, dict) and given.keys() == {ENDED}
    return FinishedEnvironment(given[ENDED]) if is_one else given


def _item(arguments: dict[str, list[Any]], position: int) -> dict[str, Any]:
    return {SINGULAR.get(name, name): values[position] for name, values in arguments.items()}


async def _together(
    own: LoadedFunction, items: list[dict[str, Any]], timeout_s: float
) -> list[dict[str, Any]]:
    async def one(position: int, item: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                value = await own.call(**item)
        except Exception as error:  # the job's function; it concerns this completion alone
            late = isinstance(error, TimeoutError) and deadline.expired()
            return {
                "error": f"it did not return within {timeout_s:g} s"
                if late
                else explain(error, own.file),
                "late": late,
            }
        return _result(lambda: value, position, own.file)

    return await asyncio.gather(*(one(position, item) for position, item in enumerate(items)))


def _finished(result: Any) -> Any:
    async def wait(work: Awaitable[Any]) -> Any:
        return await work

    return asyncio.run(wait(result)) if inspect.isawaitable(result) else result


def _result(value_of: Callable[[], Any], position: int, file: str) -> dict[str, Any]:
    """Returns what one completion gets; an exception, or a value of another kind, concerns this one
    alone."""
    try:
        value, detail = value_of(), ""
        if isinstance(value, tuple):
            if len(value) != 2 or not isinstance(value[1], str):
                raise TypeError(
                    f"it returned {elide(value)} for completion {position}, expected a number, "
                    "None, or (number, text)"
                )
            value, detail = value
        return {"value": number(value, "it", f" for completion {position}"), "detail": detail}
    except Exception as error:  # the job's function, or what it returned
        return {"error": explain(error, file)}
