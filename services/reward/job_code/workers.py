"""Workers: sandboxed processes that each keep one file of one job loaded, and their calls. READ
FIRST.

A call is one batch that a reward function scores, or one episode of an environment. Importing numpy
takes longer than most steps have, so a worker stays until `MAX_WORKERS` others were used after it,
and never ends while it has calls. Between calls all its processes are stopped. Jobs never share a
worker, because it remembers what it was given.

A file that cannot be loaded is the job's mistake (BadRequest). All that a worker sends is
untrusted. The messages: `inside_serve.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.reward.sandbox import host
from services.reward.sandbox.base import WORKER_PROCESSES, Sandbox, SlotDied, Worker
from services.reward.sandbox.slots import IsolationFailed
from shared.errors import BadRequest, Failed
from shared.host.logs import get_logger

MAX_WORKERS = 8
LOAD_DEADLINE_S = 120.0
MAX_LATE_CALLS = 10  # of one grading, each of which may take all of its time
END_DEADLINE_S = 10.0
"""Seconds that a worker has to end a call. Then it counts as dead."""

MAX_REASON_CHARS = 1000


class CallLost(Exception):
    """A call cannot continue, though its worker may; the message says why."""


class StrayAnswer(SlotDied):
    """A worker sent something that answers no open call, so it is trusted with none."""


@dataclass(frozen=True)
class JobFile:
    """A job's file. `owner` is its job, or the request if that names no job; `serve` is the module
    that its worker runs, which gets `options` too; messages call what it defines `named`."""

    owner: str
    file: str
    source: str | None
    named: str
    serve: str
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    processes: int = WORKER_PROCESSES

    @property
    def key(self) -> str:
        parts = (self.owner, self.serve, *self.options.values(), self.file, str(self.source))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class JobWorker:
    """`loaded` is what it said of its file. Once it has `ended`, it has no calls."""

    def __init__(self, process: Worker) -> None:
        self.loaded: dict[str, Any] = {}
        self.ended: Exception | None = None
        self._process = process
        self._calls: dict[str, Call] = {}
        self._listener: asyncio.Task[None] | None = None

    async def load(self, file: JobFile) -> None:
        """Raises BadRequest with file, line and exception if the file cannot be loaded; SlotDied if
        something outside killed the worker."""
        self._listener = asyncio.create_task(self._listen())
        opening = {"source": file.source, "file": file.file, "paths": host.package_paths()}
        opening.update(file.options)
        call = self.open()
        try:
            answer = await call.ask(opening, LOAD_DEADLINE_S)
        except TimeoutError as error:
            raise BadRequest(f"{file.named} was not loaded within {LOAD_DEADLINE_S:g} s") from error
        except (SlotDied, CallLost) as error:
            if isinstance(error, SlotDied) and error.killed:
                raise
            raise BadRequest(f"{file.named} cannot be loaded: {error}") from error
        if not isinstance(answer, dict) or not answer or "error" in answer:
            reason = answer.get("error", answer) if isinstance(answer, dict) else answer
            raise BadRequest(f"{file.named} cannot be loaded: {str(reason)[:MAX_REASON_CHARS]}")
        self.loaded = answer
        self.close(call)

    def num_calls(self) -> int:
        return len(self._calls)

    def open(self) -> Call:
        """Returns a new call, which is lost already if the worker has ended."""
        call = Call(self)
        if self.ended:
            call.lost.set_result(self.ended)
        else:
            self._calls[call.name] = call
        return call

    def close(self, call: Call) -> None:
        """Takes no more answers to the call, and stops the worker if that was its last."""
        self._calls.pop(call.name, None)
        if not self._calls:
            self._process.pause()

    async def tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(SlotDied):  # which the listener finds too
            await self._process.tell(message)

    async def dismiss(self, reason: Exception) -> None:
        """Ends it for good. Its calls are lost for this reason."""
        if self._listener is not None and self._listener is not asyncio.current_task():
            self._listener.cancel()
        self.ended = self.ended or reason
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.lost.set_result(self.ended)
        await self._process.dismiss()

    async def _listen(self) -> None:
        try:
            while True:
                self._take(await self._process.hear())
        except SlotDied as error:
            get_logger().warning("worker of a job's own code ended", reason=str(error))
            await self.dismiss(error)

    def _take(self, message: Any) -> None:
        message = message if isinstance(message, dict) else {}
        call = self._calls.get(str(message.get("call")))
        if call is not None and "lost" in message:
            self.close(call)
            call.lost.set_result(CallLost(str(message["lost"])[:MAX_REASON_CHARS]))
        elif call is None or "answer" not in message or not call.take(message["answer"]):
            raise StrayAnswer("its process sent an answer that is not one to this call")


class Call:
    """An open call. Its name is drawn, so that no code can answer in advance. `lost` is the future
    of why it cannot continue."""

    def __init__(self, worker: JobWorker) -> None:
        self.name = secrets.token_hex(8)
        self.lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._answer: asyncio.Future[Any] | None = None
        self._worker = worker

    async def ask(self, message: Mapping[str, Any], deadline_s: float) -> Any:
        """Returns the worker's answer, which is untrusted. Raises TimeoutError, CallLost, or
        SlotDied if the worker ended."""
        answer = self._answer = asyncio.get_running_loop().create_future()
        if not self.lost.done():
            async with asyncio.timeout(deadline_s):
                await self._worker.tell({"call": self.name, "ask": message})
                await asyncio.wait({answer, self.lost}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise self.lost.result()
        return answer.result()

    def take(self, answer: Any) -> bool:
        """Returns whether the answer was due."""
        if self._answer is None or self._answer.done():
            return False
        self._answer.set_result(answer)
        return True

    async def end(self) -> None:
        """Ends the call in its worker, and waits for that."""
        if self.lost.done():
            return
        try:
            async with asyncio.timeout(END_DEADLINE_S):
                await self._worker.tell({"call": self.name, "end": True})
                await asyncio.wait({self.lost})
        except TimeoutError:
            reason = f"it did not end an episode within {END_DEADLINE_S:g} s"
            await self._worker.dismiss(SlotDied(reason))


@dataclass
class Entry:
    """A file's worker, if it has one now, and how many callers hold or wait for it."""

    file: JobFile
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    calling: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    worker: JobWorker | None = None

    def is_idle(self) -> bool:
        return not self.users and not (self.worker and self.worker.num_calls())

    async def drop(self) -> None:
        """Ends the worker."""
        worker, self.worker = self.worker, None
        if worker is not None:
            await worker.dismiss(CallLost("the service ended its worker"))


