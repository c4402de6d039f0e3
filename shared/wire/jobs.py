"""The jobs API: a job's record, its events and metrics, its stored rollouts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from shared.job import Job, RewardSpec
from shared.wire.base import JobId, Message, Wire
from shared.wire.planning import Plan
from shared.wire.rewards import Part
from shared.wire.rollouts import FinishReason

JobStatus = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]

TERMINAL: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})


class SubmitRequest(Wire):
    """`POST /v1/jobs`. `job` is a whole job file's content; files it names must be readable by the
    orchestrator."""

    job: Job


class Obstacle(Wire):
    """Why a trainer takes no job now: one of three. `job` has it, or one of its samplers;
    `evaluation` has its samplers; or it is `away`, in a sentence."""

    job: JobId | None = None
    evaluation: str | None = None
    away: str | None = None

    @property
    def why(self) -> str:
        """What is said of the trainer."""
        if self.job:
            return f"is taken by {self.job}"
        if self.evaluation:
            return f"waits for its samplers: evaluation {self.evaluation} has them"
        return f"is away: {self.away}"


class JobSummary(Wire):
    """A job as lists show it. Times are Unix seconds.

    `error` is a sentence: why it failed, or why it was paused. `recoveries` counts how often it
    went on after a service had lost its state, and `attempts` how often a worker took it up.
    `stopped` says why a job succeeded before its last step: a target or a budget of `[stop]`.

    `place` is that of a job that waits, as a queued one does and a running one whose worker is
    gone: 1 for the one that is taken next. `waits_for` says why trainers take none meanwhile, by
    host and port. `trainer` is the one that the job was given last. `cost` is what it has
    cost up to its last step, in `currency`; None where what an hour costs is not known. `doing`
    says what a running job is at, as of the last second: which services it waits for, and which are
    away.
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
    cost: float | None = None
    currency: str | None = None
    cancel_requested: bool = False
    pause_requested: bool = False
    recoveries: int = 0
    attempts: int = 0
    place: int | None = None
    waits_for: dict[str, Obstacle] = {}
    trainer: str | None = None
    doing: str | None = None
    error: str | None = None
    stopped: str | None = None
    metadata: dict[str, str] = {}


class JobRecord(JobSummary):
    """All there is to know of a job. `run_dir` holds everything it wrote. `data` says which content
    its data has, by "train" and "eval": a file's digest, or a dataset's commit on the Hub. It goes
    on with that content only. `summary` is what came of it, once it has succeeded."""

    run_dir: str
    summary: dict[str, Any] | None = None
    data: dict[str, str] = {}
    job: Job


class PreviewedPrompt(Wire):
    """A prompt as a job would send it: `index` is its row, `content` what the row became. `text` is
    what the model reads, chat template included, in `num_tokens` tokens; None where its tokenizer
    is not known here."""

    index: int
    content: str | tuple[Message, ...]
    text: str | None = None
    num_tokens: int | None = None


class DryRun(Wire):
    """`POST /v1/jobs/dry_run`: the job as it would run, and its first prompts. `num_train` is None
    for a stream; `data` are the versions as in a job's record. `not_counted` says why prompts have
    no `num_tokens`, and `not_planned` why there is no `plan`. `trial` says what the rewards
    give empty completions and reference answers, and what is probably wrong with them; empty if the
    reward service did not say so soon."""

    job: Job
    columns: tuple[str, ...]
    num_train: int | None
    num_held_out: int
    data: dict[str, str]
    prompts: tuple[PreviewedPrompt, ...]
    not_counted: str = ""
    plan: Plan | None = None
    not_planned: str = ""
    trial: tuple[str, ...] = ()


class JobState(Wire):
    """What a job's state is once it was cancelled, paused or resumed: fields of its record, which
    can be told also of a job whose record another version of Hone wrote."""

    id: JobId
    status: JobStatus
    cancel_requested: bool = False
    pause_requested: bool = False
    error: str | None = None


