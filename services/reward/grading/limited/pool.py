"""The processes of `worker.py`: one pool for all jobs. A process is started when it is needed,
takes one call at a time, is replaced if it dies and ended when it is idle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from services.reward.grading.failures import GradingFailed
from services.reward.sandbox.base import asking, waiting
from shared.turns import Turns
from shared.wire import Part

MAX_WORKERS = 4
IDLE_S = 60.0
"""Seconds that an idle process is kept. Importing math-verify in a new one takes a second of CPU
time, so it is kept between the groups of a step."""

START_S = 60.0
WALL_FACTOR = 10.0
"""How much longer than its CPU time one call may take on a busy machine."""

KILLED_SHARE = 0.25
"""The share of its memory that a call may use after its process was killed. Ordinary calls need a
tenth."""

MAX_REPLY_BYTES = 64 << 20

_HOME = str(Path(__file__).resolve().parents[4])
_BOOT = (
    "import sys; sys.path.insert(0, {home!r}); "
    "from services.reward.grading.limited.worker import main; main({pid})"
)

End = Literal["time_limit", "memory_limit", "error"]


@dataclass(frozen=True)
class Call:
    """A function of a `module` of `services.reward.grading`, its arguments (plain data), and its
    limits: seconds of CPU time and MiB of memory, the process and its libraries included."""

    module: str
    function: str
    arguments: tuple[Any, ...]
    cpu_s: float
    memory_mib: int = 1024


class NoValue(Exception):
    """A call gave no value because of its arguments: it reached a limit, or raised."""

    def __init__(self, end: End, detail: str) -> None:
        super().__init__(detail)
        self.end: End = end
        self.detail = detail

    def part(self) -> Part:
        """Returns the part of the completion that caused it: 0, because a policy could choose a
        missing reward."""
        return Part(
            value=0.0, verdict="wrong" if self.end == "error" else self.end, detail=self.detail
        )


@dataclass(frozen=True)
class _Idle:
    process: Process
    since: float


class LimitedPool:
    """At most `count` processes; None: one per core, but no more than `MAX_WORKERS`."""

    def __init__(self, count: int | None = None) -> None:
        self._turns = Turns(count or min(MAX_WORKERS, len(os.sched_getaffinity(0))))
        self._idle: list[_Idle] = []  # the last used is used next, so that the others become old
        self._reaping: asyncio.TimerHandle | None = None

    async def run(self, call: Call) -> Any:
        """Returns the call's value. Raises NoValue, and GradingFailed if the end of a process says
        nothing about the call.

        A process that was killed from outside is replaced once, and the call then gets
        `KILLED_SHARE` of its memory. A call that needs more than that has reached its limit. A call
        that is killed although it needs less is not graded.
        """
        request = dict(vars(call))
        code: int | None = None
        with waiting.get()():
            turn = await self._turns.take(asking.get())
        with turn:
            for _ in range(2):
                process = self._idle.pop().process if self._idle else await self._start()
                reply = await self._ask(process, request)
                if reply is not None:
                    if reply["end"] == "ok":
                        return reply["value"]
                    raise NoValue(reply["end"], reply["detail"])
                code = process.returncode
                if code == -signal.SIGPROF:
                    raise NoValue("time_limit", f"it took more than {call.cpu_s:g} s of CPU time")
                if code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
                    # A C library that ran out of memory or stack does not always say so.
                    raise NoValue("memory_limit", f"its process ended with code {code}")
                if code == -signal.SIGKILL:
                    request["memory_mib"] = int(KILLED_SHARE * call.memory_mib)
        raise GradingFailed(
            f"the process for {call.module}.{call.function} ended twice, last with code {code}"
        )

    async def close(self) -> None:
        if self._reaping:
            self._reaping.cancel()
        while self._idle:
            await _end(self._idle.pop().process)

    async def _start(self) -> Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-c",
            _BOOT.format(home=_HOME, pid=os.getpid()),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env={},
            limit=MAX_REPLY_BYTES,
        )

    async def _ask(self, process: Process, request: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the reply, after which the process is idle again; None if it ended. Raises
        GradingFailed if it is silent."""
        assert process.stdin is not None and process.stdout is not None
        deadline_s = START_S + WALL_FACTOR * request["cpu_s"]
        reply: dict[str, Any] | None = None
        try:
            async with asyncio.timeout(deadline_s):
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(json.dumps(request).encode() + b"\n")
                    await process.stdin.drain()
                if line := await process.stdout.readline():
                    reply = json.loads(line)
                else:
                    # It exits on its own. A kill that came first would hide its exit code.
                    await process.wait()
        except TimeoutError as error:
            raise GradingFailed(
                f"the process for {request['module']}.{request['function']} was silent for "
                f"{deadline_s:g} s"
            ) from error
        finally:
            if reply is None or reply["retire"]:
                await _end(process)
            else:
                self._keep(process)
        return reply

    def _keep(self, process: Process) -> None:
        loop = asyncio.get_running_loop()
        self._idle.append(_Idle(process, loop.time()))
        if self._reaping is None:
            self._reaping = loop.call_later(IDLE_S, self._reap)

    def _reap(self) -> None:
        """Ends the processes that were idle for `IDLE_S`: end of file on its input ends one."""
        loop = asyncio.get_running_loop()
        self._reaping = None
        while self._idle and self._idle[0].since <= loop.time() - IDLE_S:
            process = self._idle.pop(0).process
            assert process.stdin is not None
            process.stdin.close()
        if self._idle:
            self._reaping = loop.call_at(self._idle[0].since + IDLE_S, self._reap)


async def _end(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await process.wait()
