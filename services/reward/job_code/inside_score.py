"""Scores batches: keeps a job's own reward loaded and calls it. Standard library only.

    service: {source, file, paths, function}   worker: {parameters, any_keyword, calls}
    service: {arguments, count, timeout_s}     worker: {results, stdout} or {error, stdout}
             {executions}                      before that, any number of times: {execute}

`arguments` are lists with one entry per completion. A result is `{value, detail}`, value None for
not applicable, or `{error}`. `execute` is a list of lists of programs, and `executions` has for
each of these a list of outcomes, or why it is refused.

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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from services.reward.job_code.inside_serve import (
    Child,
    Handler,
    elide,
    explain,
    find_definition,
    fork,
    number,
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
    """Implements `shared.rewards.Tools` with a worker's `handler`. `call` is the call that it works
    for."""

    def __init__(self, handler: Handler) -> None:
        self.call = ""
        self._handler = handler
        self._turn = threading.Lock()
        self._lock = threading.Lock()  # guards the next line only
        self._asked: list[tuple[list[dict[str, Any]], Future[list[Outcome]]]] = []
        self._warm: list[Child] = []

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
        if vars(self._handler.module).get(name) is not function:
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
            function = vars(self._handler.module)[call["name"]]
            frames.send(channel, _reply(function, call["arguments"]))

    def _fork(self, work: Callable[[int], None]) -> Child:
        return fork(work, lambda: os.close(self._handler.channel))

    def _ask_all(self) -> None:
        with self._lock:
            asked, self._asked = self._asked, []
        execute = [programs for programs, _ in asked]
        self._handler.send(self.call, answer={"execute": execute})
        gone = {"ask": {"executions": ["the reward service is gone"] * len(asked)}}
        reply: dict[str, Any] = frames.receive(self._handler.channel) or gone
        for (_, answer), executions in zip(asked, reply["ask"]["executions"], strict=True):
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


class Scorer(Handler):
    """`_call` is the job's function or method. It takes whole lists if `_is_batch`, else one
    completion's."""

    module_name = "reward_functions"
    _call: Callable[..., Any]
    _is_batch = True

    def load(self, opening: dict[str, Any]) -> dict[str, Any]:
        self._printed = OutputTail.install()
        Reward.tools = self._tools = WorkerTools(self)
        self.run_file(opening["source"])
        self._find(opening["function"])
        parameters = inspect.signature(self._call).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return {
            "parameters": {p.name: p.default is p.empty for p in named},
            "any_keyword": any(p.kind is p.VAR_KEYWORD for p in parameters),
            "calls": "batch"
            if self._is_batch
            else "together"
            if inspect.iscoroutinefunction(self._call)
            else "one by one",
        }

    def take(self, message: dict[str, Any]) -> None:
        self._tools.call = message["call"]
        answer: dict[str, Any]
        try:
            answer = {"results": self._results(**message["ask"])}
        except BaseException as error:  # the job's function
            answer = {"error": explain(error, self.file)}
        self.send(message["call"], answer=answer | {"stdout": self._printed.take()})

    def _find(self, name: str) -> None:
        """Finds the function or class of that name. Raises LookupError if there is none."""
        target = find_definition(self.module, name, "function or class")
        if not inspect.isclass(target):
            self._call = target
            return
        instance = target()
        known = ("score", "score_batch")
        methods = [method for method in known if callable(getattr(instance, method, None))]
        if len(methods) > 1:
            raise LookupError(
                f"class {name!r} in {self.file} has both score and score_batch, and only one would "
                "be called; give the other another name"
            )
        if not methods:
            raise LookupError(
                f"class {name!r} in {self.file} has neither score(prompt, completion, ...) nor "
                "score_batch(prompts, completions, ...)"
            )
        self._call, self._is_batch = getattr(instance, methods[0]), methods[0] == "score_batch"

    def _results(
        self, arguments: dict[str, list[Any]], count: int, timeout_s: float
    ) -> list[dict[str, Any]]:
        if "environments" in arguments:
            arguments["environments"] = list(map(_environment, arguments["environments"]))
        if self._is_batch:
            values = _finished(self._call(**arguments))
            if isinstance(values, str | bytes | dict) or not hasattr(values, "__iter__"):
                raise TypeError(f"it returned {elide(values)}, expected a list of numbers")
            return [
                _result(lambda value=value: value, position, self.file)
                for position, value in enumerate(values)
            ]
        items = [_item(arguments, position) for position in range(count)]
        if inspect.iscoroutinefunction(self._call):
            return asyncio.run(self._together(items, timeout_s))
        return [
            _result(lambda item=item: self._call(**item), position, self.file)
            for position, item in enumerate(items)
        ]

    async def _together(
        self, items: list[dict[str, Any]], timeout_s: float
    ) -> list[dict[str, Any]]:
        async def one(position: int, item: dict[str, Any]) -> dict[str, Any]:
            try:
                async with asyncio.timeout(timeout_s) as deadline:
                    value = await self._call(**item)
            except Exception as error:  # the job's function; it concerns this completion alone
                late = isinstance(error, TimeoutError) and deadline.expired()
                return {
                    "error": f"it did not return within {timeout_s:g} s"
                    if late
                    else explain(error, self.file),
                    "late": late,
                }
            return _result(lambda: value, position, self.file)

        return await asyncio.gather(*(one(position, item) for position, item in enumerate(items)))


def serve(channel: int) -> None:
    Scorer(channel).serve()


def _environment(given: Any) -> Any:
    is_one = isinstance(given, dict) and given.keys() == {ENDED}
    return FinishedEnvironment(given[ENDED]) if is_one else given


def _item(arguments: dict[str, list[Any]], position: int) -> dict[str, Any]:
    return {SINGULAR.get(name, name): values[position] for name, values in arguments.items()}


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
