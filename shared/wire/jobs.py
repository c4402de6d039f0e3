"""The jobs API: jobs as lists show them, their events and metrics, what is wrong with a run, and
named API keys. No body here contains the job itself, so a read-only command need not build the
job's sections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from shared.job.section import MAX_ENTRIES, Text
from shared.wire.base import JobId, Listing, Weight, Wire

JobStatus = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]

PauseReason = Literal["requested", "preempted", "error"]
"""Why a job is paused: by request; because another job preempted it, after which it continues
automatically; or because of `error`, which needs operator action."""

TERMINAL: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})


class WithdrawRequest(Wire):
    """`POST /v1/jobs/withdraw`: withdraws the submission with the Idempotency-Key `key`."""

    key: str = Field(min_length=1, max_length=1000)


class Obstacle(Wire):
    """Why a trainer takes no job now: `job` has the trainer or one of its samplers, or `away` says
    why it is unreachable."""

    job: JobId | None = None
    away: str | None = None

    @property
    def why(self) -> str:
        """The reason, as part of a sentence about the trainer."""
        return f"is taken by {self.job}" if self.job else f"takes no job: {self.away}"


class JobSummary(Wire):
    """A job as lists show it. Times are Unix seconds.

    `error` is a sentence: why it failed, or why it was paused; `pause_reason` is the code of a
    pause, None unless the job is paused. `recoveries` counts how often it continued after a service
    had lost its state, and `attempts` how often a worker took it. `stopped` says why a job
    succeeded before its last step: a target or a budget of `[stop]`.

    `place` is the place in the queue, also for a running job whose worker is gone; 1 is taken next.
    `waits_for` says for each trainer, by host and port, why it takes no job now. `trainer` is the
    job's latest trainer, and `shares_with` are the jobs that take turns with it there: LoRA jobs of
    one base model. `submitted_by` is the API key that submitted the job, None: HONE_TOKEN; `weight`
    is that key's. `cost` is its cost up to its last step, in `currency`; None if the price of an
    hour is not known. `learning_rate` is the peak of a job that trains. `doing` is the activity of
    a running job, as of the last second: which services it waits for, and which are unreachable.
    `waits` names the missing dependency of a queued or running job: a service, its data, a folder.
    The job continues automatically once it is available.
    """

    id: JobId
    name: str
    model: str
    status: JobStatus
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None
    step: int = 0
    steps: int
    eta_s: float | None = None
    reward: float | None = None
    learning_rate: float | None = None
    cost: float | None = None
    currency: str | None = None
    cancel_requested: bool = False
    pause_requested: bool = False
    recoveries: int = 0
    attempts: int = 0
    place: int | None = None
    waits_for: dict[str, Obstacle] = {}
    trainer: str | None = None
    shares_with: tuple[JobId, ...] = ()
    submitted_by: str | None = None
    weight: float = 1.0
    doing: str | None = None
    waits: str | None = None
    error: str | None = None
    pause_reason: PauseReason | None = None
    stopped: str | None = None
    metadata: dict[str, str] = {}


class JobState(Wire):
    """A job's state after it was cancelled, paused or resumed. These fields can be read even if
    another version of Hone wrote the job's record."""

    id: JobId
    status: JobStatus
    cancel_requested: bool = False
    pause_requested: bool = False
    error: str | None = None
    pause_reason: PauseReason | None = None


class Withdrawn(Wire):
    """The result of withdrawing a submission. `job` is the job of the submission, which is
    cancelled. None: no job was accepted, and no job with this key will be."""

    job: JobState | None = None


class ResumeRequest(Wire):
    """`POST /v1/jobs/{id}/resume`: `set` are changes, as `--set` takes them:
    "memory.micro_batch_tokens=4096". Only keys that do not change what is learned are allowed."""

    set: tuple[Text, ...] = Field(default=(), max_length=MAX_ENTRIES)


class JobList(Listing[JobSummary]):
    """Newest first. `next_after` goes back as `?after=` for the next page; None at the end. It
    stays valid when jobs are removed meanwhile. A job's id may be given instead. `unreadable` are
    the ids of the page's jobs that another version of Hone wrote and this one cannot read. `GET
    /v1/jobs/{id}` returns the whole job."""

    jobs: tuple[JobSummary, ...]
    next_after: str | None = None
    unreadable: tuple[str, ...] = ()


class JobDeleted(Wire):
    """`DELETE /v1/jobs/{id}`: the job is forgotten. `files`: its run folder is removed as well."""

    id: JobId
    files: bool = False


class RecoveredJob(Wire):
    """A run folder, and the status in its job's record; `known`: Redis had the record before.
    `status` None: there is no record, and `problem` says why."""

    id: str
    status: JobStatus | None = None
    step: int = 0
    steps: int | None = None
    known: bool = False
    problem: str | None = None


class Recovered(Listing[RecoveredJob]):
    """`POST /v1/recover`: every run folder, by id."""

    jobs: tuple[RecoveredJob, ...]


class Event(Wire):
    """An event of a job, in order. `Last-Event-ID` and `?after=` take an `id`. `time` is Unix
    seconds."""

    id: str
    job_id: JobId
    time: float
    type: Literal["status", "log", "step", "eval", "checkpoint"]
    level: Literal["info", "warning", "error"] = "info"
    message: str
    data: dict[str, Any] = {}


