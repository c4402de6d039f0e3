"""Facts about an ended job -> `Execution`. Pure. Everything the program could have written is
checked here again."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from typing import Any, Literal

from shared.wire import ExecuteRequest, Execution

Ending = Literal["ok", "runtime_error", "time_limit", "memory_limit", "output_limit"]

MAX_DEPTH = 64
LEAST_RLIMIT_CPU_S = 0.5
"""A program can set itself a limit of CPU time, of a second at least, at which the kernel kills it.
The kernel counts that second in ticks, which on a busy machine come to more than was used."""


@dataclass(frozen=True)
class Facts:
    """How a program ended, as its slot saw it.

    `exit` is the code, or the negative number of a signal; `limit` is the one that ended it. `ooms`
    is how often memory ran out, None where nobody knows or it was not killed. `overflow`: it wrote
    more than is kept. `result` is what it left as its result, which may be anything.
    """

    exit: int
    limit: Literal["wall", "cpu"] | None
    wall_s: float
    cpu_s: float
    overflow: bool
    stdout: str
    stderr: str
    result: str
    ooms: int | None = None
    peak_bytes: int = 0
    began: bool = True


def execution(facts: Facts, request: ExecuteRequest) -> Execution:
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


def killed_from_outside(facts: Facts, request: ExecuteRequest) -> bool:
    """Returns whether a job was ended by neither itself nor one of its limits: then nothing can be
    said about its program.

    A program cannot cause that (`missing` would serve it better than 0): pid 1 of a namespace
    is out of reach of what runs in it, and what its limits do is known. Where no cgroup tells, a
    job that used much memory was killed for that.
    """
    if facts.exit != -signal.SIGKILL or facts.limit or facts.cpu_s >= LEAST_RLIMIT_CPU_S:
        return False
    if facts.ooms is not None:
        return facts.ooms == 0
    return facts.peak_bytes < request.memory_mib << 18


def _verdict(facts: Facts, request: ExecuteRequest) -> tuple[Ending, Any, str]:
    code = facts.exit
    if facts.limit == "wall":
        return (
            "time_limit",
            None,
            f"TimeLimit: stopped after {request.timeout_s:g} s, of which {facts.cpu_s:.1f} s of "
            "CPU\n",
        )
    by_rlimit = code == -signal.SIGKILL and facts.cpu_s >= LEAST_RLIMIT_CPU_S and not facts.ooms
    if facts.limit == "cpu" or code == -signal.SIGXCPU or by_rlimit:
        return (
            "time_limit",
            None,
            f"TimeLimit: used {facts.cpu_s:.1f} s of CPU, {request.cpu_s:g} s are allowed\n",
        )
    if facts.overflow:
        return "output_limit", None, "OutputLimit: more than 64 KiB were written\n"
    if code == -signal.SIGKILL:
        return "memory_limit", None, "MemoryLimit: killed by the kernel\n"
    if code < 0:
        return "runtime_error", None, f"Killed: {_signal_name(-code)}\n"
    return _outcome(facts.result, code, request)


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _outcome(result: str, code: int, request: ExecuteRequest) -> tuple[Ending, Any, str]:
    if not result:
        if code == 0 and request.expression is None:
            return "ok", None, ""
        return (
            "runtime_error",
            None,
            f"Exited: the program ended its process with code {code}, without a result\n",
        )
    try:
        outcome = json.loads(result, parse_constant=_refuse)
        end, value, trace = outcome["end"], outcome.get("value"), str(outcome.get("trace", ""))
        _check(value, 0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return (
            "runtime_error",
            None,
            f"BadResult: the value is not plain data of at most 256 KiB ({type(error).__name__})\n",
        )
    if end == "memory":
        return "memory_limit", None, trace
    return ("ok", value, "") if end == "ok" else ("runtime_error", None, trace)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _check(value: Any, depth: int) -> None:
    """Raises ValueError for what could not be sent on: too deep, or text that is not Unicode (a
    lone surrogate)."""
    if depth > MAX_DEPTH:
        raise ValueError("too deep")
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, list):
        for part in value:
            _check(part, depth + 1)
    elif isinstance(value, dict):
        for key, part in value.items():
            key.encode()
            _check(part, depth + 1)
