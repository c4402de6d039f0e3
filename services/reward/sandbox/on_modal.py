"""Modal Sandboxes instead of slots: a container (gVisor) for each program, its network blocked,
gone when the program has ended.

For reward services that run on Modal; a container takes a second to start. It is tested against a
stand-in of Modal's client with the client's signatures, which runs the same command in a local
process. It was never run on Modal itself. Jobs' own code needs the local sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

from services.reward.sandbox import verdicts
from services.reward.sandbox.base import WORKER_PROCESSES, Probe, Sandbox, Worker, waiting
from services.reward.sandbox.verdicts import DecodeError, ProgramExit, decode
from shared.errors import Failed, how_to_install
from shared.host.logs import get_logger
from shared.wire import ExecuteRequest, Execution

APP = "hone-sandbox"
PYTHON = "3.11"
MAX_AT_ONCE = 32
START_GRACE_S = 120.0
"""Seconds that a container may take to start, including pulling its image for the first time."""

END_GRACE_S = 10.0
MAX_ANSWER_BYTES, MAX_ANSWER_ITEMS = 4 << 20, 64
_PIECE_BYTES = 1 << 20
_INSIDE = Path(__file__).parent / "inside"
_SHOWN = "/hone/services/reward/sandbox/inside"
_BOOT = (
    "import sys; sys.path.insert(0, '/hone'); "
    "from services.reward.sandbox.inside.alone import main; main()"
)

PROBES = (
    Probe("runs programs", "x = sum(range(10))\nopen('/tmp/x', 'w').write('1')", "x", 45),
    Probe(
        "no network",
        "import socket\ntry:\n    socket.create_connection(('1.1.1.1', 53), timeout=3)\n    x = "
        "'reached'\n"
        "except OSError:\n    x = 'refused'",
        "x",
        "refused",
    ),
    Probe("time limited", "while True: pass", verdict="time_limit", timeout_s=1.0),
)


class _NoAnswer(Exception):
    """A container ended, or was silent, before its program began. That is not the program's
    fault."""


class _AnswerLost(Exception):
    """A container ended without an answer after its program began. The program may have caused
    that."""


class ModalSandbox(Sandbox):
    """`packages` are installed with pip into the image, which is Modal's Debian with Python."""

    self_test = PROBES

    def __init__(self, *, num_slots: int | None = None, packages: Sequence[str] = ()) -> None:
        self._packages = packages
        self._places = asyncio.Semaphore(num_slots or MAX_AT_ONCE)
        self._modal: Any = None
        self._app: Any = None
        self._image: Any = None

    async def start(self) -> None:
        try:
            import modal  # pyright: ignore[reportMissingImports]
        except ImportError:
            self._problem = f"HONE_SANDBOX=modal needs the Modal client: {how_to_install('modal')}"
            return
        self._modal = modal
        try:
            self._app = await modal.App.lookup.aio(APP, create_if_missing=True)
        except modal.exception.Error as error:
            self._problem = (
                f"HONE_SANDBOX=modal: Modal refuses the credentials: {error}; run `modal token "
                "new`, or set MODAL_TOKEN_ID and _SECRET"
            )
            return
        self._image = self._build_image()
        fault = await self._tested()
        self._problem = f"HONE_SANDBOX=modal: {fault}" if fault else None
        get_logger().info("sandbox on Modal", problem=self._problem, **self.report())

    async def close(self) -> None:
        self._problem = self._problem or "the sandbox is closed"

    def report(self) -> dict[str, Any]:
        tier = "none" if self._problem else "modal"
        return {"tier": tier, "packages": list(self._packages), "probes": self.probed()}

    async def execute(self, request: ExecuteRequest) -> Execution:
        self.check_usable()
        verdict: Literal["sandbox_error", "runtime_error"] = "sandbox_error"
        reason = ""
        with waiting.get()():
            await self._places.acquire()
        try:
            for _ in range(2):
                try:
                    return await self._run_once(request)
                except (self._modal.exception.Error, _NoAnswer, _AnswerLost) as error:
                    verdict = "runtime_error" if isinstance(error, _AnswerLost) else "sandbox_error"
                    reason = str(error) or type(error).__name__
                    get_logger().warning("Modal Sandbox failed", reason=reason)
        finally:
            self._places.release()
        return Execution(verdict=verdict, stderr=f"Modal failed twice: {reason}")

    async def open_worker(self, module: str, *, processes: int = WORKER_PROCESSES) -> Worker:
        raise Failed(
            "a job's own reward functions and environments need HONE_SANDBOX=local; the Modal "
            "backend runs model-written programs only"
        )

    def _build_image(self) -> Any:
        image = self._modal.Image.debian_slim(python_version=PYTHON)
        image = image.pip_install(*self._packages) if self._packages else image
        return image.add_local_dir(_INSIDE, _SHOWN)

    async def _run_once(self, request: ExecuteRequest) -> Execution:
        start = time.monotonic()
        async with self._container(request) as container:
            try:
                async with asyncio.timeout(request.timeout_s + START_GRACE_S + END_GRACE_S):
                    lines = await self._converse(container, request)
            except TimeoutError:
                raise _NoAnswer(f"no container began within {START_GRACE_S:g} s") from None
        return execution_of(lines, request, time.monotonic() - start)

    @contextlib.asynccontextmanager
    async def _container(self, request: ExecuteRequest) -> AsyncIterator[Any]:
        container = await self._modal.Sandbox.create.aio(
            "python3", "-P", "-B", "-X", "utf8", "-c", _BOOT,
            app=self._app,
            image=self._image,
            timeout=math.ceil(request.timeout_s + START_GRACE_S + END_GRACE_S),
            cpu=(0.5, 1.0),
            memory=(256, request.memory_mib + 256),
            block_network=True,
        )  # fmt: skip
        try:
            yield container
        finally:
            with contextlib.suppress(self._modal.exception.Error):
                await container.terminate.aio()  # it may have ended already

    async def _converse(self, container: Any, request: ExecuteRequest) -> list[str]:
        """Returns the lines of the answer, fewer than two if the container went silent after its
        program began."""
        task = {"program": request.model_dump(exclude={"stdin"}), "stdin": request.stdin}
        data = json.dumps(task).encode()
        for offset in range(0, len(data), _PIECE_BYTES):
            container.stdin.write(data[offset : offset + _PIECE_BYTES])
            await container.stdin.drain.aio()
        container.stdin.write_eof()
        await container.stdin.drain.aio()
        told = ""
        try:
            async with asyncio.timeout(None) as deadline:
                async for part in container.stdout:
                    if not told:
                        deadline.reschedule(
                            asyncio.get_running_loop().time() + request.timeout_s + END_GRACE_S
                        )
                    told += str(part)
                    if len(told) > MAX_ANSWER_BYTES:
                        break
        except TimeoutError:
            pass
        except self._modal.exception.Error as error:
            if told.startswith("began"):
                raise _AnswerLost(f"the container was lost: {error}") from error
            raise
        if not told.startswith("began"):
            raise _NoAnswer(f"the container ended before the program began: {told[:200]!r}")
        return told.splitlines()


