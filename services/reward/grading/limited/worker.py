"""A process that calls functions of `services.reward.grading`. Requests and replies are lines of
JSON on stdin and stdout.

The kernel ends it once a call has used its CPU time (SIGPROF), even in the middle of C code, and
gives it no more memory than the call may have. It ends with the service, and after a call that left
it large.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from services.reward.sandbox.inside import kernel

PACKAGE = "services.reward.grading"
KEPT_BYTES = 512 << 20
"""A process that is larger after a call is not asked again. math-verify takes 130 MiB."""


def main(service_pid: int) -> None:
    kernel.die_with_parent()
    with contextlib.suppress(OSError):
        # Short of memory, the host ends this process before the service.
        Path("/proc/self/oom_score_adj").write_text("500")
    if os.getppid() != service_pid:
        return
    for line in sys.stdin:
        reply = _reply(json.loads(line))
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    module = importlib.import_module(f"{PACKAGE}.{request['module']}")
    module.prepare(request["function"])  # before the clock starts
    try:
        _limit_memory(request["memory_mib"] << 20)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        value = getattr(module, request["function"])(*request["arguments"])
        reply: dict[str, Any] = {"end": "ok", "value": value}
    except MemoryError:
        reply = {"end": "memory_limit", "detail": f"it took more than {request['memory_mib']} MiB"}
    except Exception as error:
        # A library may raise anything on a stranger's text. The grader decides what it means.
        reply = {"end": "error", "detail": f"{type(error).__name__}: {error}"[:200]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _limit_memory(resource.RLIM_INFINITY)
    return reply | {"retire": reply["end"] == "memory_limit" or _resident_bytes() > KEPT_BYTES}


def _limit_memory(size_bytes: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = most if size_bytes == resource.RLIM_INFINITY else size_bytes
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most)
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
