"""One sandbox slot: a Python process, its common modules imported, that enters its namespaces and
then forks one child at a time.

    service --socket--> zygote (pid 1 of the slot) --fork--> child (pid 1 of a namespace of its own)

A child is pid 1 of its namespace: killing it ends every process that it started. Its output and
result are memory files made for it alone and read after its death: no pipe to fill, nothing to
forge for another program. Trusted code; standard library only.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from services.reward.sandbox.inside import frames, isolation, kernel, program
from services.reward.sandbox.inside.child import Child, ServiceGone, Surroundings

WARM = """
array ast bisect calendar cmath collections copy ctypes dataclasses datetime decimal enum fractions
functools heapq io itertools json linecache math numbers operator queue random re statistics string
struct textwrap threading time traceback types typing
"""

STOP, CONTINUE = b"s", b"c"
"""How the service stops and continues a worker's processes."""

WORKER_BYTES = 8 << 30
"""Memory of a worker: of each of its processes, and of all together if there is a cgroup."""

LARGE = 124
"""The exit code of a slot whose worker was killed when it used much memory. Without a cgroup that
counts as the reason."""

UNSAFE_FOLDER = "hone-unsafe-"
"""The beginning of the names of working directories without isolation; the service's pid
follows."""

_ENVIRONMENT = {
    "HOME": "/tmp",
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


def main() -> None:
    """Runs the slot process. Its one argument is the configuration as JSON (`slots.py`)."""
    config = json.loads(sys.argv[1])
    # Imported where it is used only, like whatever else is large: a fork copies the tables of
    # every page that its parent has.
    worker = importlib.import_module(config["worker"]) if config["worker"] else None
    sys.dont_write_bytecode = True  # our own is written: compiling it would cost every slot memory
    sys.path.remove(config["home"])
    control: int = config["control_fd"]
    try:
        zygote = Zygote.enter(control, config)
    except OSError as error:
        reason = error.strerror or str(error)
        frames.send(control, {"fatal": f"{reason}: {error.filename}" if error.filename else reason})
        os._exit(125)
    except ImportError as error:
        frames.send(control, {"not_importable": str(error)})
        os._exit(125)
    frames.send(control, {"ready": True})
    if worker is not None:
        zygote.become_worker(worker.serve, config)
    with contextlib.suppress(ServiceGone):
        zygote.serve()
    os._exit(0)  # with what it runs: it is pid 1


class Zygote:
    def __init__(self, surroundings: Surroundings, folder: isolation.Tmp | WorkingFolder) -> None:
        self._surroundings = surroundings
        self._folder = folder

    @classmethod
    def enter(cls, control: int, config: dict[str, Any]) -> Zygote:
        """Returns in a process that has its namespaces, its imports and nothing of the service.
        Raises OSError where the host refuses a step, ImportError for a module of `config`."""
        for name in WARM.split():
            importlib.import_module(name)
        os.environ.clear()
        os.environ.update(_ENVIRONMENT)
        for entrance in config["entrances"]:
            with open(entrance, "w") as file:
                file.write("0")  # this process, and all it will fork
        cpu_meter, oom_meter = (
            os.open(path, os.O_RDONLY) if path else None for path in config["meters"]
        )
        inside = _inside(config)
        sys.path += config["package_paths"]
        for name in config["modules"]:
            importlib.import_module(name)
        isolated = inside is not None
        surroundings = Surroundings(
            control=control,
            isolated=isolated,
            system_calls=kernel.Filter(isolation.build()) if isolated else None,
            own_bytes=_own_bytes(
                inside.statm if inside else os.open("/proc/self/statm", os.O_RDONLY)
            ),
            limits=program.standing_limits(
                files=64, processes=program.PROCESSES if isolated else None
            ),
            cpu_meter=cpu_meter,
            oom_meter=oom_meter,
            oom_score=inside.oom_score if inside else None,
            began=mmap.mmap(-1, 1),
            cores=len(os.sched_getaffinity(0)),
        )
        unsafe_folder = f"{UNSAFE_FOLDER}{config['service_pid']}-"
        program.make_ready_to_fork()
        return cls(surroundings, isolation.Tmp() if isolated else WorkingFolder(unsafe_folder))

    def serve(self) -> None:
        """Runs programs until the service closes the socket."""
        going_on = True
        try:
            while going_on:
                self._folder.renew()
                with Child(self._surroundings) as child:
                    going_on = child.run()
        finally:
            self._folder.remove()

    def become_worker(self, serve: Callable[[int], None], config: dict[str, Any]) -> NoReturn:
        """Forks the worker, which talks to the service itself, and ends as it ends, or with `LARGE`
        if it was killed when it used a quarter of its memory. Meanwhile stops and continues all of
        it as the service says."""
        slot = self._surroundings
        memory_bytes: int = config["worker_bytes"]
        pid = os.fork()
        if not pid:
            if not slot.isolated:
                kernel.die_with_parent()
            null = os.open("/dev/null", os.O_RDWR)
            limits = program.standing_limits(files=1024, processes=config["worker_processes"])
            limits |= program.clamp_limits({resource.RLIMIT_AS: slot.own_bytes + memory_bytes})
            program.give_up_everything([null, null, null, slot.control], limits, slot.system_calls)
            serve(3)
            os._exit(0)
        try:
            self._attend(pid, config["switch_fd"])
        except ServiceGone:
            if not slot.isolated:
                os.killpg(pid, signal.SIGKILL)
            os._exit(0)
        _, status, usage = os.wait4(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        was_large = code == -signal.SIGKILL and usage.ru_maxrss << 10 >= memory_bytes // 4
        os._exit(LARGE if was_large else code & 0xFF)

    def _attend(self, pid: int, switch: int) -> None:
        """Returns once the worker has ended. Raises ServiceGone if the service closes its end."""
        signals = {STOP: signal.SIGSTOP, CONTINUE: signal.SIGCONT}
        pidfd = os.pidfd_open(pid)
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.register(switch, select.POLLIN)
        poller.register(self._surroundings.control, select.POLLRDHUP)
        while True:
            ready = [fd for fd, _ in poller.poll()]
            if self._surroundings.control in ready:
                raise ServiceGone
            if pidfd in ready:
                return
            told = signals.get(os.read(switch, 1 << 16)[-1:])
            if told is None:
                raise ServiceGone
            with contextlib.suppress(ProcessLookupError):
                if self._surroundings.isolated:
                    os.kill(-1, told)  # all but itself: it is pid 1
                else:
                    os.killpg(pid, told)


class WorkingFolder:
    """A program's working directory without isolation: a new folder, removed after it."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._folder: str | None = None

    def renew(self) -> None:
        import tempfile

        self.remove()
        self._folder = tempfile.mkdtemp(prefix=self._prefix, dir="/tmp")
        os.chdir(self._folder)

    def remove(self) -> None:
        import shutil

        if self._folder:
            os.chdir("/")
            shutil.rmtree(self._folder, ignore_errors=True)


def _inside(config: dict[str, Any]) -> isolation.SlotFiles | None:
    """Enters the namespaces. Returns None if the slot has none."""
    if config["isolated"]:
        return isolation.enter(config)
    kernel.die_with_parent()
    kernel.no_new_privileges()
    return None


def _own_bytes(statm: int) -> int:
    """Returns how much address space this process has."""
    with open(statm) as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