def execution_of(lines: list[str], request: ExecuteRequest, wall_s: float) -> Execution:
    """Returns the verdict on an answer. After "began" the program may have written or withheld any
    part of it; then it has failed."""
    if len(lines) < 2:
        late = "TimeLimit: nothing came back\n"
        return Execution(verdict="time_limit", stderr=late, wall_s=wall_s)
    try:
        facts = _checked(decode(lines[1].encode(), max_items=MAX_ANSWER_ITEMS), wall_s)
    except (DecodeError, ValueError, KeyError, TypeError, OverflowError):
        bad = "BadResult: the program overwrote how it ended\n"
        return Execution(verdict="runtime_error", stderr=bad, wall_s=wall_s)
    return verdicts.execution(facts, request)


def _checked(told: dict[str, Any], wall_s: float) -> ProgramExit:
    """Returns the facts that `inside/alone.py` wrote. Raises ValueError, KeyError or TypeError for
    facts that it does not write."""
    if told["limit"] not in (None, "wall"):
        raise ValueError(told["limit"])
    return ProgramExit(
        exit=int(told["exit"]),
        limit=told["limit"],
        wall_s=wall_s,
        cpu_s=float(told["cpu_s"]),
        overflow=bool(told["overflow"]),
        stdout=str(told["stdout"]),
        stderr=str(told["stderr"]),
        result=str(told["result"]),
    )
