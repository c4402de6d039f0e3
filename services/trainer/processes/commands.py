"""Commands. Each becomes the same method call on every rank, and the ranks' outcomes become one
answer. READ FIRST.

    HTTP thread of rank 0 --Inbox--> main thread of rank 0
                                         --Ranks.broadcast--> every rank: Trainer.<name>(body)
                                         <--Ranks.settle----- result or error

If only some ranks have applied a step, the ranks no longer hold the same weights. Then all end, and
new ranks continue from a checkpoint. A rank also ends if its device has failed for good, as a GPU
does after an illegal access, because every later call on it fails too.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from services.trainer.engine import Ranks, as_hone_error
from services.trainer.processes.rendezvous import Failures
from services.trainer.trainer import Trainer
from shared.errors import HoneError, Unavailable, from_problem
from shared.host.logs import get_logger, of_request, request_id
from shared.http import codec
from shared.http.operations import Starting
from shared.wire import (
    CheckpointRequest,
    Fenced,
    ForwardBackwardRequest,
    ForwardRequest,
    OptimStepRequest,
    PublishRequest,
    TrainerJob,
    TrainStepRequest,
    Wire,
)

IDLE_S = 30.0
"""Seconds without a command after which rank 0 sends an empty one, because the other ranks' wait is
bounded."""

FAILURE_GRACE_S = 10.0
FAILURE_POLL_S = 0.5

BODIES: dict[str, type[Fenced]] = {
    "load_job": TrainerJob,
    "train_step": TrainStepRequest,
    "forward": ForwardRequest,
    "forward_backward": ForwardBackwardRequest,
    "optim_step": OptimStepRequest,
    "publish_weights": PublishRequest,
    "write_checkpoint": CheckpointRequest,
}
"""The body of every command. A command is a method of `Trainer`."""


CHANGE_WEIGHTS = ("train_step", "forward_backward", "optim_step")
"""The commands after which ranks with different outcomes hold different weights or gradients."""


class RanksRestartNeeded(Exception):
    """These ranks cannot continue, but newly started ranks can; `error` says why."""

    def __init__(self, error: HoneError) -> None:
        super().__init__(error.detail)
        self.error = error


class Inbox:
    """Passes commands from the HTTP thread to rank 0's main thread, one at a time, and answers
    back."""

    def __init__(self) -> None:
        self._waiting = FairQueue()
        self._current: Ticket | None = None

    def put(self, name: str, body: Fenced) -> Future[BaseModel]:
        """Returns the future of the ranks' answer."""
        ticket = Ticket(name, body, Future(), request_id())
        self._waiting.put(ticket)
        return ticket.answer

    async def run(self, name: str, body: Fenced) -> BaseModel:
        """Returns the ranks' answer. The command continues even if its caller disconnects."""
        return await asyncio.shield(asyncio.wrap_future(self.put(name, body)))

    def next(self, timeout_s: float) -> Ticket | None:
        """Returns the next command, or None after `timeout_s` seconds without one."""
        self._current = self._waiting.next(timeout_s)
        return self._current

    def fail(self, error: HoneError) -> None:
        """Answers the command under way with `error`, because the command will not end. Any thread
        may call this."""
        if self._current is not None:
            _answer(self._current.answer, error)


class FirstLoad:
    """Whether the trainer is ready. Its first command loads the previous ranks' job again (None: no
    job); it is ready after that, until it `ends`."""

    def __init__(self, request: TrainerJob | None, answer: Future[BaseModel] | None) -> None:
        self.ends: str | None = None
        self._request = request
        self._answer = answer

    @classmethod
    def after_loading(cls, inbox: Inbox, request: TrainerJob | None) -> FirstLoad:
        """Returns the readiness of a trainer, and puts the loading of `request` as its first
        command."""
        return cls(request, inbox.put("load_job", request) if request else None)

    def problem(self, loaded_job: str | None) -> str | None:
        """Returns why the trainer is not ready with this loaded job; None if it is."""
        if self.ends is not None:
            return self.ends
        if self._request is None or self._answer is None or loaded_job is not None:
            return None
        what = f"job {self._request.job_id!r}, which was loaded before a failure,"
        if not self._answer.done():
            return Starting(f"{what} is being loaded again")
        error = self._answer.exception()
        return f"{what} could not be loaded again: {error}" if error else None


