"""Whose command is next, where jobs share a trainer: start-time fair queueing (Goyal et al., 1996)
of the tokens that commands compute.

A command begins, in tokens per weight, where its payer's last one ended, or where the queue is now
if that is later. The payer is the API key that submitted the job, so a key gets no more by more
jobs; a job without a key pays for itself. The command that begins first is next. So a payer that
was idle gets no credit, and one that sends much waits for its own commands alone. A command that
computes no tokens, such as the publication of a step's weights, waits for no one's tokens, unless
its payer sends many of them.

A gradient that waits for its optimizer step is lost to a change of turns, and made again later. So
its job stays next for up to TURN_TOKENS and the optimizer step, and has HOLD_S to send its next
command. Beyond that its job is charged for making it again.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

from pydantic import BaseModel

from shared.wire import (
    Fenced,
    ForwardBackwardRequest,
    ForwardRequest,
    OptimStepRequest,
    TrainerJob,
    TrainStepRequest,
)

HOLD_S = 0.1
"""Seconds that a job whose gradient waits has to send its next command."""

TURN_TOKENS = 1 << 17
"""Tokens of calls after which only the job's optimizer step still goes first."""

COMMAND_TOKENS = 1000
"""What a command that computes no tokens is charged for, on an account of its own."""


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
        """How many tokens it computes, prompts included."""
        body = self.body
        if not isinstance(body, TrainStepRequest | ForwardRequest | ForwardBackwardRequest):
            return 0
        return sum(len(one.prompt_token_ids) + len(one.token_ids) for one in body.examples)


class FairQueue:
    """Commands by job. Any thread may put one in; one thread takes them out."""

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
            else:  # at once, but for the job's own commands before it, and unless it sends many
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
        """Notes whose gradient waits, and charges its job for making it again after a turn."""
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
        """Forgets payers that are not ahead of the queue: they begin where it is."""
        self._ends = {payer: end for payer, end in self._ends.items() if end > self._now}
