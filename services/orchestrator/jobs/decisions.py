"""What happens to a job after an error: one table, for every error that reaches its run. And the
outcome of a job: at the end of an attempt, or from its run folder.

One rollout's fault is no error, but data (groups.py). Faults outside the job (a service, a volume,
a proxy) are waited for (needs.py). Faults that may be the job's are tried again a few times. If
that does not help, or only an operator can fix the fault, the job pauses, and the sentence says
what to do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, cast

from services.orchestrator.errors import (
    BudgetExceeded,
    CheckFailed,
    CheckNeeds,
    OperatorActionNeeded,
    Preempted,
)
from services.orchestrator.store.connection import StoreUnavailable
from services.orchestrator.store.folder import BatchExists, RunFolder
from services.orchestrator.store.leases import LeaseLost
from services.orchestrator.store.records import WAS_DELETED, End
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
from shared.host.logs import get_logger
from shared.job import RESUMED_WITH
from shared.wire import PauseReason

MAX_RECOVERIES = 3
"""Recoveries in a row without a new step."""

MAX_LOSSES = 20
"""How often in a row, without a new step, the job may lose services after it was loaded. Beyond
that the job itself probably crashes them."""

PAUSES_S = (0.0, 5.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds before each recovery in a row; the last value counts for all later ones. Services that
are unreachable are waited for in addition."""


class Action(Enum):
    STOP = "stop"
    """Stop without a report: another worker has the job, or the store is unreachable or another
    one."""
    GIVE_BACK = "give back"
    """A newer attempt was found. If this worker still has the lease, it gives it back, so that the
    next worker need not wait until it expires."""
    WAIT = "wait"
    """Infrastructure failure: load the job again once all dependencies are ready, no retry
    limit."""
    RELOAD = "reload"
    """A service lost the job, or went away: load it again, up to MAX_LOSSES times in a row."""
    RECOVER = "recover"
    """Load the job into trainer and sampler again, and continue from the trainer's step."""
    PAUSE = "pause"


@dataclass(frozen=True)
class Rule:
    """A rule for errors of class `kind`, and with one of `codes` if given; with `checks` only if a
    check at the start of an attempt raised them that needs one of these. `remedy` says what an
    operator does before resuming the job, where `{job}` is its id; "": nothing, it resumes
    automatically. `resumes` False: the remedy says itself when the job is resumed, if at all."""

    kind: type[Exception]
    action: Action
    remedy: str = "fix the cause"
    codes: tuple[str, ...] = ()
    checks: tuple[CheckNeeds, ...] = ()
    resumes: bool = True


@dataclass(frozen=True)
class Decision:
    """`why` is a sentence for an operator, with the remedy if the job pauses, and `pause_reason`
    its code. `resumes`: once the remedy is done, the job is resumed unchanged."""

    action: Action
    why: str
    pause_reason: PauseReason = "error"
    resumes: bool = True


@dataclass(frozen=True)
class Outcome:
    """How an attempt at the job ended. `why` says why the job paused, with the code
    `pause_reason`, or why it succeeded before its last step; `summary` is its result. "queued": it
    continues in another attempt, because a newer one was found or another trainer takes it.
    "failed" and "cancelled" come only from the run folder. `resumes` is the decision's."""

    status: Literal["succeeded", "paused", "failed", "cancelled", "queued"]
    why: str | None = None
    summary: dict[str, Any] | None = None
    pause_reason: PauseReason = "error"
    resumes: bool = True


SAME_TOKEN = "give all services the same HONE_TOKEN"
LOOK = "make sure that it works (`hone doctor` shows how the services are)"

ENDS_THEM = (
    "that happened again and again before a step was done, so the job probably ends its services "
    "itself: look into their logs"
)
NEW_JOB = (
    "submit a corrected job, with the newest checkpoint as its model if there is one "
    "(`hone download {job} --list`)"
)
CHANGE_IT = (
    "correct the service and `hone resume {job}`, or the job: `hone resume {job} --set KEY=VALUE` "
    f"changes {', '.join(sorted(RESUMED_WITH))}; for any other key {NEW_JOB}"
)
IN_THE_JOB = (
    "a mistake in the job itself, such as its reward code, is stored with it: for that "
    f"{NEW_JOB}; otherwise fix the cause"
)
PROXY = "fix what stands between the services: a proxy, or another program at the address"
SAME_VERSION = "make sure that all services have the same version (`hone doctor`)"
MEMORY = (
    "free memory on its device and `hone resume {job}`, or use less of it: "
    "`hone resume {job} --set memory.micro_batch_tokens=TOKENS`"
)

ANY_CHECK: tuple[CheckNeeds, ...] = ("settings", "data", "services")

