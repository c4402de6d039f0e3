"""Runs one program in a machine that was started for this program alone. Standard library only.

    stdin    {program, stdin}, as JSON
    stdout   a line "began", then one line: how it ended, as JSON

Nothing protects this process from the program: only the machine isolates. So the reader treats the
whole answer as written by the program.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from services.reward.sandbox.inside import program

_LOOK_S = 0.005


def main() -> None:
    task = json.load(sys.stdin)
    os.chdir(tempfile.mkdtemp())
    files = [
        os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        for name in ("stdin", "stdout", "stderr", "result")
    ]
    os.write(files[0], task["stdin"].encode())
    os.lseek(files[0], 0, os.SEEK_SET)
    own_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    sys.stdout.write("began\n")
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        os.chdir("/tmp")
        _become(task["program"], files, own_bytes)
    sys.stdout.write(json.dumps(_end(pid, task["program"], files)) + "\n")
    sys.stdout.flush()


def _become(request: dict[str, Any], files: list[int], own_bytes: int) -> None:
    try:
        limits = program.standing_limits(files=64, processes=None)
        limits |= program.clamp_limits(
            {resource.RLIMIT_AS: own_bytes + (request["memory_mib"] << 20)}
        )
        program.give_up_everything(files, limits, None)
        cpu_s = math.ceil(request["cpu_s"])
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # SIGXCPU, then SIGKILL
    except OSError as error:
        os.write(2, str(error).encode())
        os._exit(125)
    program.run(request, 3)


def _end(pid: int, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
    start, limit = time.monotonic(), None
    ended, status, usage = 0, 0, resource.getrusage(resource.RUSAGE_CHILDREN)
    while not ended:
        if limit is None and time.monotonic() - start > request["timeout_s"]:
            limit = "wall"
            os.killpg(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)
        ended, status, usage = os.wait4(pid, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return {
        "exit": os.waitstatus_to_exitcode(status),
        "limit": limit,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "overflow": any(os.fstat(fd).st_size > program.KEEP_BYTES for fd in files[1:3]),
        "stdout": _text(files[1], program.KEEP_BYTES),
        "stderr": _text(files[2], program.KEEP_BYTES),
        "result": _text(files[3], program.RESULT_BYTES),
    }


def _text(fd: int, limit: int) -> str:
    return os.pread(fd, limit, 0).decode("utf-8", "replace")