class JobWorkers:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def num_calls(self) -> int:
        return sum(entry.worker.num_calls() for entry in self._entries.values() if entry.worker)

    @contextlib.asynccontextmanager
    async def using(self, file: JobFile) -> AsyncGenerator[Entry]:
        """Yields the file's entry, after ending surplus workers that are idle, the least recently
        used first."""
        entry = self._entries.setdefault(file.key, Entry(file))
        self._entries.move_to_end(file.key)
        entry.users += 1
        try:
            surplus = max(len(self._entries) - MAX_WORKERS, 0)
            idle = [key for key, other in self._entries.items() if other.is_idle()][:surplus]
            for other in [self._entries.pop(key) for key in idle]:
                await other.drop()
            yield entry
        finally:
            entry.users -= 1

    async def worker(self, entry: Entry) -> JobWorker:
        """Returns the entry's worker, started and loaded if there is none. Raises as `load` does,
        and Failed where no sandbox can be started."""
        async with entry.loading:
            if entry.worker is None or entry.worker.ended:
                await entry.drop()
                entry.worker = await self._loaded(entry.file)
            return entry.worker

    async def release(self, file: JobFile) -> None:
        """Ends the file's worker, unless it is in use."""
        entry = self._entries.get(file.key)
        if entry is not None and entry.is_idle():
            del self._entries[file.key]
            await entry.drop()

    async def close(self) -> None:
        entries = [*self._entries.values()]
        self._entries.clear()
        for entry in entries:
            await entry.drop()

    async def _loaded(self, file: JobFile) -> JobWorker:
        try:
            process = await self._sandbox.open_worker(file.serve, processes=file.processes)
        except IsolationFailed as error:
            raise Failed(f"no sandbox could be started for {file.named}: {error}") from error
        worker = JobWorker(process)
        try:
            await worker.load(file)
        finally:
            if not worker.loaded:
                await worker.dismiss(CallLost("its file was not loaded"))
        return worker
