"""The processes of `worker.py`: started when first needed, one comparison at a time each, replaced
when one dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path
from typing import Any, Literal

from services.reward.grading.registry import GradingFailed

_FILE = Path(__file__).with_name("worker.py")
START_S = 60.0
WALL_FACTOR = 10.0
"""How much longer than its CPU time one comparison may take on a busy machine."""

End = Literal["time_limit", "memory_limit", "error"]


class Workers:
    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._idle: list[Process] = []

    async def same(self, wanted: str, given: str, cpu_s: float) -> bool | tuple[End, str]:
        """Returns whether two answers are equal, or how the comparison ended. Raises GradingFailed
        where that says nothing of the answers: a process that was killed from outside is replaced
        once."""
        request = {"wanted": wanted, "given": given, "cpu_s": cpu_s}
        async with self._free:
            for _ in range(2):
                process = self._idle.pop() if self._idle else await self._start()
                reply = await self._ask(process, request)
                if reply is not None:
                    return reply["same"] if reply["end"] == "compared" else _failure(reply)
                if process.returncode == -signal.SIGPROF:
                    return "time_limit", f"comparing took more than {cpu_s:g} s of CPU time"
        raise GradingFailed(
            f"the process that compares answers ended twice, last with code {process.returncode}"
        )

    async def close(self) -> None:
        while self._idle:
            await _end(self._idle.pop())

    async def _start(self) -> Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-I", str(_FILE), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env={}
        )

    async def _ask(self, process: Process, request: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the reply, after which the process is idle again; None if it ended. Raises
        GradingFailed if it is silent."""
        assert process.stdin is not None and process.stdout is not None
        deadline_s = START_S + WALL_FACTOR * request["cpu_s"]
        line = b""
        try:
            async with asyncio.timeout(deadline_s):
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(json.dumps(request).encode() + b"\n")
                    await process.stdin.drain()
                line = await process.stdout.readline()
                if not line:
                    # It ends by itself. A kill that came first would hide its exit code.
                    await process.wait()
        except TimeoutError as error:
            raise GradingFailed(
                f"the process that compares answers was silent for {deadline_s:g} s"
            ) from error
        finally:
            if line:
                self._idle.append(process)
            else:
                await _end(process)
        return json.loads(line) if line else None


async def _end(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await process.wait()


def _failure(reply: dict[str, Any]) -> tuple[End, str]:
    return reply["end"], reply["detail"]
