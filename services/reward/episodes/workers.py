"""One worker for each job's file with environments or tools, in a sandbox of its own, and what it
says to all its episodes at once.

Workers are kept as for reward functions: the least recently used is ended to make room for another,
but never while it has episodes. A worker without episodes is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from services.reward.job_code.workers import LOAD_DEADLINE_S, MAX_WORKERS
from services.reward.sandbox import host
from services.reward.sandbox.base import Sandbox, SlotDied, Worker
from services.reward.sandbox.inside.zygote import UNSAFE_FOLDER
from services.reward.sandbox.slots import IsolationFailed
from services.reward.sandbox.verdicts import DecodeError, decode
from shared.errors import BadRequest, Busy, Conflict, Failed
from shared.host.logs import get_logger
from shared.job import EnvironmentSpec

SERVE = "services.reward.episodes.inside_serve"
"""The module whose `serve` a worker runs."""

MAX_EPISODES = 256
"""Open episodes of one worker. Beyond it the answer is 429."""

MAX_PROCESSES = 4 * MAX_EPISODES
END_DEADLINE_S = 10.0
"""Seconds that a worker has to end an episode. Then it counts as dead."""

MAX_ANSWER_ITEMS = 1 << 18
MAX_REASON_CHARS = 1000


class EpisodeLost(Conflict):
    """The episode cannot continue, and another one can be opened in its place."""

    default_code = "episode_lost"


@dataclass(frozen=True)
class JobFile:
    """The file of an environment. `owner` is its job, or the request if that names no job."""

    environment: EnvironmentSpec
    owner: str

    @property
    def key(self) -> str:
        text = f"{self.owner}\0{self.name}\0{self.environment.source}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def name(self) -> str:
        file = self.environment.file
        return PurePath(file).name if file else "environment.py"


@dataclass
class _Seat:
    """A living episode: the future of why it is lost, and of its answer, if one is due."""

    lost: asyncio.Future[str]
    answer: asyncio.Future[str] | None = None


class FileWorker:
    """A worker that has loaded its file. Once it has `ended`, it has no episodes."""

    def __init__(self, worker: Worker) -> None:
        self.ended = ""
        self._worker = worker
        self._seats: dict[str, _Seat] = {}
        self._listener: asyncio.Task[None] | None = None

    def listen(self) -> None:
        self._worker.pause()
        self._listener = asyncio.create_task(self._listen())

    def num_episodes(self) -> int:
        return len(self._seats)

    async def ask(self, episode: str, message: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Returns the answer of the episode's process, which is untrusted. The first message opens
        the episode. Raises EpisodeLost, TimeoutError, or Busy for one episode too many."""
        seat = self._seat(episode, is_first="open" in message)
        answer = seat.answer = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(deadline_s):
            with contextlib.suppress(SlotDied):  # which the listener finds too
                await self._worker.tell({"episode": episode, "ask": message})
            await asyncio.wait({answer, seat.lost}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise EpisodeLost(seat.lost.result())
        return _decoded(answer.result())

    async def end(self, episode: str) -> None:
        """Ends the episode's process, if it has one."""
        seat = self._seats.get(episode)
        if seat is None:
            return
        try:
            async with asyncio.timeout(END_DEADLINE_S):
                with contextlib.suppress(SlotDied):
                    await self._worker.tell({"episode": episode, "end": True})
                await asyncio.wait({seat.lost})
        except TimeoutError:
            await self.dismiss(f"it did not end an episode within {END_DEADLINE_S:g} s")

    async def dismiss(self, reason: str) -> None:
        """Ends it for good, with all its episodes."""
        if self._listener is not None and self._listener is not asyncio.current_task():
            self._listener.cancel()
        self._lose_all(reason)
        await self._worker.dismiss()

    def _seat(self, episode: str, *, is_first: bool) -> _Seat:
        if episode in self._seats:
            return self._seats[episode]
        if self.ended or not is_first:
            raise EpisodeLost(self.ended or "its process ended")
        if len(self._seats) >= MAX_EPISODES:
            raise Busy(f"the job has {MAX_EPISODES} open episodes of this environment, the most")
        seat = self._seats[episode] = _Seat(asyncio.get_running_loop().create_future())
        return seat

    async def _listen(self) -> None:
        try:
            while True:
                self._heard(await self._worker.hear())
        except (SlotDied, ValueError, KeyError, TypeError) as error:
            get_logger().warning("environment worker ended", reason=str(error))
            await self.dismiss(f"the worker of its environment ended: {error}")

    def _heard(self, message: Any) -> None:
        seat = self._seats.get(message["episode"])
        if seat is None:
            return  # it was told to end twice
        if "lost" in message:
            del self._seats[message["episode"]]
            seat.lost.set_result(str(message["lost"])[:MAX_REASON_CHARS])
            if not self._seats:
                self._worker.pause()
        elif seat.answer is not None and not seat.answer.done():
            seat.answer.set_result(str(message["answer"]))

    def _lose_all(self, reason: str) -> None:
        self.ended = self.ended or reason
        seats, self._seats = self._seats, {}
        for seat in seats.values():
            seat.lost.set_result(self.ended[:MAX_REASON_CHARS])


@dataclass
class _Entry:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    worker: FileWorker | None = None

    def is_idle(self) -> bool:
        return not self.users and not (self.worker and self.worker.num_episodes())


class FileWorkers:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def num_episodes(self) -> int:
        workers = [entry.worker for entry in self._entries.values() if entry.worker]
        return sum(worker.num_episodes() for worker in workers)

    @contextlib.asynccontextmanager
    async def of(self, file: JobFile) -> AsyncGenerator[FileWorker]:
        """Yields the file's worker, started if there is none, and not ended meanwhile. Raises
        BadRequest with file, line and exception if the file cannot be loaded."""
        entry = self._entries.setdefault(file.key, _Entry())
        self._entries.move_to_end(file.key)
        entry.users += 1
        try:
            await self._end_surplus()
            async with entry.lock:
                if entry.worker is None or entry.worker.ended:
                    entry.worker = None
                    entry.worker = await self._loaded(file)
            yield entry.worker
        finally:
            entry.users -= 1

    async def release(self, file: JobFile) -> None:
        """Ends the file's worker, unless it is in use."""
        entry = self._entries.get(file.key)
        if entry is not None and entry.is_idle():
            del self._entries[file.key]
            await _end(entry)

    async def close(self) -> None:
        entries = [*self._entries.values()]
        self._entries.clear()
        for entry in entries:
            await _end(entry)

    async def _end_surplus(self) -> None:
        surplus = max(len(self._entries) - MAX_WORKERS, 0)
        idle = [key for key, entry in self._entries.items() if entry.is_idle()][:surplus]
        for entry in [self._entries.pop(key) for key in idle]:
            await _end(entry)

    async def _loaded(self, file: JobFile) -> FileWorker:
        try:
            worker = await self._sandbox.open_worker(SERVE, processes=MAX_PROCESSES)
        except IsolationFailed as error:
            raise Failed(f"no sandbox could be started for {file.name}: {error}") from error
        loaded = None
        try:
            answer = await worker.ask(_opening(file), LOAD_DEADLINE_S)
            if not isinstance(answer, dict) or "loaded" not in answer:
                told = answer.get("error", answer) if isinstance(answer, dict) else answer
                raise BadRequest(f"the environment cannot be loaded: {str(told)[:1000]}")
            loaded = FileWorker(worker)
            loaded.listen()
            return loaded
        except TimeoutError as error:
            raise BadRequest(f"{file.name} was not loaded within {LOAD_DEADLINE_S:g} s") from error
        except SlotDied as error:
            if error.killed:
                raise EpisodeLost(f"its worker ended while it was loaded: {error}") from error
            raise BadRequest(f"{file.name} cannot be loaded: {error}") from error
        finally:
            if loaded is None:
                await worker.dismiss()


def _opening(file: JobFile) -> dict[str, Any]:
    return {
        "source": file.environment.source,
        "file": file.name,
        "paths": host.package_paths(),
        "folder": f"{UNSAFE_FOLDER}{os.getpid()}-",
    }


async def _end(entry: _Entry) -> None:
    worker, entry.worker = entry.worker, None
    if worker is not None:
        await worker.dismiss("the service ended its worker")


def _decoded(text: str) -> dict[str, Any]:
    """Returns what a child sent. Raises EpisodeLost for anything but a table of plain data."""
    try:
        value = decode(text.encode(), max_items=MAX_ANSWER_ITEMS)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # no half of a surrogate pair
    except (DecodeError, UnicodeError) as error:
        raise EpisodeLost(f"its process answered with something unreadable: {error}") from error
    if not isinstance(value, dict):
        raise EpisodeLost("its process answered with something that is not a table")
    return value
