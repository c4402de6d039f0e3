"""A job's record: the fields that a submission stores, and the conversion of a stored hash, which
another version of Hone may have written, to the API's models. And the jobs in run folders, from
which lost records are rebuilt."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import secrets
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from services.orchestrator.store.folder import JOB, OF_SUBMISSION, SUBMITTED, Note, RunFolder
from shared.errors import BadRequest, Failed, HoneError
from shared.http import codec
from shared.http.gate import caller
from shared.job import JOB_ID, UPLOADED, Job
from shared.weights.folders import CHECKPOINTS, step_of
from shared.wire import ApiKey, Checkpoint, Event, JobRecord, JobState, JobSummary

SCHEMA = 1
"""Version of a job's hash. Readers ignore unknown fields."""

EVENT_ID = re.compile(r"([0-9]{1,20})(?:-([0-9]{1,20}))?")
MAX_ID_PART = 2**64 - 1
"""An event's id is two 64-bit whole numbers: Unix milliseconds, and a counter."""


SUMMARY = tuple(JobSummary.model_fields)
"""The fields that lists show."""

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32: no i, l, o or u. Digits sort like their characters."""

TIME_DIGITS = 7
"""35 bits of Unix seconds, enough until the year 3058."""

RANDOM_DIGITS = 13
"""65 bits: among a million jobs of one second, two have the same id with probability 1e-8."""


class UnreadableRecord(Failed):
    """This version of Hone cannot read the job's record."""


@dataclass(frozen=True)
class Submission:
    """A job to be submitted, with its run folder in `runs_dir`. `key` is the idempotency key;
    `data` are the versions of its data. `asked` is the job as it was sent, if computed keys were
    added to it since. `warnings` are its probable mistakes, and `by` is the API key that submits
    it. Times are Unix seconds."""

    job: Job
    runs_dir: Path
    key: str | None = None
    data: Mapping[str, str] = field(default_factory=dict[str, str])
    asked: Job | None = None
    warnings: Sequence[str] = ()
    created_at: float = field(default_factory=time.time)
    by: ApiKey | None = field(default_factory=caller.get)

    @functools.cached_property
    def id(self) -> str:
        return new_job_id(self.job.name)

    @property
    def fingerprint(self) -> str:
        """A digest of the job as it was sent: a key may be used again only with the same job."""
        return fingerprint_of(self.asked or self.job)

    @property
    def run_dir(self) -> Path:
        return (self.runs_dir / self.id).resolve()

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the record."""
        return {
            **fields_of(self.job),
            **self.note.model_dump(include=set(OF_SUBMISSION), exclude_none=True),
            "schema": SCHEMA,
            "id": self.id,
            "step": 0,
            "run_dir": self.run_dir,
            "data": json.dumps(dict(self.data)),
            "warnings": json.dumps(self.warnings) if self.warnings else None,
        }

    @property
    def note(self) -> Note:
        """The part of the record that the run folder keeps."""
        return Note(
            created_at=self.created_at,
            status="queued",
            key=self.key,
            fingerprint=self.fingerprint if self.key else None,
            submitted_by=self.by.name if self.by else None,
            weight=self.by.weight if self.by else 1.0,
        )


def fingerprint_of(job: Job) -> str:
    return hashlib.sha256(job.model_dump_json().encode()).hexdigest()


def named_sources(job: Job) -> tuple[str, ...]:
    """Returns the sources of a job's data that are named: files, uploads, data sets of the Hub."""
    held_out = (each.source for each in job.evaluation.sets.values())
    every = (job.data.train, job.data.eval, *held_out)
    return tuple(source for source in every if isinstance(source, str))


def fields_of(job: Job) -> dict[str, Any]:
    """Returns the fields of a record with the job itself, and with the values that lists show and
    filter by."""
    start = job.training.start_from
    used = [job.model, start] if start else None
    if not job.trains:
        used = [each.model for each in job.evaluated_models]
    return {
        "job": job.model_dump_json(),
        "name": job.name,
        "model": job.model,
        "steps": job.steps,
        "learning_rate": job.learning_rate if job.trains else None,
        "priority": job.priority,
        "shares": job.shares_as or "",
        "metadata": json.dumps(job.metadata),
        "models": used and json.dumps(used),
        "openai": "1" if job.request else None,
        "files": " ".join(filter(UPLOADED.fullmatch, named_sources(job))),
    }


def summary_of(job_id: str, fields: Mapping[str, str]) -> JobSummary:
    with _reading(job_id, fields):
        shown = {**_shown(fields), "metadata": json.loads(fields["metadata"])}
        return JobSummary.model_validate(shown)


