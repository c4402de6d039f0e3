"""A job's outcome: at the end of an attempt, or from its run folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from services.orchestrator.runs.folder import RunFolder
from services.orchestrator.runs.found import WAS_DELETED, End
from shared.errors import HoneError
from shared.host.logs import get_logger


@dataclass(frozen=True)
class Outcome:
    """The job's outcome: `why` says why it paused, failed, or succeeded before its last step;
    `summary` is its result. "cancelled" comes only from the run folder. The job is queued again if
    another attempt got in its way, or another trainer may do better."""

    status: Literal["succeeded", "paused", "failed", "cancelled", "queued"]
    why: str | None = None
    summary: dict[str, Any] | None = None


def found_end(folder: RunFolder) -> Outcome | None:
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
