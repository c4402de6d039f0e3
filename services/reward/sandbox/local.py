"""The sandbox on this host: warm slots, each for one program at a time, given in turns.

If a slot dies, it is started again and its program is run again. A second death is the verdict
"sandbox_error", because no program can reach its slot. The sandbox "unsafe" is the same without
namespaces and seccomp, with resource limits only; it is chosen only by its name. There a program
can kill its slot, so a second death is the program's fault.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections import deque
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

from services.reward.sandbox import verdicts
from services.reward.sandbox.base import (
    WORKER_PROCESSES,
    Sandbox,
    SlotDied,
    Worker,
    asking,
    waiting,
)
from services.reward.sandbox.host import NO_PACKAGES, Groups, Packages
from services.reward.sandbox.inside.zygote import UNSAFE_FOLDER, WORKER_BYTES
from services.reward.sandbox.slots import ImportFailed, IsolationFailed, Slot
from shared.host.logs import get_logger, to_stderr
from shared.turns import Turns
from shared.wire import ExecuteRequest, Execution

GRACE_S = 10.0
"""Seconds that a slot may take beyond a program's time limit before it counts as dead."""

MAX_DEFAULT_SLOTS = 8
LONG_RESULT_CHARS = 16_384

SHORT_S = {"cpu_s": 0.25, "idle_s": 0.5, "timeout_s": 3.0}
"""The limits of a program's first run. A program that takes longer is run again from its beginning,
with its own limits, after all programs that have used less. So another program waits this long for
each program that never ends, and not for its full limits."""

is_long: ContextVar[bool] = ContextVar("is_long", default=False)
"""Whether a program of the completion took longer than `SHORT_S`. The next programs of the
completion then get their own limits at once."""


class LocalSandbox(Sandbox):
    def __init__(
        self, *, isolated: bool, num_slots: int | None = None, packages: Packages = NO_PACKAGES
    ) -> None:
        self._num_slots = num_slots or min(2 * len(os.sched_getaffinity(0)), MAX_DEFAULT_SLOTS)
        self._isolated = isolated
        self._packages = packages
        self._bounded = ""
        self._slots: list[Slot] = []
        self._groups: Groups | None = None
        self._num_workers = 0
        # A queue, so that a slot has time to fork its next child.
        self._idle: deque[Slot] = deque()
        self._turns = Turns(self._num_slots)
        # Programs that are busy for long leave a slot, where there are several, to others.
        self._long_turns = Turns(max(self._num_slots - 1, 1))

    async def start(self) -> None:
        if not self._isolated:
            _sweep_unsafe_folders()
        self._groups = groups = Groups.find()
        self._bounded = groups.bounded
        self._slots = [
            Slot(
                number,
                isolated=self._isolated,
                packages=self._packages,
                group=groups.make(),
            )
            for number in range(self._num_slots)
        ]
        started = await asyncio.gather(
            *(slot.start() for slot in self._slots), return_exceptions=True
        )
        failures = [failure for failure in started if failure is not None]
        if failures and not isinstance(failures[0], IsolationFailed):
            raise failures[0]
        if failures:
            reason = str(failures[0])
            self._problem = reason if isinstance(failures[0], ImportFailed) else _refusal(reason)
        else:
            self._idle.extend(self._slots)
            fault = await self._tested() if self._isolated else None
            self._problem = _refusal(fault) if fault else None
        if self._problem:
            get_logger().error("sandbox refused", problem=self._problem)
            await self.close()
        else:
            get_logger().info("sandbox ready", **self.report())

    async def close(self) -> None:
        self._problem = self._problem or "the sandbox is closed"
        await asyncio.gather(*(slot.dismiss() for slot in self._slots))
        if not self._isolated:
            _sweep_unsafe_folders()

    def report(self) -> dict[str, Any]:
        tier = "none" if self._problem else "local" if self._isolated else "unsafe"
        limits, probes = self._bounded, self.probed()
        return {"tier": tier, "slots": self._num_slots, "limits": limits, "probes": probes}

    async def execute(self, request: ExecuteRequest) -> Execution:
        self.check_usable()
        short = _short(request)
        if short == request or not is_long.get():
            execution = await self._in_turn(short)
            if short == request or execution.verdict != "time_limit":
                return execution
            is_long.set(True)
            if execution.cpu_s < short.cpu_s and execution.wall_s < short.timeout_s:
                # It only idled: it may do so for its own `idle_s`, but not be busy for longer.
                idling = request.model_copy(update={"cpu_s": short.cpu_s})
                execution = await self._in_turn(idling)
                is_busy = execution.verdict == "time_limit" and execution.cpu_s >= short.cpu_s
                if idling == request or not is_busy:
                    return execution
        with waiting.get()():
            turn = await self._long_turns.take(asking.get())
        with turn:
            return await self._in_turn(request)

    async def _in_turn(self, request: ExecuteRequest) -> Execution:
        with waiting.get()():
            turn = await self._turns.take(asking.get())
        with turn:
            slot = self._idle.popleft()
            try:
                return await self._twice(slot, request)
            finally:
                self._idle.append(slot)

    async def open_worker(self, module: str, *, processes: int = WORKER_PROCESSES) -> Worker:
        self.check_usable()
        self._num_workers += 1
        group = self._groups.make(processes) if self._groups else None
        if group:
            group.limit_memory(WORKER_BYTES)
        worker = Slot(
            self._num_slots + self._num_workers % 1000,
            isolated=self._isolated,
            worker=module,
            worker_processes=processes,
            group=group,
        )
        started = False
        try:
            await worker.start()
            started = True
        finally:
            if not started:
                await worker.dismiss()
        return worker

    async def _twice(self, slot: Slot, request: ExecuteRequest) -> Execution:
        verdict: Literal["sandbox_error", "runtime_error"] = "sandbox_error"
        reason = ""
        for is_last in (False, True):
            self.check_usable()  # closed meanwhile: nothing is started again
            try:
                if not slot.alive:
                    await slot.start()
                facts = await slot.run(request, request.timeout_s + GRACE_S)
            except IsolationFailed as error:
                verdict, reason = "sandbox_error", str(error)
            except (SlotDied, TimeoutError) as error:
                verdict = "sandbox_error" if self._isolated else "runtime_error"
                reason = str(error) or f"it was silent for {request.timeout_s + GRACE_S:g} s"
            else:
                verdict = "sandbox_error"
                reason = verdicts.infrastructure_fault(facts, request, is_last=is_last)
                if not reason and (is_last or not verdicts.is_unexplained_kill(facts, request)):
                    return await _execution(facts, request)
                reason = reason or "a program was killed, and nothing says by whom"
            get_logger().warning("sandbox run failed", reason=reason)
        return Execution(verdict=verdict, stderr=f"the sandbox failed twice: {reason}")