def record_of(job_id: str, fields: Mapping[str, str]) -> JobRecord:
    with _reading(job_id, fields):
        job = json.loads(fields["job"])
        shown: dict[str, Any] = {**_shown(fields), "job": job, "model": job["model"]}
        shown["metadata"] = job.get("metadata", {})
        for name in ("summary", "data", "warnings"):
            if name in fields:
                shown[name] = json.loads(fields[name])
        return JobRecord.model_validate(shown, extra="ignore")


def _shown(fields: Mapping[str, str]) -> dict[str, str]:
    """Returns the fields: `doing` only for a running job, `pause_reason` only for a paused one."""
    needed = {"doing": "running", "pause_reason": "paused"}
    hidden = {name for name, status in needed.items() if fields.get("status") != status}
    return {name: value for name, value in fields.items() if name not in hidden}


def recovered_fields(run: FoundRun, job: Job) -> dict[str, Any]:
    """Returns the fields of a record rebuilt from the run folder of `job`."""
    return {
        "schema": SCHEMA,
        **fields_of(job),
        **run.note.model_dump(include={*OF_SUBMISSION, "finished_at"}),
        "id": run.id,
        "submitted_ms": int(run.note.created_at * 1000),
        "step": run.step,
        "furthest": run.step,
        "reward": run.reward,
        "run_dir": run.path,
        "summary": run.summary,
        "stopped": (run.summary or {}).get("stopped"),
        "data": json.dumps(run.data),
    }


def note_of(job_id: str, fields: Mapping[str, str]) -> Note:
    with _reading(job_id, fields):
        return Note.model_validate(fields, extra="ignore")


def state_of(job_id: str, fields: Mapping[str, str]) -> JobState:
    with _reading(job_id, fields):
        return JobState.model_validate(_shown(fields), extra="ignore")


@contextlib.contextmanager
def _reading(job_id: str, fields: Mapping[str, str]) -> Generator[None]:
    """Raises UnreadableRecord if the block cannot read the fields."""
    try:
        yield
    except (KeyError, ValueError) as error:  # ValueError is also pydantic's and json's
        raise UnreadableRecord(
            f"the record of job {job_id!r} (schema {fields.get('schema', '0')}) cannot be read by "
            f"this version of Hone (schema {SCHEMA}): {_first_line(error)}; use the version that "
            f"wrote it, or `hone cancel {job_id}` and `hone rm {job_id}`"
        ) from error


def event_of(job_id: str, id: str, fields: Mapping[str, str]) -> Event:
    """Returns the event; an unreadable event is shown as such, at its place."""
    try:
        shown = {**fields, "id": id, "job_id": job_id, "data": json.loads(fields["data"])}
        return Event.model_validate(shown, extra="ignore")
    except (KeyError, ValueError) as error:
        message = f"this event cannot be read by this version of Hone: {_first_line(error)}"
        time_s = int(id.split("-")[0]) / 1000
        return Event(
            id=id, job_id=job_id, time=time_s, type="log", level="warning", message=message
        )


def check_event_id(id: str, name: str) -> None:
    """Raises BadRequest, naming the parameter, for an id that Redis would refuse."""
    match = EVENT_ID.fullmatch(id)
    if not match or any(int(part or 0) > MAX_ID_PART for part in match.groups()):
        raise BadRequest(f"{name} is {id!r}; expected an event's id such as '1763700000000-0'")


def is_first_id(id: str) -> bool:
    """Whether the id is 0-0, in any notation."""
    return "-" in id and not any(map(int, id.split("-")))


def _first_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def new_job_id(name: str) -> str:
    """Returns `<name>-<20 digits>`, at most 61 characters for a name of at most 40."""
    random = _digits(secrets.randbits(5 * RANDOM_DIGITS), RANDOM_DIGITS)
    return f"{name}-{_digits(int(time.time()), TIME_DIGITS)}{random}"


def time_of(job_id: str) -> int | None:
    """Returns the time at which the id was made, in Unix seconds; None for an id that `new_job_id`
    did not make."""
    digits = job_id.rpartition("-")[2]
    if len(digits) != TIME_DIGITS + RANDOM_DIGITS or not set(digits) <= set(ALPHABET):
        return None
    time_s = 0
    for digit in digits[:TIME_DIGITS]:
        time_s = time_s << 5 | ALPHABET.index(digit)
    return time_s


def _digits(number: int, count: int) -> str:
    return "".join(ALPHABET[number >> 5 * place & 31] for place in reversed(range(count)))


# --- jobs of run folders --------------------------------------------------------------------------

End = Literal["succeeded", "failed", "cancelled"]