def follow(trainer: Trainer, ranks: Ranks, inbox: Inbox | None) -> None:
    """Every rank's main loop; rank 0 has the inbox. Ends only by an exception: RanksRestartNeeded,
    or a RuntimeError because another rank has ended."""
    while True:
        ticket = inbox.next(IDLE_S) if inbox else None
        message: bytes = ranks.broadcast(_message(ticket))
        if message:
            name, id, body = _decode(message)
            with of_request(id):
                outcome = perform(trainer, ranks, name, body)
            if ticket is not None:
                _answer(ticket.answer, outcome)


def perform(trainer: Trainer, ranks: Ranks, name: str, body: Fenced) -> BaseModel | HoneError:
    """Returns this rank's result, or the error of the first rank that had one.

    If ranks disagree about whether a job is loaded, it is freed. Raises RanksRestartNeeded if this
    rank's device has failed, and on rank 0 if ranks disagree about whether a step was applied.
    """
    outcome = _attempt(trainer, name, body, ranks.rank)
    problems = [
        problem for problem, _ in ranks.settle(outcome if isinstance(outcome, HoneError) else None)
    ]
    failed = [problem for problem in problems if problem]
    if not failed:
        return outcome
    error = from_problem(failed[0]["status"], failed[0], "a rank")
    if len(failed) < len(problems):
        if name == "load_job":
            trainer.give_up(body.job_id)
        elif name in CHANGE_WEIGHTS and ranks.rank == 0:
            raise RanksRestartNeeded(error)
    return error


def watch(failures: Failures, end: Callable[[HoneError], None]) -> None:
    """Calls `end` with the error of a failed rank while another rank is still inside the command.
    Runs in a thread of rank 0.

    A failure reported less than `FAILURE_GRACE_S` seconds ago does not count, because the other
    ranks may be about to fail too.
    """
    failure, since = None, 0.0
    while failure is None or time.monotonic() - since < FAILURE_GRACE_S:
        time.sleep(FAILURE_POLL_S)
        reported = failures.first()
        if reported is None or failure is None or reported.detail != failure.detail:
            failure, since = reported, time.monotonic()
    end(failure)


def _attempt(trainer: Trainer, name: str, body: Wire, rank: int) -> Any:
    try:
        return getattr(trainer, name)(body)
    except HoneError as error:
        return error
    except Exception as error:  # catches everything, because the other ranks wait for the outcome
        get_logger().exception("command failed", command=name, rank=rank)
        if fault := trainer.device_fault():
            raise RanksRestartNeeded(
                Unavailable(f"the device of rank {rank} failed: {fault}")
            ) from error
        return as_hone_error(error, name, rank)


