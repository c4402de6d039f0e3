"""What the reward tests share: tools for graders, and a look at the processes that belong to a
sandbox."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Iterable
from typing import Any, TypeVar

from services.reward import graders
from services.reward.grading import registry
from services.reward.grading.limited.pool import LimitedPool
from services.reward.grading.registry import GraderTools
from services.reward.job_code.functions import FunctionWorkers
from services.reward.sandbox.base import WORKER_PROCESSES, Sandbox, Worker
from services.reward.sandbox.local import LocalSandbox
from shared.errors import Failed
from shared.job import RewardSpec
from shared.settings import Settings
from shared.wire import ExecuteRequest, Execution, Part, ScoreItem

graders.load()

S = TypeVar("S", bound=Sandbox)


class ScriptedSandbox(Sandbox):
    """A seam to reach what a real sandbox does not do on demand: answers each program with what the
    test says."""

    def __init__(self, answer: Execution) -> None:
        self.answer = answer
        self.asked: list[ExecuteRequest] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def problem(self) -> str | None:
        return None

    def report(self) -> dict[str, object]:
        return {"tier": "scripted"}

    async def execute(self, request: ExecuteRequest) -> Execution:
        self.asked.append(request)
        return self.answer

    async def open_worker(self, module: str, *, processes: int = WORKER_PROCESSES) -> Worker:
        raise Failed("a scripted sandbox has no workers")


def tools_of(sandbox: Sandbox, **settings: object) -> GraderTools:
    return GraderTools(Settings(**settings), sandbox, FunctionWorkers(sandbox), LimitedPool())  # type: ignore[arg-type]


def scripted(**settings: object) -> GraderTools:
    """Returns tools for graders that run no program."""
    return tools_of(ScriptedSandbox(Execution(verdict="ok")), **settings)


async def grade(
    tools: GraderTools | Sandbox,
    completion: str,
    row: dict[str, Any],
    grader: str = "code_tests",
    **params: Any,
) -> Part:
    """Returns what the grader makes of one completion for this row."""
    tools = tools_of(tools) if isinstance(tools, Sandbox) else tools
    bound = registry.bind(RewardSpec(grader=grader, params=params), tools)
    (part,) = await bound.grade([ScoreItem(prompt="", completion=completion, row=row)])
    return part


Case = tuple[str, Any, float | None]
"""A completion, the row's answer, and what the completion should earn."""


async def math_earned(tools: GraderTools, cases: Iterable[Case], **params: Any) -> list[Case]:
    """Returns the cases with what `math` gives in place of what each should earn."""
    tried = [(text, answer) for text, answer, _ in cases]
    math = registry.bind(RewardSpec(grader="math", params=params), tools)
    parts = await math.grade(
        [ScoreItem(prompt="", completion=text, row={"answer": answer}) for text, answer in tried]
    )
    return [(*one, part.value) for one, part in zip(tried, parts, strict=True)]


def processes_of(service_pid: int) -> list[int]:
    """Returns every live process inside, or at the door of, the sandboxes of a service: those in
    the user namespaces of its slots, whatever they have become by exec; the oldest first, for
    numbers of processes begin again."""
    mark = f'"service_pid": {service_pid},'
    pids = {pid: _user_namespace(pid) for pid in _pids()}
    slots = {pid for pid in pids if mark in _read(pid, "cmdline")}
    namespaces = {pids[pid] for pid in slots} - {_user_namespace(os.getpid()), None}
    inside = {pid for pid, namespace in pids.items() if namespace in namespaces}
    return sorted((pid for pid in slots | inside if is_alive(pid)), key=_began)


def is_alive(pid: int) -> bool:
    """Returns whether `pid` runs; what is dead but not yet collected does not."""
    return _state(pid) not in "ZX"


def kill(service_pid: int) -> None:
    """Kills, with no warning, whatever runs in the sandboxes of a service."""
    for pid in processes_of(service_pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def user_namespaces_of(pids: list[int]) -> set[str | None]:
    return {_user_namespace(pid) for pid in pids}


def processes_in(namespaces: set[str | None]) -> list[int]:
    return [pid for pid in _pids() if _user_namespace(pid) in namespaces and is_alive(pid)]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208


def _state(pid: int) -> str:
    return _read(pid, "stat").rpartition(")")[2].strip()[:1] or "X"


def _began(pid: int) -> tuple[int, int]:
    """Returns when the process began, in ticks since the boot, and its number."""
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else 0, pid


def _read(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:  # noqa: PTH123 (asked often)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _user_namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/user")  # noqa: PTH115 (asked often)
    except OSError:
        return None


@contextlib.asynccontextmanager
async def started(sandbox: S) -> AsyncGenerator[S]:
    """Starts a sandbox, and closes it at the end."""
    await sandbox.start()
    try:
        yield sandbox
    finally:  # what a failed test leaves would fail those after it
        await sandbox.close()


@contextlib.asynccontextmanager
async def running_sandbox(num_slots: int) -> AsyncGenerator[LocalSandbox]:
    """Yields an isolated sandbox, and finds nothing of it left at the end."""
    async with started(LocalSandbox(isolated=True, num_slots=num_slots)) as sandbox:
        assert sandbox.problem() is None
        yield sandbox
    assert processes_of(os.getpid()) == []


@contextlib.asynccontextmanager
async def running_tools(num_slots: int) -> AsyncGenerator[GraderTools]:
    """Yields what graders work with, in a sandbox as `running_sandbox` yields it."""
    async with running_sandbox(num_slots) as sandbox:
        tools = tools_of(sandbox)
        try:
            yield tools
        finally:
            await tools.limited.close()
