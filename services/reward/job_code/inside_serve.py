"""Keeps a job's own reward loaded and calls it. Runs with no rights, in its own sandbox. Standard
library only.

    service: {source, file, function, paths}   worker: {parameters, any_keyword, calls} or {error}
    service: {arguments, count, timeout_s}     worker: {results, stdout} or {error, stdout}
             {executions}                      before that, any number of times: {execute}

`arguments` are lists with one entry per completion. A result is `{value, detail}`, value None for
not applicable, or `{error}`. `execute` is a list of lists of programs, and `executions` has for
each of these a list of outcomes, or why it is refused. Each message of the service has a number,
`call`, which its answer repeats. Everything is checked again on the trusted side.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import types
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from services.reward.job_code.inside_file import explain, found, number, run_file, shown
from services.reward.job_code.inside_tools import Printed, WorkerTools
from services.reward.sandbox.inside import frames
from shared.rewards import Reward

ENDED = "__ended__"
"""The one key of an environment's attributes, which tells them from a column."""


class Ended:
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
class Own:
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
    printed = Printed.install()
    module = types.ModuleType("reward_functions")
    Reward.tools = tools = WorkerTools(channel, module)
    own: Own | None = None
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


def _load(module: types.ModuleType, opening: dict[str, Any]) -> Own:
    """Returns the function or class of that name, after running the file."""
    file, name = opening["file"], opening["function"]
    run_file(module, opening["source"], file)
    target = found(module, name, "function or class")
    if not inspect.isclass(target):
        return Own(target, True, file)
    instance = target()
    methods = [name for name in ("score", "score_batch") if callable(getattr(instance, name, None))]
    if len(methods) > 1:
        raise LookupError(
            f"class {name!r} in {file} has both score and score_batch, and only one would be "
            "called; give the other another name"
        )
    for method in methods:
        return Own(getattr(instance, method), method == "score_batch", file)
    raise LookupError(
        f"class {name!r} in {file} has neither score(prompt, completion, ...) nor "
        "score_batch(prompts, completions, ...)"
    )


def _results(own: Own, message: dict[str, Any]) -> list[dict[str, Any]]:
    arguments, count = message["arguments"], message["count"]
    if "environments" in arguments:
        arguments["environments"] = list(map(_environment, arguments["environments"]))
    if own.batch:
        values = _finished(own.call(**arguments))
        if isinstance(values, str | bytes | dict) or not hasattr(values, "__iter__"):
            raise TypeError(f"it returned {shown(values)}, expected a list of numbers")
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
    return Ended(given[ENDED]) if is_one else given


def _item(arguments: dict[str, list[Any]], position: int) -> dict[str, Any]:
    return {SINGULAR.get(name, name): values[position] for name, values in arguments.items()}


async def _together(
    own: Own, items: list[dict[str, Any]], timeout_s: float
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
                    f"it returned {shown(value)} for completion {position}, expected a number, "
                    "None, or (number, text)"
                )
            value, detail = value
        return {"value": number(value, "it", f" for completion {position}"), "detail": detail}
    except Exception as error:  # the job's function, or what it returned
        return {"error": explain(error, file)}