class JobProgress(Wire):
    """A job's progress between two events: the data of a `progress` in a stream of events. `time`
    is Unix seconds."""

    message: str
    time: float


class EventList(Listing[Event]):
    """A page, oldest first. `next_after` goes back as `?after=` for the next page; None at the end.
    Later events come after the last id."""

    events: tuple[Event, ...]
    next_after: str | None = None


class MetricsRow(Wire):
    step: int
    metrics: dict[str, float]

    @property
    def why_unchanged(self) -> str:
        """Why the step changed no weight; "" if it changed some, or if the row does not show it."""
        if self.metrics.get("skipped_steps"):
            return "loss or gradient were not finite"
        if self.metrics.get("num_examples") == 0:
            has_none = self.metrics.get("frac_reward_zero_std", 0) >= 1
            return "no group had a signal" if has_none else "there was no example to train on"
        return "the learning rate was 0" if self.metrics.get("learning_rate") == 0 else ""

    @classmethod
    def stored(cls, file: Path) -> list[MetricsRow]:
        """Returns the rows of a run folder's metrics.jsonl, by step. Ignores lines that a crash cut
        short. If a superseded worker wrote a second row of a step, the first counts."""
        rows: dict[int, MetricsRow] = {}
        for line in file.read_bytes().split(b"\n")[:-1]:
            try:
                row = json.loads(line)
            except ValueError:  # also for zeros and an empty line
                continue
            step = row.pop("step")
            rows.setdefault(step, cls(step=step, metrics=row))
        return [rows[step] for step in sorted(rows)]


class MetricsList(Listing[MetricsRow]):
    """A page, by step. `next_after_step` goes back as `?after_step=` for the next page; None at the
    end."""

    rows: tuple[MetricsRow, ...]
    next_after_step: int | None = None


class MetricsColumns(Wire):
    """The rows of a job's metrics by column, for charts: `columns` has for each metric a value at
    each of `steps`, None where the step lacks it, of 7 significant digits. `names` are all metrics
    that the job has, also metrics that were not requested. If the job has more steps than `points`,
    `steps` are spread evenly over them, and the steps with an evaluation are among them;
    `num_steps` is how many there are."""

    steps: tuple[int, ...]
    columns: dict[str, tuple[float | None, ...]]
    names: tuple[str, ...]
    num_steps: int


Access = Literal["read", "full", "own"]
"""A key's rights: "read" may read everything, "full" may also change everything. "own" may submit
jobs, and may read and change only these."""

KeyName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]


class CreateKey(Wire):
    """`POST /v1/keys`."""

    name: KeyName
    access: Access = "full"
    weight: Weight = 1.0


class ApiKey(Wire):
    """A key that is valid. `created_at` is Unix seconds. Jobs that share a trainer get tokens in
    proportion to the `weight` of the keys that submitted them."""

    name: KeyName
    access: Access
    created_at: int
    weight: Weight = 1.0


class CreatedKey(ApiKey):
    """A new key. Clients send `secret` as their token. It is shown only once, because Hone stores
    only its digest."""

    secret: str


class KeyList(Listing[ApiKey]):
    """`GET /v1/keys`: the keys that are valid, by name."""

    keys: tuple[ApiKey, ...]


class KeyRevoked(Wire):
    """`DELETE /v1/keys/{name}`: requests with the key are refused from now on."""

    name: KeyName


FindingLevel = Literal["problem", "warning", "notice"]
"""The severity: a "problem" prevents the job from learning, a "warning" probably does, and a
"notice" is worth knowing."""

FindingCode = Literal[
    "no_signal_hard",
    "no_signal_easy",
    "no_signal_equal",
    "reward_constant",
    "reward_fell",
    "held_out_falls",
    "lengths_collapse",
    "rewarded_copies",
    "rewarded_without_answer",
    "truncation",
    "overlong_prompts",
    "entropy_collapse",
    "updates_too_large",
    "updates_too_small",
    "steps_skipped",
    "no_update",
    "mismatch",
    "off_policy",
    "evaluation_ignored",
    "own_reward",
    "too_few_steps",
    "missing_rewards",
    "errored_rollouts",
    "environment_failures",
    "failed",
    "paused",
    "waits",
    "stalled",
    "recovers_often",
]
"""The code of a finding, for programs; docs/diagnosis.md explains each."""


class Evidence(Wire):
    """The evidence of a finding: a `metric` with its `values` at `steps`, in the same order; or a
    `text`, with its source as `metric` (rollouts, record)."""

    metric: str
    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    text: str = ""


class Finding(Wire):
    """A fault of a run, or a probable one. `title`, `cause` and `remedy` are for people: the fault,
    its probable cause, and what to do. `since_step` is the first step with the fault; None: it does
    not belong to a step."""

    code: FindingCode
    level: FindingLevel
    title: str
    since_step: int | None = None
    evidence: tuple[Evidence, ...] = ()
    cause: str
    remedy: str


class FindingList(Listing[Finding]):
    """The findings of a job, the most severe first, as of its last `step` with metrics. `well`:
    there is no problem and no warning."""

    job_id: JobId
    status: JobStatus
    step: int
    well: bool
    findings: tuple[Finding, ...]
