"""How one command becomes the same method call on every rank, and every rank's outcome one answer.

    HTTP thread of rank 0 --Inbox--> main thread of rank 0 --Channel.broadcast--> every rank: Trainer.<name>(body)
                                                           <--Channel.gather----- result or error

An error on one rank is the error of all. A rank that fails while the others wait for it inside a collective cannot tell them by
a collective: it leaves a note in the run folder first, which rank 0 watches (`watch`).
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel

from services.trainer.trainer import Trainer
from shared import codec
from shared.errors import Failed, HoneError, from_problem
from shared.logs import get_logger
from shared.wire import CheckpointRequest, PublishRequest, TrainerJob, TrainStepRequest, Wire

HEARTBEAT_S = 30.0
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
NOTE_GRACE_S = 10.0
NOTE_POLL_S = 0.5

BODIES: dict[str, type[Wire]] = {
    "load_job": TrainerJob,
    "train_step": TrainStepRequest,
    "publish_weights": PublishRequest,
    "write_checkpoint": CheckpointRequest,
}
"""Every command is a method of `Trainer`, and this is its body."""

CHANGES_WEIGHTS = frozenset({"load_job", "train_step"})


@dataclass(frozen=True)
class Ticket:
    """A command under way, and where its answer goes."""

    name: str
    body: Wire
    answer: Future[BaseModel]


class Inbox:
    """Hands commands from HTTP's thread to rank 0's main thread, one at a time, and answers back."""

    def __init__(self) -> None:
        self._tickets: queue.Queue[Ticket] = queue.Queue()
        self._current: Ticket | None = None

    async def run(self, name: str, body: Wire) -> BaseModel:
        """Returns what the ranks answer. The command goes on even if its caller goes away."""
        ticket = Ticket(name, body, Future())
        self._tickets.put(ticket)
        return await asyncio.shield(asyncio.wrap_future(ticket.answer))

    def next(self, timeout_s: float) -> Ticket | None:
        """Returns the next command, or None after `timeout_s` seconds without one."""
        try:
            self._current = self._tickets.get(timeout=timeout_s)
        except queue.Empty:
            self._current = None
        return self._current

    def fail(self, error: HoneError) -> None:
        """Answers the command under way with `error`, from whatever thread knows that it will not end by itself."""
        if self._current is not None and not self._current.answer.done():
            self._current.answer.set_exception(error)


class Channel:
    """Bytes from rank 0 to all, and values from all to all, on a gloo group of its own."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    def broadcast(self, message: bytes) -> bytes:
        """Returns rank 0's message."""
        size = torch.tensor([len(message)])
        dist.broadcast(size, src=0, group=self._group)
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(int(size), dtype=torch.uint8)
        if data.numel():
            dist.broadcast(data, src=0, group=self._group)
        return data.numpy().tobytes()

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's value, by rank."""
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self._group)
        return values


class Notes:
    """Files in the run folder, one a rank, that say why the rank will not come to the collective others wait in."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._own = folder / f"failed-{rank}"

    def leave(self, sentence: str) -> None:
        aside = self._own.with_name("." + self._own.name)
        aside.write_text(sentence, encoding="utf-8")
        aside.replace(self._own)

    def clear(self) -> None:
        self._own.unlink(missing_ok=True)

    def standing(self, age_s: float) -> str | None:
        """Returns a note that has been there for `age_s` seconds, if any."""
        for note in sorted(self._folder.glob("failed-*")):
            try:
                if time.time() - note.stat().st_mtime >= age_s:
                    return note.read_text(encoding="utf-8")
            except FileNotFoundError:
                continue  # cleared just now
        return None


def follow(trainer: Trainer, channel: Channel, notes: Notes, inbox: Inbox | None) -> None:
    """Every rank's main loop; rank 0 has the inbox. Ends only by an exception: another rank is gone."""
    while True:
        ticket = inbox.next(HEARTBEAT_S) if inbox else None
        message = channel.broadcast(_encode(ticket))
        if message:
            outcome = perform(trainer, channel, notes, *_decode(message))
            if ticket is not None:
                _answer(ticket.answer, outcome)


def perform(trainer: Trainer, channel: Channel, notes: Notes, name: str, body: Wire) -> BaseModel | HoneError:
    """Returns this rank's result, or the error of the first rank that had one.

    If ranks disagree about whether the weights changed, they have no common weights: the job is unloaded.
    """
    outcome = _attempt(trainer, name, body, channel.rank)
    if isinstance(outcome, HoneError):
        notes.leave(outcome.detail)
    problems = channel.gather(outcome.problem() if isinstance(outcome, HoneError) else None)
    notes.clear()
    failed = [problem for problem in problems if problem]
    if not failed:
        return outcome
    if len(failed) < len(problems) and name in CHANGES_WEIGHTS:
        trainer.unload()
    return from_problem(failed[0]["status"], failed[0], "a rank")


def watch(notes: Notes, end: Callable[[str], None]) -> None:
    """Calls `end` with the note of a rank that failed while another is still inside the command. Runs in a thread of rank 0."""
    while (sentence := notes.standing(NOTE_GRACE_S)) is None:
        time.sleep(NOTE_POLL_S)
    end(sentence)


def _attempt(trainer: Trainer, name: str, body: Wire, rank: int) -> Any:
    try:
        return getattr(trainer, name)(body)
    except HoneError as error:
        return error
    except Exception as error:
        get_logger().exception("command failed", command=name, rank=rank)
        return Failed(f"{name} failed on rank {rank}: {type(error).__name__}: {error}")


def _answer(answer: Future[BaseModel], outcome: BaseModel | HoneError) -> None:
    if answer.done():
        return
    if isinstance(outcome, HoneError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def _encode(ticket: Ticket | None) -> bytes:
    return ticket.name.encode() + b"\n" + codec.encode(ticket.body, codec.MSGPACK) if ticket else b""


def _decode(message: bytes) -> tuple[str, Wire]:
    name, _, data = message.partition(b"\n")
    return name.decode(), codec.decode(BODIES[name.decode()], data, codec.MSGPACK)
