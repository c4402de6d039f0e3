"""Reads jobs from their run folders, well enough to rebuild a lost record."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from services.orchestrator.store.folder import JOB, SUBMITTED, RunFolder
from services.orchestrator.store.note import OF_SUBMISSION, Note
from shared.errors import HoneError
from shared.http import codec
from shared.job import JOB_ID, Job
from shared.weights.folders import CHECKPOINTS, step_of
from shared.wire import Checkpoint

End = Literal["succeeded", "failed", "cancelled"]

WAS_DELETED = "was deleted; its run folder is left"


@dataclass(frozen=True)
class FoundRun:
    """A job's run folder. `job` None: `problem` says why no record can be made. `end` is how the
    job ended, None if the folder says no end. A succeeded job has a `summary`. Times are Unix
    seconds; `reward` is the last step's. `redis` is the identity of the job's Redis, if known.
    `key`, `fingerprint`, `submitted_by` and `weight` are of its submission."""

    id: str
    path: Path
    job: Job | None = None
    redis: str | None = None
    problem: str | None = None
    created_at: float = 0.0
    finished_at: float | None = None
    end: End | None = None
    error: str | None = None
    key: str | None = None
    fingerprint: str | None = None
    submitted_by: str | None = None
    weight: float = 1.0
    step: int = 0
    reward: float | None = None
    data: dict[str, str] = field(default_factory=dict[str, str])
    summary: dict[str, Any] | None = None
    checkpoints: list[Checkpoint] = field(default_factory=list[Checkpoint])


NO_JOB = (
    "{path!r} has no job.json, so what its job was is not known; put that file back, or submit a "
    "job whose model is one of the checkpoints that are left"
)

RESULTS = (CHECKPOINTS, "metrics.jsonl", "rollouts")
"""Files of a job that has begun."""


def find_runs(runs_dir: Path) -> list[FoundRun]:
    """Returns the run folders in `runs_dir`, by id, half-removed ones included; links to run
    folders are left out."""
    folders = [
        path
        for path in sorted(runs_dir.resolve().glob("*/"))
        if re.fullmatch(JOB_ID, path.name) and not path.is_symlink()
    ]
    return [found for folder in folders if (found := find_run(folder))]


def unsubmitted(runs_dir: Path, latest: float) -> list[RunFolder]:
    """Returns the folders of submissions from before `latest` (Unix time) whose job Redis may
    lack."""
    return [
        RunFolder(file.parent)
        for file in runs_dir.resolve().glob(f"*/{SUBMITTED}")
        if not (file.parent / JOB).exists() and file.stat().st_mtime <= latest
    ]


def find_run(folder: Path) -> FoundRun | None:
    """Returns the job of a run folder; None for a folder of no job."""
    if (folder / JOB).exists():
        return _read(folder)
    if any((folder / name).exists() for name in RESULTS):
        return FoundRun(folder.name, folder, problem=NO_JOB.format(path=str(folder)))
    return None


def _read(path: Path) -> FoundRun:
    if RunFolder(path).is_deleted:
        return FoundRun(path.name, path, problem=WAS_DELETED)
    file, data, ended = (path / name for name in (JOB, "data.json", "summary.json"))
    try:
        job = codec.decode_tolerantly(Job, file.read_bytes())
        rows, note = RunFolder(path).metrics(), RunFolder(path).note()
        summary = json.loads(ended.read_bytes()) if ended.exists() else None
        return FoundRun(
            id=path.name,
            path=path,
            job=job,
            redis=RunFolder(path).redis(),
            **_of_note(note, file, ended),
            step=rows[-1].step if rows else 0,
            reward=rows[-1].metrics.get("reward") if rows else None,
            data=json.loads(data.read_bytes()) if data.exists() else {},
            summary=summary,
            checkpoints=list(_checkpoints(RunFolder(path).checkpoints)),
        )
    except (OSError, ValueError, KeyError, HoneError) as error:
        reason = error.detail if isinstance(error, HoneError) else f"{error!r}"
        return FoundRun(path.name, path, problem=f"{str(path)!r} cannot be read: {reason}")


def _of_note(note: Note | None, job: Path, ended: Path) -> dict[str, Any]:
    """Returns the note's fields. A job with a summary has succeeded. An older version of Hone left
    no note; then the files' times count."""
    known: dict[str, Any] = {}
    if note and note.has_ended:
        known = {"end": note.status, "error": note.error, "finished_at": note.finished_at}
    elif ended.exists():
        known = {"end": "succeeded", "finished_at": ended.stat().st_mtime}
    if note is None:
        return {**known, "created_at": job.stat().st_mtime}
    return {**known, **note.model_dump(include=set(OF_SUBMISSION))}


def _checkpoints(folder: Path) -> Iterator[Checkpoint]:
    """Yields the complete checkpoints: the trainer renames a checkpoint to its name last."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if (step := step_of(path.name)) is not None:
            size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            yield Checkpoint(step=step, path=str(path), size_bytes=size_bytes)