class ResumeRequest(Wire):
    """`POST /v1/jobs/{id}/resume`: `set` are changes to go on with, as `--set` takes them:
    "memory.micro_batch_tokens=4096". Only what does not say what is learned can change."""

    set: tuple[str, ...] = ()


class JobList(Wire):
    """Newest first. `next_after` goes back as `?after=` for the next page; None at the end. It
    stays valid when jobs are removed meanwhile. A job's id may be given in its place.
    `unreadable` are the ids of those on the page that another version of Hone wrote and this one
    cannot read; `GET /v1/jobs/{id}` has all of a job."""

    jobs: tuple[JobSummary, ...]
    next_after: str | None = None
    unreadable: tuple[str, ...] = ()


class JobDeleted(Wire):
    """`DELETE /v1/jobs/{id}`: the job is forgotten. `files`: its run folder is removed as well."""

    id: JobId
    files: bool = False


class RecoveredJob(Wire):
    """A run folder, and the status that its job's record has now; `known`: it had one before. None:
    `problem` says why there is none."""

    id: str
    status: JobStatus | None = None
    step: int = 0
    steps: int | None = None
    known: bool = False
    problem: str | None = None


class Recovered(Wire):
    """`POST /v1/recover`: every run folder, by id."""

    jobs: tuple[RecoveredJob, ...]


class Event(Wire):
    """Something that happened to a job, in order. `id` is what `Last-Event-ID` and `?after=` take.
    `time` is Unix seconds."""

    id: str
    job_id: JobId
    time: float
    type: Literal["status", "log", "step", "eval", "checkpoint"]
    level: Literal["info", "warning", "error"] = "info"
    message: str
    data: dict[str, Any] = {}


class JobProgress(Wire):
    """What a job is at while nothing happens to it: the data of a `progress` of a stream of events.
    `time` is Unix seconds."""

    message: str
    time: float


class EventList(Wire):
    """A page, oldest first. The next one begins after the last id (`?after=`); it is empty while
    nothing else has happened."""

    events: tuple[Event, ...]


class MetricsRow(Wire):
    step: int
    metrics: dict[str, float]


class MetricsList(Wire):
    """A page, by step. `next_after_step` goes back as `?after_step=` for the next page; None at the
    end."""

    rows: tuple[MetricsRow, ...]
    next_after_step: int | None = None


class GradedRollout(Wire):
    """A stored rollout as people look at it."""

    prompt_index: int
    prompt: str | tuple[Message, ...]
    completion: str
    finish_reason: FinishReason
    versions: tuple[int, ...]
    reward: float | None
    parts: dict[str, Part]
    advantage: float | None


class RolloutList(Wire):
    """A page of a step's rollouts, all of a prompt's group in a row. `next_after` goes back as
    `?after=` for the next page; None at the end."""

    step: int
    rollouts: tuple[GradedRollout, ...]
    next_after: int | None = None


class RegradeRequest(Wire):
    """`POST /v1/jobs/{id}/regrade`: what other `rewards` would say of the stored rollouts of
    `first_step` to `last_step`, both included. Nothing is written to the run. `num_examples` bounds
    the rollouts shown."""

    first_step: int = Field(ge=1)
    last_step: int = Field(ge=1)
    rewards: tuple[RewardSpec, ...] = Field(min_length=1)
    num_examples: int = Field(default=10, ge=0, le=1000)


class RegradedStep(Wire):
    """Old and new mean reward of a step (None: no reward at all), how many rollouts have none, how
    many get another one, and which advantages change their sign, by position in `[P*G]`. The sign
    of no advantage is 0."""

    step: int
    num_rollouts: int
    old_reward: float | None
    new_reward: float | None
    old_missing: int
    new_missing: int
    num_changed: int
    flipped: tuple[int, ...]


class RegradedRollout(Wire):
    """A rollout as it was graded, and as it would be."""

    step: int
    position: int
    old: GradedRollout
    new: GradedRollout


class RegradeReport(Wire):
    """What would flip. `examples` are the rollouts whose reward differs most, in that order."""

    steps: tuple[RegradedStep, ...]
    examples: tuple[RegradedRollout, ...]