WAS_DELETED = "was deleted; its run folder was kept"


UNKNOWN = Note(created_at=0.0, status="running")


@dataclass(frozen=True)
class FoundRun:
    """A job's run folder. `job` None: `problem` says why no record can be made. `note` says how the
    job was submitted, and how it ended, if the folder says that. A succeeded job has a `summary`.
    `reward` is the last step's. `redis` is the identity of the job's Redis, if known."""

    id: str
    path: Path
    job: Job | None = None
    redis: str | None = None
    problem: str | None = None
    note: Note = UNKNOWN
    step: int = 0
    reward: float | None = None
    data: dict[str, str] = field(default_factory=dict[str, str])
    summary: dict[str, Any] | None = None
    checkpoints: list[Checkpoint] = field(default_factory=list[Checkpoint])

    @property
    def end(self) -> End | None:
        """How the job ended; None if the folder says no end."""
        return cast(End, self.note.status) if self.note.has_ended else None

    @property
    def error(self) -> str | None:
        """Why the job failed."""
        return self.note.error if self.end else None


NO_JOB = (
    "{path!r} has no job.json, so its job is not known; restore that file, or submit a job whose "
    "model is one of the remaining checkpoints"
)

RESULTS = (CHECKPOINTS, "metrics.jsonl", "rollouts")
"""Files that exist in the folder of a job that has begun."""


def find_runs(runs_dir: Path) -> list[FoundRun]:
    """Returns the run folders in `runs_dir`, by id, half-removed ones included; links to run
    folders are left out. A deleted job has no `job` here, so that no recovery brings it back."""
    folders = [
        path
        for path in sorted(runs_dir.resolve().glob("*/"))
        if re.fullmatch(JOB_ID, path.name) and not path.is_symlink()
    ]
    return [run for folder in folders if (run := _deleted(folder) or find_run(folder))]


def _deleted(folder: Path) -> FoundRun | None:
    is_deleted = (folder / JOB).exists() and RunFolder(folder).is_deleted
    return FoundRun(folder.name, folder, problem=WAS_DELETED) if is_deleted else None


def unsubmitted(runs_dir: Path, latest: float) -> list[RunFolder]:
    """Returns the folders of submissions from before `latest` (Unix time) whose job Redis may
    lack."""
    return [
        RunFolder(file.parent)
        for file in runs_dir.resolve().glob(f"*/{SUBMITTED}")
        if not (file.parent / JOB).exists() and file.stat().st_mtime <= latest
    ]


def find_run(folder: Path) -> FoundRun | None:
    """Returns the job of a run folder, also a deleted job; None if the folder belongs to no job."""
    if (folder / JOB).exists():
        return _read(folder)
    if any((folder / name).exists() for name in RESULTS):
        return FoundRun(folder.name, folder, problem=NO_JOB.format(path=str(folder)))
    return None


def _read(path: Path) -> FoundRun:
    file, data, ended = (path / name for name in (JOB, "data.json", "summary.json"))
    try:
        job, folder = codec.decode_tolerantly(Job, file.read_bytes()), RunFolder(path)
        rows = folder.metrics()
        summary = json.loads(ended.read_bytes()) if ended.exists() else None
        return FoundRun(
            id=path.name,
            path=path,
            job=job,
            redis=folder.redis(),
            note=_noted(folder, file, ended),
            step=rows[-1].step if rows else 0,
            reward=rows[-1].metrics.get("reward") if rows else None,
            data=json.loads(data.read_bytes()) if data.exists() else {},
            summary=summary,
            checkpoints=list(_checkpoints(folder.checkpoints)),
        )
    except (OSError, ValueError, KeyError, HoneError) as error:
        reason = error.detail if isinstance(error, HoneError) else f"{error!r}"
        return FoundRun(path.name, path, problem=f"{str(path)!r} cannot be read: {reason}")


def _noted(folder: RunFolder, job: Path, ended: Path) -> Note:
    """Returns the folder's note. A job with a summary has succeeded. For what is not noted, the
    files' times count."""
    note = folder.note() or Note(created_at=job.stat().st_mtime, status="running")
    if note.has_ended or not ended.exists():
        return note
    succeeded = {"status": "succeeded", "finished_at": ended.stat().st_mtime, "error": None}
    return note.model_copy(update=succeeded)


def _checkpoints(folder: Path) -> Iterator[Checkpoint]:
    """Yields the complete checkpoints: the trainer renames a checkpoint to its name last."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if (step := step_of(path.name)) is not None:
            size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            yield Checkpoint(step=step, path=str(path), size_bytes=size_bytes)
