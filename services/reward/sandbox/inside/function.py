"""Keeps a job's own reward function loaded and calls it. Runs with no rights, in its own sandbox. Standard library only.

First message: `{source, file, function, paths}`. Answer: `{parameters, any_keyword}`. Then calls: `{arguments}`, answered by
`{values}`. Either may be answered by `{error}`. Values are numbers or None; everything is checked again on the trusted side.
"""

from __future__ import annotations

import asyncio
import inspect
import linecache
import math
import os
import socket
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from services.reward.sandbox.inside import frames

MAX_ERROR_CHARS = 500


def serve(channel: socket.socket) -> None:
    os.chdir("/tmp")
    opening = frames.receive(channel)
    if opening is None:
        return
    sys.path += opening["paths"]
    function: Callable[..., Any] | None = None
    try:
        function = _load(opening)
        frames.send(channel, _signature(function))
    except BaseException as error:
        frames.send(channel, {"error": _explain(error, opening["file"])})
    while (call := frames.receive(channel)) is not None and function is not None:
        try:
            reply = {"values": _values(_result(function, call["arguments"]))}
        except BaseException as error:
            reply = {"error": _explain(error, opening["file"])}
        frames.send(channel, reply)


def _load(opening: dict[str, Any]) -> Callable[..., Any]:
    source, file, name = opening["source"], opening["file"], opening["function"]
    module = types.ModuleType("reward_functions")
    module.__file__ = file
    sys.modules[module.__name__] = module
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    function = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        raise LookupError(f"{file} defines no function {name!r}; it defines {', '.join(found) or 'none'}")
    return function


def _signature(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {
        "parameters": {p.name: p.default is p.empty for p in named},
        "any_keyword": any(p.kind is p.VAR_KEYWORD for p in parameters),
    }


def _result(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    result = function(**arguments)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _values(result: Any) -> list[float | None]:
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__iter__"):
        raise TypeError(f"it returned {_kind(result)}, expected a list of numbers")
    return [_number(value, position) for position, value in enumerate(result)]


def _number(value: Any, position: int) -> float | None:
    if value is None:
        return None
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"it returned {_kind(value)} for completion {position}, expected a number or None")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"it returned {number} for completion {position}, expected a finite number or None")
    return number


def _kind(value: Any) -> str:
    return f"{str(value)[:40]!r} ({type(value).__name__})"


def _explain(error: BaseException, file: str) -> str:
    """Returns "rewards.py line 12: KeyError: 'answr'"."""
    message = traceback.format_exception_only(error)[-1].strip()[:MAX_ERROR_CHARS]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines = [error.lineno]
    return f"{file} line {lines[-1]}: {message}" if lines else message
