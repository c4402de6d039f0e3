"""The part of a job's record in its run folder (`record.json`), so that the record can be rebuilt
if Redis lost it."""

from __future__ import annotations

from shared.wire import TERMINAL, JobStatus, Wire

OF_SUBMISSION = ("created_at", "key", "fingerprint", "submitted_by", "weight")
"""The fields that do not change after the submission."""


class Note(Wire):
    """The record's state when a worker took the job up, or when the job ended. Times are Unix
    seconds. `key` is the idempotency key of its submission, `fingerprint` the digest of the
    submitted job; `submitted_by` and `weight` are as in `JobSummary`."""

    created_at: float
    finished_at: float | None = None
    status: JobStatus
    error: str | None = None
    key: str | None = None
    fingerprint: str | None = None
    submitted_by: str | None = None
    weight: float = 1.0
    schema_version: int = 1

    @property
    def has_ended(self) -> bool:
        return self.status in TERMINAL
