"""Decodes the text that a program wrote into plain data, and makes an `Execution` of the facts
about its end. Pure. Everything that the program could have written is checked here."""

from __future__ import annotations

import json
import math
import re
import signal
from dataclasses import dataclass
from typing import Any, Literal

from services.reward.sandbox.inside.program import KEEP_BYTES
from shared.wire import ExecuteRequest, Execution

MAX_DEPTH = 64

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A string of JSON, even if its end is missing, so that no text is read twice."""


class DecodeError(Exception):
    """A text is not plain data. The message says why."""


def decode(text: bytes, *, max_items: int) -> Any:
    """Returns the value of a JSON text. Raises DecodeError for any other text, for more than
    `max_items` values (before it makes any), for values nested deeper than `MAX_DEPTH`, and for
    numbers that are not finite."""
    if _items(text) > max_items and _items(_STRING.sub(b"", text)) > max_items:
        raise DecodeError(f"more than {max_items} values")
    try:
        value = json.loads(text)
        _check(value, 0)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"{type(error).__name__}: {error}") from None
    return value


def _items(text: bytes) -> int:
    """Returns a lower bound of the number of values in a JSON text without strings. Marks in
    strings count too."""
    return sum(text.count(mark) for mark in (b",", b"[", b"{"))


def _check(value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is no finite number")
    elif isinstance(value, list | dict):
        for part in value if isinstance(value, list) else value.values():
            _check(part, depth + 1)


Ending = Literal["ok", "runtime_error", "time_limit", "memory_limit", "output_limit"]

MAX_ITEMS = 100_000
"""Most items of a result: 256 KiB of JSON as Python writes it hold fewer."""


@dataclass(frozen=True)
class ProgramExit:
    """How a program ended, as its slot saw it.

    `exit` is the code, or the negative number of a signal. `limit` is the limit at which the slot
    ended it. `memory` says whose memory ran out if the program was killed; "unknown" without a
    cgroup. `overflow`: it wrote more than is kept. `result` is the text that it left as its result,
    which may be any text.
    """

    exit: int
    limit: Literal["wall", "cpu", "idle"] | None
    wall_s: float
    cpu_s: float
    overflow: bool
    stdout: str
    stderr: str
    result: str
    memory: Literal["unknown", "enough", "own limit", "host"] = "unknown"
    peak_bytes: int = 0
    began: bool = True


def execution(facts: ProgramExit, request: ExecuteRequest) -> Execution:
    """Returns the verdict on a program that ended as `facts` say."""
    verdict, value, trace = _verdict(facts, request)
    stderr = facts.stderr + ("\n" if facts.stderr and trace else "") + trace
    return Execution(
        verdict=verdict,
        value=value,
        stdout=facts.stdout,
        stderr=stderr.encode("utf-8", "replace").decode(),
        wall_s=round(facts.wall_s, 6),
        cpu_s=round(facts.cpu_s, 6),
    )


def infrastructure_fault(facts: ProgramExit, request: ExecuteRequest, *, is_last: bool) -> str:
    """Returns what the sandbox or its host did to a program, so that the program has no verdict; ""
    if they did nothing. Only failures that are known to be theirs count: a policy would learn to
    cause any other, because a missing reward is better for it than 0. So a program that used much
    memory when its host ran out of it, twice in a row, has caused that itself."""
    if not facts.began:
        return f"a program could not be started: {facts.stderr.strip()[-200:] or facts.exit}"
    if facts.exit == -signal.SIGKILL and facts.memory == "host":
        if is_last and _short(facts, request):
            return ""
        return "a program was killed because its host, or the service's cgroup, ran out of memory"
    return ""


def is_unexplained_kill(facts: ProgramExit, request: ExecuteRequest) -> bool:
    """Returns whether a program was killed, but at none of its limits. It may have caused that
    itself (by a CPU limit of its own, or by exec in a process too small), or another process on the
    host killed it. A second run tells which, because only the program's own doing happens twice."""
    return facts.exit == -signal.SIGKILL and not facts.limit and not _short(facts, request)


def _short(facts: ProgramExit, request: ExecuteRequest) -> bool:
    """Returns whether a killed program was short of memory. Without a cgroup, or if the host ran
    out of memory, a program that used much of its memory counts as short of it."""
    if facts.memory in ("unknown", "host"):
        return facts.peak_bytes >= request.memory_mib << 18
    return facts.memory == "own limit"


def _verdict(facts: ProgramExit, request: ExecuteRequest) -> tuple[Ending, Any, str]:
    code = facts.exit
    killed = code == -signal.SIGKILL
    by_rlimit = killed and facts.cpu_s >= request.cpu_s and facts.memory != "own limit"
    used = f"{facts.cpu_s:.1f} s of CPU"
    late = ""
    if facts.limit == "wall":
        late = f"stopped after {request.timeout_s:g} s, of which {used}"
    elif facts.limit == "idle":
        late = f"stopped after {facts.wall_s:.1f} s, of which {used}; a program may idle for "
        late += f"{request.idle_s:g} s"
    elif facts.limit == "cpu" or code == -signal.SIGXCPU or by_rlimit:
        late = f"used {used}, {request.cpu_s:g} s are allowed"
    if late:
        return "time_limit", None, f"TimeLimit: {late}\n"
    if facts.overflow and not _is_beside(facts, request):
        return "output_limit", None, "OutputLimit: more than 64 KiB were written\n"
    if killed and _short(facts, request):
        return "memory_limit", None, "MemoryLimit: killed by the kernel\n"
    if code < 0:
        return "runtime_error", None, f"Killed: {_signal_name(-code)}\n"
    return _outcome(facts.result, code, request)


def _is_beside(facts: ProgramExit, request: ExecuteRequest) -> bool:
    """Returns whether a program that wrote too much can be judged all the same: it has a value, or
    all of its stdout was kept."""
    is_whole = request.expression is not None or len(facts.stdout.encode()) < KEEP_BYTES
    return is_whole and facts.exit == 0 and _outcome(facts.result, 0, request)[0] == "ok"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _outcome(result: str, code: int, request: ExecuteRequest) -> tuple[Ending, Any, str]:
    if not result:
        if code == 0 and request.expression is None:
            return "ok", None, ""
        trace = f"Exited: the program ended its process with code {code}, without a result\n"
        return "runtime_error", None, trace
    try:
        outcome = decode(result.encode(), max_items=MAX_ITEMS)
        end, value, trace = outcome["end"], outcome.get("value"), str(outcome.get("trace", ""))
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate could not be sent on
    except (DecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        trace = "BadResult: the value is not plain data of at most 256 KiB "
        return "runtime_error", None, f"{trace}({type(error).__name__})\n"
    if end == "memory":
        return "memory_limit", None, trace
    return ("ok", value, "") if end == "ok" else ("runtime_error", None, trace)
