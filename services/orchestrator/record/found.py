"""What run folders say of their jobs: enough for a record, where the job's own was lost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from services.orchestrator.record.folder import REDIS, RunFolder
from services.orchestrator.record.note import Note
from shared import codec
from shared.errors import HoneError
from shared.job import JOB_ID, Job
from shared.wire import Checkpoint

CHECKPOINT = re.compile(r"step-(\d+)")

End = Literal["succeeded", "failed", "cancelled"]

WAS_DELETED = "was deleted; its run folder is left"


@dataclass(frozen=True)
class FoundRun:
    """A job's run folder. `job` None: `problem` says why there is to be no record of it. `end` is
    how the job ended, None if it has not as far as the folder says. `summary` is there only if it
    ended well. Times are Unix seconds; `reward` is that of the last step. `redis` is the identity
    of the Redis that has the job, if known. `key` and `fingerprint` are of its submission."""

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
    step: int = 0
    reward: float | None = None
    data: dict[str, str] = field(default_factory=dict[str, str])
    summary: dict[str, Any] | None = None
    checkpoints: list[Checkpoint] = field(default_factory=list[Checkpoint])


def find_runs(runs_dir: Path) -> list[FoundRun]:
    """Returns the run folders in `runs_dir`, by id; links to them are none."""
    folders = sorted(path.parent for path in runs_dir.resolve().glob("*/job.json"))
    return [
        _read(folder)
        for folder in folders
        if not folder.is_symlink() and re.fullmatch(JOB_ID, folder.name)
    ]


def _read(path: Path) -> FoundRun:
    if RunFolder(path).is_deleted:
        return FoundRun(path.name, path, problem=WAS_DELETED)
    file, data, ended = (path / name for name in ("job.json", "data.json", "summary.json"))
    redis = path / REDIS
    try:
        job = codec.decode_stored(Job, file.read_bytes())
        rows, note = RunFolder(path).metrics(), RunFolder(path).note()
        summary = json.loads(ended.read_bytes()) if ended.exists() else None
        return FoundRun(
            id=path.name,
            path=path,
            job=job,
            redis=redis.read_text().strip() if redis.exists() else None,
            **_of_note(note, file, ended),
            step=rows[-1].step if rows else 0,
            reward=rows[-1].metrics.get("reward") if rows else None,
            data=json.loads(data.read_bytes()) if data.exists() else {},
            summary=summary,
            checkpoints=list(_checkpoints(path / "checkpoints")),
        )
    except (OSError, ValueError, KeyError, HoneError) as error:
        reason = error.detail if isinstance(error, HoneError) else f"{error!r}"
        return FoundRun(path.name, path, problem=f"{str(path)!r} cannot be read: {reason}")


def _of_note(note: Note | None, job: Path, ended: Path) -> dict[str, Any]:
    """Returns what the note says. A job that wrote its summary has succeeded; the folder of an
    older version of Hone has no note, and its files' times say when."""
    known: dict[str, Any] = {}
    if note and note.has_ended:
        known = {"end": note.status, "error": note.error, "finished_at": note.finished_at}
    elif ended.exists():
        known = {"end": "succeeded", "finished_at": ended.stat().st_mtime}
    if note is None:
        return {**known, "created_at": job.stat().st_mtime}
    return {**known, **note.model_dump(include={"created_at", "key", "fingerprint"})}


def _checkpoints(folder: Path) -> Iterator[Checkpoint]:
    """Yields those that are complete: the trainer gives them their names last."""
    for path in sorted(folder.glob("step-*")):
        if found := CHECKPOINT.fullmatch(path.name):
            size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            yield Checkpoint(step=int(found[1]), path=str(path), size_bytes=size_bytes)
