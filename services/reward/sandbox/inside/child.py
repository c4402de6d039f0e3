"""One child of a slot, seen from its trusted parent: a forked process that runs one program, what
it reads and writes, and how it ends.

    armed     forked, all rights given up, waiting for its program: done ahead, while the slot
              would be idle
    begun     given its program and what it may use
    ended on its own or killed, with every process that it started; its output is read from
              memory files after its death

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import resource
import select
import signal
import time
from dataclasses import dataclass
from typing import NoReturn

from services.reward.sandbox.inside import frames, kernel, program

_RESULT, _PROGRAM = 3, 4
"""The child's own descriptors beside 0, 1, 2: where its result goes, and where its program comes
from."""

_SHORTEST_LOOK_S = 0.01
"""How precisely the limits of CPU time and of idling are kept."""

WALL_PER_CPU = 20.0
"""A program that gets a twentieth of a core is not idle: a busy host gives it no more."""


class ServiceGone(Exception):
    """No one waits for this slot any more."""


@dataclass(frozen=True)
class Limits:
    """A program's limits in seconds: wall clock, CPU time, and wall clock in which it is idle."""

    timeout_s: float
    cpu_s: float
    idle_s: float

    def left_s(self, wall_s: float, used_s: float, *, is_metered: bool) -> dict[str, float]:
        """Returns what is left of each limit after `wall_s` of time and `used_s` of CPU time. If
        the CPU time of all the program's processes is not metered, the program never counts as
        idle."""
        left_s = {"wall": self.timeout_s - wall_s, "cpu": self.cpu_s - used_s}
        if is_metered:
            left_s["idle"] = self.idle_s + WALL_PER_CPU * used_s - wall_s
        return left_s


@dataclass(frozen=True)
class Surroundings:
    """The parts of a slot that its children need. `own_bytes` is the address space that a child
    inherits, `limits` are the same for every child.

    `cpu_meter` and `oom_meter` are open files of the slot's cgroup: the CPU time of everything in
    the slot, and how often it was out of memory; None where there is no cgroup. `began` is shared
    with each child until its program begins.
    """

    control: int
    isolated: bool
    system_calls: kernel.Filter | None
    own_bytes: int
    limits: program.Rlimits
    cpu_meter: int | None
    oom_meter: int | None
    oom_score: int | None
    began: mmap.mmap
    cores: int


