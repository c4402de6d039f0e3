"""What becomes of a job: as an attempt ends, or as its run folder says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from services.orchestrator.record.folder import RunFolder
from services.orchestrator.record.found import WAS_DELETED, End
from shared.errors import HoneError
from shared.logs import get_logger


@dataclass(frozen=True)
class Outcome:
    """What became of the job: `why` says why it paused, failed, or succeeded before its last step,
    `summary` what it came to. It is cancelled only where its run folder says so, and queued again
    where another attempt got in its way, or another trainer may do better."""

    status: Literal["succeeded", "paused", "failed", "cancelled", "queued"]
    why: str | None = None
    summary: dict[str, Any] | None = None


def found_end(folder: RunFolder) -> Outcome | None:
    """Returns how the job has ended, if its run folder says that it has: then Redis was brought
    back from an older file, and what has ended does not begin again. A folder that cannot be read
    says nothing here: the job meets it again at once."""
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
