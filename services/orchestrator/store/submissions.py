"""A job's submission."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.orchestrator.runs.note import Note
from services.orchestrator.store.ids import new_job_id
from services.orchestrator.store.records import SCHEMA, fields_of
from shared.job import Job


@dataclass(frozen=True)
class Submission:
    """A job to be submitted, with its run folder in `runs_dir`. `key` is the idempotency key;
    `data` are the versions of its data. `asked` is the job as it was sent, if keys were computed
    for it since. `warnings` are its probable mistakes. Times are Unix seconds."""

    job: Job
    runs_dir: Path
    key: str | None = None
    data: Mapping[str, str] = field(default_factory=dict[str, str])
    asked: Job | None = None
    warnings: Sequence[str] = ()
    created_at: float = field(default_factory=time.time)

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
            "schema": SCHEMA,
            "id": self.id,
            "created_at": self.created_at,
            "step": 0,
            "run_dir": self.run_dir,
            "key": self.key,
            "fingerprint": self.fingerprint if self.key else None,
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
        )


def fingerprint_of(job: Job) -> str:
    return hashlib.sha256(job.model_dump_json().encode()).hexdigest()
