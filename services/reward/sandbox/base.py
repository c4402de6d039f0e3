"""The sandbox as the rest of the service sees it. A backend implements `start`, `close`, `execute`
and `open_worker`."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from shared.wire import ExecuteRequest, Execution

waiting: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar(
    "waiting", default=contextlib.nullcontext
)
"""In what a program waits for a free sandbox. A deadline around many programs stands still there:
else programs that use up their time would make those behind them late."""


class SlotDied(Exception):
    """A slot or worker ended, or stopped answering, in the middle of something; the message says
    how.

    `killed`: something outside its own code killed it, as far as its exit code tells: another
    process, or the kernel for its memory.
    """

    def __init__(self, message: str, *, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


class Worker(ABC):
    """A process that keeps a job's own code loaded and answers messages, one at a time."""

    @abstractmethod
    async def ask(self, message: dict[str, Any], deadline_s: float) -> Any:
        """Returns the answer, which is untrusted. Raises TimeoutError after `deadline_s` and
        SlotDied if the worker ended; in both cases it must not be asked again."""

    @abstractmethod
    def pause(self) -> None:
        """Stops all that runs in it, until it is asked again."""

    @abstractmethod
    async def dismiss(self) -> None:
        """Ends it for good, with all that runs in it."""


class Sandbox(ABC):
    @abstractmethod
    async def start(self) -> None:
        """Starts and tests itself. A host that cannot isolate is no exception here: it is
        `problem()`."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def problem(self) -> str | None:
        """Returns None when it runs programs, else a sentence saying what is missing."""

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """Returns the tier that was reached and how each probe of the self-test went."""

    @abstractmethod
    async def execute(self, request: ExecuteRequest) -> Execution:
        """Returns how the program ended. Its own failures are verdicts, "sandbox_error" is ours.
        Raises Failed with `problem()` where nothing can be run at all."""

    @abstractmethod
    async def open_worker(self, module: str) -> Worker:
        """Returns a new worker, in a sandbox of its own, that runs `serve(channel)` of `module`.
        Raises Failed as `execute` does."""

    async def run(self, requests: Sequence[ExecuteRequest]) -> list[Execution]:
        """Returns one Execution per request, in order. Identical requests run once."""
        keys = [request.model_dump_json() for request in requests]
        distinct = dict(zip(keys, requests, strict=True))
        executions = await asyncio.gather(*(self.execute(request) for request in distinct.values()))
        by_key = dict(zip(distinct, executions, strict=True))
        return [by_key[key] for key in keys]