RULES = (
    # A slow check is waited for: only the job's own reward code may hang, and the reward service
    # ends that.
    Rule(Unavailable, Action.WAIT, codes=("deadline",), checks=ANY_CHECK),
    Rule(Unauthorized, Action.PAUSE, SAME_TOKEN, checks=ANY_CHECK),
    Rule(Forbidden, Action.PAUSE, SAME_TOKEN, checks=ANY_CHECK),
    # The settings have changed since the submission; anything else that is refused is tried again.
    Rule(BadRequest, Action.PAUSE, checks=("settings",)),
    Rule(BadRequest, Action.RECOVER, LOOK, checks=ANY_CHECK),
    Rule(LeaseLost, Action.STOP),
    Rule(BatchExists, Action.GIVE_BACK),
    Rule(StoreUnavailable, Action.STOP),
    Rule(
        BudgetExceeded,
        Action.PAUSE,
        "`hone resume {job} --set stop.max_cost=COST` raises it and continues",
        resumes=False,
    ),
    Rule(Preempted, Action.PAUSE, ""),
    Rule(OperatorActionNeeded, Action.PAUSE, IN_THE_JOB),
    Rule(Conflict, Action.STOP, codes=("emptied",)),
    Rule(Conflict, Action.GIVE_BACK, codes=("stale",)),
    Rule(Conflict, Action.RECOVER, LOOK, ("out_of_order", "no_adapters", "episode_lost")),
    Rule(Conflict, Action.WAIT, codes=("taken",)),
    Rule(Conflict, Action.PAUSE),
    Rule(StateLost, Action.RELOAD, ENDS_THEM),
    Rule(Unavailable, Action.PAUSE, "find out why, or raise the deadline", ("deadline",)),
    Rule(Unavailable, Action.RELOAD, ENDS_THEM, ("unreachable",)),
    Rule(Unavailable, Action.WAIT),
    Rule(Failed, Action.RECOVER, "free some space", ("disk_full",)),
    Rule(Failed, Action.PAUSE, "put it back", ("run_folder_gone",)),
    Rule(Failed, Action.PAUSE, MEMORY, ("out_of_memory",), resumes=False),
    Rule(
        Failed,
        Action.PAUSE,
        'lower training.learning_rate, or set training.on_nonfinite = "skip": both are another '
        f"job; {NEW_JOB}",
        ("not_finite",),
        resumes=False,
    ),
    Rule(Failed, Action.RECOVER, LOOK),
    Rule(NotFound, Action.WAIT, codes=("foreign",)),
    Rule(BadRequest, Action.WAIT, codes=("not_there",)),
    Rule(BadRequest, Action.PAUSE, PROXY, ("foreign",)),
    Rule(Unauthorized, Action.PAUSE, SAME_TOKEN),
    Rule(Forbidden, Action.PAUSE, SAME_TOKEN),
    Rule(NotFound, Action.PAUSE, SAME_VERSION),
    Rule(BadRequest, Action.PAUSE, CHANGE_IT, resumes=False),
    Rule(OSError, Action.RECOVER, "check HONE_RUNS_DIR and its disk"),
    Rule(Exception, Action.PAUSE, "look at the trace in the orchestrator's log"),
)
"""The first matching rule counts."""


LIMITS = {Action.RECOVER: MAX_RECOVERIES, Action.RELOAD: MAX_LOSSES}
"""How often in a row each action may happen; beyond it the job pauses."""


def decide(error: Exception, num_in_a_row: int = 0, job_id: str = "JOB") -> Decision:
    """Returns what happens to the job. `num_in_a_row` counts reloads without a new step."""
    cause, needs = (error.cause, error.needs) if isinstance(error, CheckFailed) else (error, None)
    code = cause.code if isinstance(cause, HoneError) else None
    rule = next(
        rule
        for rule in RULES
        if isinstance(cause, rule.kind)
        and (not rule.codes or code in rule.codes)
        and (not rule.checks or needs in rule.checks)
    )
    action = rule.action
    if num_in_a_row >= LIMITS.get(action, math.inf):
        action = Action.PAUSE
    why = _sentence(error)
    if action is Action.PAUSE and rule.remedy:
        why = f"{why}; {rule.remedy.format(job=job_id)}"
    reason = "preempted" if isinstance(error, Preempted) else "error"
    return Decision(action, why, reason, rule.resumes)


def outcome_from_disk(folder: RunFolder) -> Outcome | None:
    """Returns the outcome of a job that has ended according to its run folder. In that case Redis
    was restored from an older file, and the job must not begin again. An unreadable folder is
    ignored here: the job meets the same error at once."""
    try:
        note = folder.note()
        if note is None or not note.has_ended:
            # Only a job that has ended is deleted.
            return Outcome("cancelled", WAS_DELETED) if folder.is_deleted else None
        summary = folder.summary() if note.status == "succeeded" else None
    except (HoneError, OSError, ValueError) as error:
        get_logger().warning("run folder not read", folder=str(folder.path), reason=str(error))
        return None
    get_logger().warning("the run folder says that the job has ended", folder=str(folder.path))
    why = note.error if note.status == "failed" else (summary or {}).get("stopped")
    return Outcome(cast(End, note.status), why, summary)


def _sentence(error: Exception) -> str:
    if isinstance(error, HoneError):
        is_behind = error.code == "out_of_order"
        return f"the trainer is at another step ({error.detail})" if is_behind else error.detail
    if isinstance(error, BatchExists):
        return str(error)
    if isinstance(error, OSError):
        return f"the disk refuses: {error}"
    return f"a bug in Hone: {type(error).__name__}: {error}"