def _short(request: ExecuteRequest) -> ExecuteRequest:
    """Returns the program with the limits of its first run."""
    limits = {name: min(getattr(request, name), most) for name, most in SHORT_S.items()}
    return request.model_copy(update=limits)


async def _execution(facts: verdicts.ProgramExit, request: ExecuteRequest) -> Execution:
    """Returns the verdict on a program; a long result is read beside the event loop."""
    if len(facts.result) < LONG_RESULT_CHARS:
        return verdicts.execution(facts, request)
    return await asyncio.to_thread(verdicts.execution, facts, request)


def _sweep_unsafe_folders() -> None:
    """Removes the folders that killed slots of this service, and of services that have ended,
    left behind."""
    for folder in Path("/tmp").glob(f"{UNSAFE_FOLDER}*"):
        service = folder.name.removeprefix(UNSAFE_FOLDER).partition("-")[0]
        if service == str(os.getpid()) or not Path("/proc", service).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _refusal(reason: str) -> str:
    return (
        f"this host cannot isolate model-written code: {reason}. Allow user namespaces to the "
        "reward service (the container's "
        "seccomp profile, which docker/seccomp-reward.json is for; sysctl "
        "user.max_user_namespaces, "
        "kernel.apparmor_restrict_unprivileged_userns), or ask by name for HONE_SANDBOX=unsafe to "
        "run such code with resource "
        "limits only"
    )


async def refusal_here() -> str:
    """Returns why this host cannot isolate programs; "" if it can."""
    sandbox = LocalSandbox(isolated=True, num_slots=1)
    await sandbox.start()
    problem = sandbox.problem()
    await sandbox.close()
    return problem or ""


if __name__ == "__main__":  # `hone doctor` runs it
    to_stderr()
    sys.stdout.write(asyncio.run(refusal_here()))