class Child:
    """`with` arms it; `run` gives it a program and says how it ended."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._slot = surroundings
        self._files: list[int] = []
        self._program = self._pid = -1
        self._ended = False
        self._start = 0.0

    def run(self) -> bool:
        """Takes a program from the service, and sends how it ended.

            service: {limits, stdin_size, program_size}, then the input and the program
            slot:    {facts, sizes}, then the beginnings of stdout, of stderr and of the result

        The facts are those of `verdicts.ProgramExit`. What follows a message is never in this
        process's memory, where the next child could read it. Returns False, and runs nothing, once
        the service is gone.
        """
        slot = self._slot
        request = frames.receive(slot.control)
        if request is None:
            return False
        ooms_before, metered_before_s = self._ooms(), self._metered_s()
        self._hand_over(request["stdin_size"], request["program_size"])
        limit = self._watch(Limits(**request["limits"]))
        status, usage = self._end(by_force=limit is not None)
        # The usage lacks processes that ended with the child; the meter counts the whole slot.
        used_s = max(usage.ru_utime + usage.ru_stime, self._metered_s() - metered_before_s)
        wall_s, code = time.monotonic() - self._start, os.waitstatus_to_exitcode(status)
        memory = short_of_memory(ooms_before, self._ooms() if code == -signal.SIGKILL else None)
        _, stdout_size, stderr_size, result_size = [os.fstat(fd).st_size for fd in self._files]
        kept = (
            min(stdout_size, program.KEEP_BYTES),
            min(stderr_size, program.KEEP_BYTES),
            min(result_size, program.RESULT_BYTES),
        )
        facts = {
            "began": slot.began[0] == 1,
            "exit": code,
            "limit": limit,
            "wall_s": wall_s,
            "cpu_s": used_s,
            "memory": memory,
            "peak_bytes": usage.ru_maxrss << 10,
            "overflow": max(stdout_size, stderr_size) > program.KEEP_BYTES,
        }
        frames.send(slot.control, {"facts": facts, "sizes": kept})
        for fd, size in zip(self._files[1:], kept, strict=True):
            frames.send_file(slot.control, fd, size)
        return True

    def __enter__(self) -> Child:
        self._slot.began[0] = 0
        self._files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr", "result")]
        reading, self._program = os.pipe()
        try:
            self._pid = self._fork([*self._files, reading])
        finally:
            os.close(reading)
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the child if it still runs, and closes everything."""
        if not self._ended:
            self._end(by_force=True)
        for fd in self._files:
            os.close(fd)

    def _end(self, *, by_force: bool) -> tuple[int, resource.struct_rusage]:
        """Returns the status and the resource usage of the child, which has ended unless this is
        `by_force`."""
        if not self._slot.isolated:
            # Ends the processes that it left; in a pid namespace its death ends them.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
        if by_force:
            # Also without isolation: it may have made no process group yet.
            os.kill(self._pid, signal.SIGKILL)
        _, status, usage = os.wait4(self._pid, 0)
        self._ended = True
        return status, usage

    def _fork(self, files: list[int]) -> int:
        slot = self._slot
        if slot.oom_score is not None:
            # Inherited: the kernel, short of memory, ends the child and not its slot.
            os.pwrite(slot.oom_score, b"1000", 0)
        pid = kernel.fork_into_pid_namespace() if slot.isolated else kernel.fork()
        if not pid:
            try:
                self._become_program(files)
            finally:
                # Whatever the program changed in the lines above, no child runs on as a parent.
                os._exit(126)
        if slot.oom_score is not None:
            os.pwrite(slot.oom_score, b"500", 0)
        return pid

    def _become_program(self, files: list[int]) -> NoReturn:
        slot = self._slot
        try:
            if not slot.isolated:
                kernel.die_with_parent()
            program.give_up_everything(files, slot.limits, slot.system_calls)
            request = json.loads(_until_end(_PROGRAM).decode())
            os.close(_PROGRAM)
            own = {
                resource.RLIMIT_AS: slot.own_bytes + (request["memory_mib"] << 20),
                # The kernel counts it in ticks; `_watch` is the precise one.
                resource.RLIMIT_CPU: 2 * math.ceil(request["cpu_s"]),
            }
            program.bind(program.clamp_limits(own))
            slot.began[0] = 1
            slot.began.close()
        except (OSError, ValueError) as error:
            os.write(2, str(error).encode())
            os._exit(125)
        program.run(request, _RESULT)

    def _hand_over(self, stdin_size: int, program_size: int) -> None:
        """Gives the child its input and then its program, with which it begins. Raises OSError,
        which ends the slot, if the child was killed while it waited."""
        if stdin_size:
            frames.pour_into_file(self._slot.control, self._files[0], stdin_size)
            os.lseek(self._files[0], 0, os.SEEK_SET)
        frames.pour_into_pipe(self._slot.control, self._program, program_size)
        os.close(self._program)

    def _watch(self, limits: Limits) -> str | None:
        """Returns the limit that the program has reached, or None once it has ended on its own. The
        clock starts when the program begins, because a busy host may delay that. Raises ServiceGone
        if the service goes away meanwhile."""
        self._start = time.monotonic()
        used_before_s, used_s = self._cpu_s(), 0.0
        is_metered = self._slot.cpu_meter is not None
        while True:
            now, has_begun = time.monotonic(), self._slot.began[0] == 1
            if not has_begun:
                self._start = now
            left_s = limits.left_s(now - self._start, used_s, is_metered=is_metered)
            reached = next((name for name, left in left_s.items() if left <= 0), None)
            if reached:
                return reached
            soonest_s = min(left_s["cpu"] / self._slot.cores, left_s.get("idle", math.inf))
            look_s = min(left_s["wall"], max(soonest_s if has_begun else 0, _SHORTEST_LOOK_S))
            if wait_for_end(self._pid, self._slot.control, look_s):
                return None
            used_s = self._cpu_s() - used_before_s

    def _cpu_s(self) -> float:
        """Returns the CPU time of everything in the slot where that is metered, else of the child
        itself."""
        if self._slot.cpu_meter is None:
            # The number of its clock, as clock_getcpuclockid(3) makes it.
            return time.clock_gettime(~self._pid << 3 | 2)
        return self._metered_s()

    def _metered_s(self) -> float:
        """Returns the CPU time of everything in the slot so far, 0 where that is not metered."""
        if self._slot.cpu_meter is None:
            return 0.0
        told = os.pread(self._slot.cpu_meter, 64, 0).split()
        return int(told[1]) / 1e6 if told[0] == b"usage_usec" else int(told[0]) / 1e9

    def _ooms(self) -> bytes | None:
        meter = self._slot.oom_meter
        return None if meter is None else os.pread(meter, 512, 0)


def short_of_memory(before: bytes | None, after: bytes | None) -> str:
    """Returns whose memory ran out between two looks at a cgroup's counts (`oom`, `oom_kill`).
    Version 1 has only the latter, which then stands for both."""
    if before is None or after is None:
        return "unknown"
    limit_before, killed_before = ooms(before)
    limit_after, killed_after = ooms(after)
    if limit_after > limit_before:
        return "own limit"
    return "host" if killed_after > killed_before else "enough"


def ooms(told: bytes) -> tuple[int, int]:
    """Returns how often a cgroup reached its own limit of memory, and how many of its processes
    were killed, by its file of counts."""
    words = told.split()
    counts = dict(zip(words[::2], words[1::2], strict=True))
    killed = int(counts[b"oom_kill"])
    return int(counts.get(b"oom", killed)), killed


def wait_for_end(pid: int, control: int, timeout_s: float | None) -> bool:
    """Returns whether the child ended in time. Raises ServiceGone if the service closes `control`
    meanwhile."""
    pidfd = os.pidfd_open(pid)
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.register(control, select.POLLRDHUP)
        ready = [fd for fd, _ in poller.poll(None if timeout_s is None else timeout_s * 1000)]
    finally:
        os.close(pidfd)
    if control in ready:
        raise ServiceGone
    return bool(ready)


def _until_end(fd: int) -> bytes:
    parts: list[bytes] = []
    while part := os.read(fd, 1 << 16):
        parts.append(part)
    return b"".join(parts)
