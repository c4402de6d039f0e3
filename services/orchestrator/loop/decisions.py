"""What becomes of a job when something goes wrong: one table, for every error that reaches its run.

One rollout's fault is no error, but data (groups.py). What time can mend is tried again; what that
does not mend, or only a person can, pauses the job, and the sentence says what to do. Only a job
that can never run fails, for a job that failed cannot be resumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from services.orchestrator.queue.connection import StoreUnavailable
from services.orchestrator.queue.leases import LeaseLost
from services.orchestrator.record.folder import BatchExists
from shared.errors import (
    BadRequest,
    Conflict,
    Failed,
    Forbidden,
    HoneError,
    NotFound,
    StateLost,
    Unauthorized,
    Unavailable,
)

MAX_RECOVERIES = 3
"""In a row, without any further step done."""

PAUSES_S = (0.0, 5.0, 30.0)
"""Seconds before each of them. The client has already waited for a service that is away."""


class MustPause(Failed):
    """The job cannot go on until a person has mended what the sentence says. Nothing is lost: it
    goes on where it was."""


class TooDear(MustPause):
    """The job has cost what it may."""


class SyncFailed(Failed):
    """The sampler does not serve what the trainer published, though it was pushed twice."""


class Action(Enum):
    STOP = "stop"
    """Without a word: another worker has the job, or the store is away or another one."""
    GIVE_BACK = "give back"
    """Something newer than this attempt was met. If the lease is still this worker's, whoever takes
    the job next need not wait until it expires."""
    RECOVER = "recover"
    """Load the job into trainer and sampler again, and go on from what the trainer has."""
    PAUSE = "pause"
    FAIL = "fail"


@dataclass(frozen=True)
class Rule:
    """Errors of `kind`, and of one of `codes` if there are any. `remedy` is what a person does
    before the job is resumed."""

    kind: type[Exception]
    action: Action
    remedy: str = "fix the cause"
    codes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Decision:
    """`why` is a sentence for a person, with the remedy if the job pauses."""

    action: Action
    why: str


def _codes(*codes: str) -> frozenset[str]:
    return frozenset(codes)


SAME_TOKEN = "give all services the same HONE_TOKEN"
LOOK = "make sure that it works (`hone doctor` shows how the services are)"

MEMORY = "free memory on its device, or change [memory] with `hone resume JOB --set KEY=VALUE`"

RULES = (
    Rule(LeaseLost, Action.STOP),
    Rule(BatchExists, Action.GIVE_BACK),
    Rule(StoreUnavailable, Action.STOP),
    Rule(TooDear, Action.PAUSE, "raise it with `hone resume JOB --set stop.max_cost=...`"),
    Rule(MustPause, Action.PAUSE),
    Rule(Conflict, Action.STOP, codes=_codes("emptied")),
    Rule(Conflict, Action.GIVE_BACK, codes=_codes("stale")),
    Rule(Conflict, Action.RECOVER, LOOK, _codes("out_of_order", "no_adapters")),
    Rule(Conflict, Action.PAUSE),
    Rule(StateLost, Action.RECOVER, LOOK),
    Rule(Unavailable, Action.PAUSE, "find out why, or raise the deadline", _codes("deadline")),
    Rule(Unavailable, Action.RECOVER, LOOK),
    Rule(Failed, Action.RECOVER, "free some space", _codes("disk_full")),
    Rule(Failed, Action.PAUSE, MEMORY, _codes("out_of_memory")),
    Rule(
        Failed,
        Action.PAUSE,
        'submit it with a smaller learning rate, or training.on_nonfinite = "skip"',
        _codes("not_finite"),
    ),
    Rule(Failed, Action.RECOVER, LOOK),
    Rule(Unauthorized, Action.PAUSE, SAME_TOKEN),
    Rule(Forbidden, Action.PAUSE, SAME_TOKEN),
    Rule(
        NotFound, Action.PAUSE, "make sure that all services have the same version (`hone doctor`)"
    ),
    Rule(BadRequest, Action.FAIL),
    Rule(Exception, Action.PAUSE, "look at the trace in the orchestrator's log"),
)
"""The first that matches counts."""


def decide(error: Exception, num_recoveries: int = 0, *, has_run: bool = False) -> Decision:
    """Returns what becomes of the job. `num_recoveries` is how often in a row recovering did not
    help; beyond MAX_RECOVERIES the job pauses. One that `has_run`, a step at least, does not fail:
    what is wrong now was right before (a limit on bodies, a service of another version)."""
    rule = next(rule for rule in RULES if _matches(rule, error))
    action = rule.action
    if action is Action.RECOVER and num_recoveries >= MAX_RECOVERIES:
        action = Action.PAUSE
    if action is Action.FAIL and has_run:
        action = Action.PAUSE
    why = _sentence(error)
    return Decision(action, f"{why}; {rule.remedy}" if action is Action.PAUSE else why)


def _matches(rule: Rule, error: Exception) -> bool:
    code = error.code if isinstance(error, HoneError) else None
    return isinstance(error, rule.kind) and (not rule.codes or code in rule.codes)


def _sentence(error: Exception) -> str:
    if isinstance(error, HoneError):
        return error.detail
    if isinstance(error, BatchExists):
        return str(error)
    return f"a bug in Hone: {type(error).__name__}: {error}"
