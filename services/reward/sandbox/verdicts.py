"""Facts about an ended job -> `Execution`. Pure. Everything the program could have written is checked here again."""

from __future__ import annotations

import json
import signal
from typing import Any

from shared.wire import ExecuteRequest, Execution

MAX_DEPTH = 64


def execution(facts: dict[str, Any], request: ExecuteRequest) -> Execution:
    """Returns the verdict on a job that ended as `facts` say (see `zygote.py`)."""
    verdict, value, trace = _verdict(facts, request)
    stderr = facts["stderr"] + ("\n" if facts["stderr"] and trace else "") + trace
    return Execution(verdict=verdict, value=value, stdout=facts["stdout"], stderr=stderr, wall_s=round(facts["wall_s"], 6))


def _verdict(facts: dict[str, Any], request: ExecuteRequest) -> tuple[Any, Any, str]:
    code = facts["exit"]
    if facts["timed_out"]:
        return "time_limit", None, f"TimeLimit: stopped after {request.timeout_s:g} s\n"
    if facts["overflow"]:
        return "output_limit", None, "OutputLimit: more than 64 KiB were written\n"
    if code == -signal.SIGKILL and facts["cpu_s"] >= int(request.timeout_s) + 0.9:  # RLIMIT_CPU is in whole seconds
        return "time_limit", None, f"TimeLimit: used {facts['cpu_s']:.1f} s of CPU\n"
    if code == -signal.SIGKILL:
        return "memory_limit", None, "MemoryLimit: killed by the kernel\n"
    if code < 0:
        return "runtime_error", None, f"Killed: {signal.Signals(-code).name}\n"
    return _outcome(facts["result"], code, request)


def _outcome(result: str, code: int, request: ExecuteRequest) -> tuple[Any, Any, str]:
    if not result:
        if code == 0 and request.expression is None:
            return "ok", None, ""
        return "runtime_error", None, f"Exited: the program ended its process with code {code}, without a result\n"
    try:
        outcome = json.loads(result, parse_constant=_refuse)
        end, value, trace = outcome["end"], outcome.get("value"), str(outcome.get("trace", ""))
        _check(value, 0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return "runtime_error", None, f"BadResult: the value is not plain data of at most 256 KiB ({type(error).__name__})\n"
    if end == "memory":
        return "memory_limit", None, trace
    return ("ok", value, "") if end == "ok" else ("runtime_error", None, trace)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _check(value: Any, depth: int) -> None:
    """Raises ValueError for what could not be sent on: too deep, or text that is not Unicode (a lone surrogate)."""
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