def _answer(answer: Future[BaseModel], outcome: BaseModel | HoneError) -> None:
    if answer.done():
        return
    if isinstance(outcome, HoneError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def _message(ticket: Ticket | None) -> bytes:
    """Returns the encoded command for all ranks; empty without a command. One that msgpack cannot
    encode, as with a whole number beyond 64 bits, is answered with an error, and is empty too."""
    if ticket is None:
        return b""
    head = f"{ticket.name} {ticket.request_id}\n".encode()
    try:
        return head + codec.encode(ticket.body, codec.MSGPACK)
    except HoneError as error:
        _answer(ticket.answer, error)
        return b""


def _decode(message: bytes) -> tuple[str, str, Fenced]:
    """Returns a command's name, its request's id, and its body."""
    head, _, data = message.partition(b"\n")
    name, id = head.decode().split(" ")
    return name, id, codec.decode(BODIES[name], data, codec.MSGPACK)


# --- the queue of commands ------------------------------------------------------------------------


HOLD_S = 0.1
"""Seconds in which a job whose gradient waits may send its next command."""

TURN_TOKENS = 1 << 17
"""Tokens of calls after which only the optimizer step of that job still goes first."""

COMMAND_TOKENS = 1000
"""The charge of a command that computes no tokens, on a separate account."""


@dataclass(frozen=True)
class Ticket:
    """A command under way, and the future for its answer."""

    name: str
    body: Fenced
    answer: Future[BaseModel]
    request_id: str

    @property
    def job_id(self) -> str:
        return self.body.job_id

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the command computes, prompts included."""
        body = self.body
        if not isinstance(body, TrainStepRequest | ForwardRequest | ForwardBackwardRequest):
            return 0
        return sum(len(one.prompt_token_ids) + len(one.token_ids) for one in body.examples)


class FairQueue:
    """Chooses the next command where jobs share a trainer: start-time fair queueing (Goyal et al.,
    1996) of the tokens that commands compute. Any thread may put a command in; one thread takes
    them out.

    A command begins, in tokens per weight, where its payer's last one ended, or where the queue is
    now if that is later. The payer is the API key that submitted the job, so more jobs do not get a
    key more tokens; a job without a key is its own payer. The command that begins first is next. So
    a payer that was idle gets no credit, and a payer that sends much waits only for its own
    commands. A command that computes no tokens, such as the publication of a step's weights, does
    not wait for tokens of any payer, unless its payer sends many such commands.

    A gradient that waits for its optimizer step is lost to a change of turns, and computed again
    later. So its job stays next for up to TURN_TOKENS and the optimizer step, and has HOLD_S to
    send its next command. Beyond that its job is charged for computing it again.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Ticket]] = []
        self._number = 0
        self._now = 0.0
        self._ends: dict[str, float] = {}  # by payer
        self._payers: dict[str, str] = {}  # by job
        self._weights: dict[str, float] = {}  # by job
        self._gradient_job: str | None = None
        self._turn_tokens = 0  # of the gradient that waits, since its job's turn began
        self._gradient_tokens: dict[str, int] = {}  # by job, since its optimizer step

    def put(self, ticket: Ticket) -> None:
        with self._changed:
            job_id, body = ticket.job_id, ticket.body
            if isinstance(body, TrainerJob):
                self._weights[job_id] = body.weight
                self._payers[job_id] = f"key {body.key}" if body.key else job_id
            if ticket.num_tokens:
                begin = self._charge(job_id, ticket.num_tokens)
            else:  # not after other payers' tokens, unless the payer sends many such commands
                own = [begin for begin, _, _ in self._waiting_of(job_id)]
                begin = max([*own, self._charge(job_id, COMMAND_TOKENS, "commands of ")])
            self._number += 1
            self._waiting.append((begin, self._number, ticket))
            self._changed.notify()

    def _charge(self, job_id: str, num_tokens: int, account: str = "") -> float:
        """Charges the job's payer for the tokens, and returns where they begin."""
        payer = account + self._payers.get(job_id, job_id)
        begin = max(self._now, self._ends.get(payer, 0.0))
        self._ends[payer] = begin + num_tokens / self._weights.get(job_id, 1.0)
        return begin

    def next(self, timeout_s: float) -> Ticket | None:
        """Returns the next command, or None after `timeout_s` seconds without one."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, timeout_s):
                return None
            chosen = self._of_turn() or min(self._waiting)
            self._waiting.remove(chosen)
            begin, _, ticket = chosen
            self._now = max(self._now, begin)
            self._note_gradient(ticket)
            if not self._waiting:
                self._forget_idle()
            return ticket

    def _note_gradient(self, ticket: Ticket) -> None:
        """Notes whose gradient waits, and charges its job for computing it again after a turn."""
        job_id, pending = ticket.job_id, self._gradient_tokens
        if isinstance(ticket.body, ForwardBackwardRequest | OptimStepRequest):
            if job_id in pending and job_id != self._gradient_job:
                self._charge(job_id, pending[job_id])
            if isinstance(ticket.body, ForwardBackwardRequest):
                before = self._turn_tokens if job_id == self._gradient_job else 0
                self._turn_tokens = before + ticket.num_tokens
                pending[job_id] = pending.get(job_id, 0) + ticket.num_tokens
                self._gradient_job = job_id
                return
            pending.pop(job_id, None)
        elif isinstance(ticket.body, TrainerJob):
            pending.pop(job_id, None)
        if job_id == self._gradient_job or ticket.num_tokens:
            self._gradient_job = None

    def _of_turn(self) -> tuple[float, int, Ticket] | None:
        """Waits up to HOLD_S for the job whose gradient waits, and returns its next command: an
        optimizer step, or any while its turn is not over. None: another job is next."""
        job_id = self._gradient_job
        if job_id is None:
            return None

        self._changed.wait_for(lambda: self._waiting_of(job_id), HOLD_S)
        first = min(self._waiting_of(job_id), default=None)
        is_over = self._turn_tokens > TURN_TOKENS
        return None if first and is_over and first[2].num_tokens else first

    def _waiting_of(self, job_id: str) -> list[tuple[float, int, Ticket]]:
        return [each for each in self._waiting if each[2].job_id == job_id]

    def _forget_idle(self) -> None:
        """Forgets payers that are not ahead of the queue: they begin at its position anyway."""
        self._ends = {payer: end for payer, end in self._ends.items() if end > self._now}
