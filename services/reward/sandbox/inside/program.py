"""The forked child: gives up every right, runs one program, writes how it ended into its result
file. Standard library only.

From `exec` on everything in this process belongs to the program: it can change this code, and so
its own result, but nothing outside the process. The expected answer is not here, so there is
nothing to steal and nothing to compare with.
"""

from __future__ import annotations

import _thread
import atexit
import builtins
import contextlib
import gc
import io
import json
import linecache
import os
import random
import resource
import sys
import threading
import traceback
import types
from typing import Any, NoReturn

from services.reward.sandbox.inside import kernel

FILE = "program.py"
"""What a program's `__file__` is. There is no such file."""

KEEP_BYTES = 64 * 1024
"""Kept of each of stdout and stderr; a program that writes more is told so."""

RESULT_BYTES = 256 * 1024
FILE_BYTES = 16 << 20
PROCESSES = 40
"""And threads, of one program: contest programs start 32."""

MAX_DEPTH = 32
MAX_TRACE_CHARS = 8192
_SOURCES = (FILE, "expression")


Rlimits = dict[int, tuple[int, int]]
"""Soft and hard limit by `resource.RLIMIT_*`."""


def give_up_everything(
    files: list[int], limits: Rlimits, system_calls: kernel.Filter | None
) -> None:
    """Leaves the process with `files` as its descriptors 0, 1, 2, ..., these limits, no capability
    and only `system_calls`."""
    os.setsid()
    for number, fd in enumerate(files):
        os.dup2(fd, number, inheritable=number < 3)
    os.closerange(len(files), 1 << 16)
    bind(limits)
    if system_calls is not None:
        kernel.drop_capabilities()
        system_calls.install()


def standing_limits(*, files: int, processes: int | None) -> Rlimits:
    """Returns the limits that are the same for every program. `processes` None: no limit of
    ours."""
    limits = {
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    return clamp_limits(
        limits if processes is None else limits | {resource.RLIMIT_NPROC: processes}
    )


def bind(limits: Rlimits) -> None:
    for kind, limit in limits.items():
        resource.setrlimit(kind, limit)


def clamp_limits(limits: dict[int, int]) -> Rlimits:
    """Returns each limit, or what of it this process may still set."""
    allowed: Rlimits = {}
    for kind, limit in limits.items():
        most = resource.getrlimit(kind)[1]
        bound = limit if most == resource.RLIM_INFINITY else min(limit, most)
        allowed[kind] = bound, bound
    return allowed


def run(request: dict[str, Any], result_fd: int) -> NoReturn:
    """Runs `request["code"]`, then evaluates `request["expression"]` if there is one, and ends the
    process."""
    furnish(request["memory_mib"])
    try:
        outcome = _outcome(request)
        encoded = json.dumps(outcome, allow_nan=False).encode()
    except BaseException as error:  # whatever the program raises is how it ended
        encoded = json.dumps(_failure(error, request)).encode()
    os.write(result_fd, encoded)
    _finish()
    os._exit(0)


def make_ready_to_fork() -> None:
    """Leaves a slot's parent such that its children copy few of its pages."""
    gc.collect()
    gc.freeze()  # so that a collection in a child touches none of our objects
    kernel.give_back_free_memory()  # a child gets empty pages for less than copies of unused ones


def _outcome(request: dict[str, Any]) -> dict[str, Any]:
    main = types.ModuleType("__main__")
    main.__file__ = FILE
    sys.modules["__main__"] = main
    # Fork reseeds; a program that draws numbers should earn the same reward each time.
    random.seed(0)
    sys.argv = [_SOURCES[0]]
    main.__dict__.update(request["inputs"])
    try:
        exec(_compiled(request["code"], _SOURCES[0], "exec"), main.__dict__)
    except SystemExit as error:
        if request["expression"] is not None or error.code not in (None, 0):
            raise
        return {"end": "ok", "value": None}
    if request["expression"] is None:
        return {"end": "ok", "value": None}
    value = eval(_compiled(request["expression"].strip(), _SOURCES[1], "eval"), main.__dict__)
    return {"end": "ok", "value": plain(value)}


def _compiled(source: str, name: str, mode: str) -> Any:
    # So that tracebacks show the line.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    return compile(source, name, mode, dont_inherit=True)


def _failure(error: BaseException, request: dict[str, Any]) -> dict[str, Any]:
    if isinstance(error, MemoryError):
        return {"end": "memory", "trace": "MemoryError\n"}
    if isinstance(error, SystemExit):
        where = "" if request["expression"] is None else " before its expression was evaluated"
        return {
            "end": "error",
            "trace": f"SystemExit: the program ended itself with code {error.code!r:.80}{where}\n",
        }
    while (
        top := error.__traceback__
    ) is not None and top.tb_frame.f_code.co_filename not in _SOURCES:
        error.__traceback__ = top.tb_next  # our own frames tell the reader nothing
    try:
        trace = "".join(traceback.format_exception(error))
    except BaseException:  # the program's own `__str__`
        trace = f"{type(error).__name__}\n"
    return {"end": "error", "trace": trace[-MAX_TRACE_CHARS:]}


def _finish() -> None:
    """Ends as an interpreter would: waits for threads, runs the exit handlers, flushes the standard
    streams, also where the program has replaced them, and the files that its globals name."""
    for step in (threading._shutdown, atexit._run_exitfuncs):  # pyright: ignore[reportAttributeAccessIssue]
        with contextlib.suppress(BaseException):  # of the program's exit handlers
            step()
    named = list(getattr(sys.modules.get("__main__"), "__dict__", {}).values())
    files = [file for file in named if isinstance(file, io.IOBase)]
    for file in (*files, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(BaseException):  # of the program's own files
            file.flush()  # pyright: ignore[reportOptionalMemberAccess]


def plain(value: Any, depth: int = 0) -> Any:
    """Returns `value` as JSON has it; a tuple becomes a list. Exact types only: a subclass could
    lie about itself later.

    Raises TypeError or ValueError saying what is not plain data.
    """
    kind = type(value)
    if depth > MAX_DEPTH:
        raise ValueError(f"the value is nested deeper than {MAX_DEPTH}, or contains itself")
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"the value is {value}, which is not a finite number")
        return value
    if kind in (list, tuple):
        return [plain(part, depth + 1) for part in value]
    if kind is dict and all(type(key) is str for key in value):
        return {key: plain(part, depth + 1) for key, part in value.items()}
    what = "a dict with keys other than str" if kind is dict else f"of type {kind.__name__!r:.80}"
    raise TypeError(f"the value is {what}, which is not plain data")


_STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
_open = builtins.open


def furnish(memory_mib: int) -> None:
    """Gives a program `exit` and `quit`, /dev/stdin and its like, and whole numbers of any length
    as text, which its CPU time bounds. The stack of a thread is at most half of its memory:
    Python's own calls take none of it."""
    builtins.exit = builtins.quit = _exit  # pyright: ignore[reportAttributeAccessIssue]
    builtins.open = io.open = _opened
    sys.set_int_max_str_digits(0)
    most = memory_mib << 19
    threading.stack_size = lambda size=0: _thread.stack_size(min(size, most))


def _exit(code: Any = None) -> NoReturn:
    raise SystemExit(code)


def _opened(file: Any, *arguments: Any, **keywords: Any) -> Any:
    if isinstance(file, str | os.PathLike) and os.fspath(file) in _STREAMS:
        file = os.dup(_STREAMS[os.fspath(file)])
    return _open(file, *arguments, **keywords)
