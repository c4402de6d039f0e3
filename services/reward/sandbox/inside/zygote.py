"""One sandbox slot: a Python process, its common modules imported, that enters its namespaces and then forks one job at a time.

    service --socket--> zygote (pid 1 of the slot) --fork--> job (pid 1 of a namespace of its own)

A job is killed by killing its pid 1, which ends every process it started. Its output and result are memory files made for it
alone and read after its death: no pipe to fill, nothing to forge for another job. Trusted code; standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import mmap
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from services.reward.sandbox.inside import frames, function, isolation, kernel, program, seccomp

KEEP_BYTES = 64 * 1024
"""Kept of each of stdout and stderr; a program that writes more is told so."""

RESULT_BYTES = 256 * 1024

_WARM = """array ast bisect calendar cmath collections copy ctypes dataclasses datetime decimal enum fractions functools heapq
io itertools json linecache math numbers operator queue random re statistics string struct textwrap threading time traceback
types typing"""


def main() -> None:
    """Entry of the slot process; its one argument is the configuration as JSON (see `slots.py`)."""
    config = json.loads(sys.argv[1])
    sys.path.remove(config["home"])
    control = socket.socket(fileno=config["control_fd"])
    try:
        zygote = Zygote(control, config)
    except OSError as error:
        reason = error.strerror or str(error)
        frames.send(control, {"fatal": f"{reason}: {error.filename}" if error.filename else reason})
        os._exit(125)
    frames.send(control, {"ready": True})
    if config["mode"] == "function":
        zygote.become_function_worker()
    zygote.serve()


class Zygote:
    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        for name in _WARM.split():
            importlib.import_module(name)
        os.environ.clear()
        os.environ.update(HOME="/tmp", PATH="/usr/bin:/bin", LANG="C.UTF-8", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        self._own_bytes = pages * os.sysconf("SC_PAGESIZE")
        self._control = control
        self._began = mmap.mmap(-1, 1)  # shared with each job until its program begins
        self._isolated: bool = config["isolated"]
        self._filter = seccomp.build() if self._isolated else None
        self._pid_namespace = isolation.enter(config) if self._isolated else None
        if not self._isolated:
            kernel.die_with_parent()
            kernel.no_new_privileges()
        gc.collect()
        gc.freeze()  # so that a collection in a job copies no page of ours

    def serve(self) -> None:
        """Runs jobs until the service closes the socket."""
        while (job := frames.receive(self._control)) is not None:
            frames.send(self._control, self._run(job))

    def become_function_worker(self) -> None:
        """Forks the worker, which talks to the service itself, and ends as it ends."""
        pid = os.fork()
        if not pid:
            null = os.open("/dev/null", os.O_RDWR)
            limits = program.Limits(memory_bytes=self._own_bytes + (8 << 30), cpu_s=None, files=1024, processes=128)
            program.give_up_everything([null, null, null, self._control.fileno()], limits, self._filter)
            function.serve(socket.socket(fileno=3))
            os._exit(0)
        self._ends_within(pid, None)
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)

    def _run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Returns how the job ended, as plain facts; `verdicts.py` judges them."""
        files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr", "result")]
        try:
            os.write(files[0], job["stdin"].encode())
            os.lseek(files[0], 0, os.SEEK_SET)
            with self._fresh_folder():
                self._began[0] = 0
                start = time.monotonic()
                pid = self._fork(job, files)
                timed_out = not self._ends_within(pid, job["timeout_s"])
                if timed_out:
                    os.kill(pid, signal.SIGKILL)
                _, status, usage = os.wait4(pid, 0)
                wall_s = time.monotonic() - start
                self._kill_leftovers(pid)
            return {
                "began": self._began[0] == 1,
                "exit": os.waitstatus_to_exitcode(status),
                "timed_out": timed_out,
                "wall_s": wall_s,
                "cpu_s": usage.ru_utime + usage.ru_stime,
                "stdout": _text(files[1], KEEP_BYTES),
                "stderr": _text(files[2], KEEP_BYTES),
                "overflow": any(os.fstat(fd).st_size > KEEP_BYTES for fd in files[1:3]),
                "result": _text(files[3], RESULT_BYTES),
            }
        finally:
            for fd in files:
                os.close(fd)

    def _fork(self, job: dict[str, Any], files: list[int]) -> int:
        if self._pid_namespace is not None:
            kernel.unshare(kernel.CLONE_NEWPID, "pid namespace of a job")
        pid = os.fork()
        if not pid:
            self._become_program(job, files)
        if self._pid_namespace is not None:
            kernel.enter_namespace(self._pid_namespace, kernel.CLONE_NEWPID, "pid namespace of the slot")
        return pid

    def _become_program(self, job: dict[str, Any], files: list[int]) -> NoReturn:
        limits = program.Limits(
            memory_bytes=self._own_bytes + (job["memory_mib"] << 20),
            cpu_s=int(job["timeout_s"]) + 1,
            files=64,
            processes=24 if self._isolated else None,
        )
        try:
            program.give_up_everything(files, limits, self._filter)
            self._began[0] = 1
            self._began.close()
        except OSError as error:
            os.write(2, str(error).encode())
            os._exit(125)
        program.run(job, 3)

    def _ends_within(self, pid: int, timeout_s: float | None) -> bool:
        """Returns whether the job ended in time. Ends the slot, and so the job, if the service goes away meanwhile."""
        pidfd = os.pidfd_open(pid)
        try:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            poller.register(self._control, select.POLLRDHUP)
            ready = [fd for fd, _ in poller.poll(None if timeout_s is None else timeout_s * 1000)]
        finally:
            os.close(pidfd)
        if self._control.fileno() in ready:
            self._kill_leftovers(pid)
            os._exit(0)
        return bool(ready)

    @contextlib.contextmanager
    def _fresh_folder(self) -> Any:
        if self._isolated:
            isolation.fresh_tmp()
            yield
            return
        folder = tempfile.mkdtemp(prefix="hone-unsafe-")
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir("/")
            shutil.rmtree(folder, ignore_errors=True)

    def _kill_leftovers(self, pid: int) -> None:
        if not self._isolated:  # there, the death of pid 1 has done it
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


def _text(fd: int, limit: int) -> str:
    return os.pread(fd, limit, 0).decode("utf-8", "replace")
