"""What jobs use: uploaded files, and models, which may be checkpoints of other jobs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from services.orchestrator.store import keys
from services.orchestrator.store.connection import Connection
from shared.errors import Conflict
from shared.wire import UploadedFile


class Removals:
    """Uploaded files that were removed: no job can be submitted with such a file. Each is
    remembered for `ttl_s` seconds. Every method raises StoreUnavailable when Redis
    cannot be reached."""

    def __init__(self, connection: Connection, ttl_s: int) -> None:
        self._call, self._do, self._redis = connection.call, connection.do, connection.client
        self._ttl_s = ttl_s

    async def add(self, file: UploadedFile) -> None:
        """Lets no further job be submitted with the uploaded file. Raises Conflict while a job that
        has not ended names it."""
        answer = await self._call(
            "remove_file", file=file.id, created_at=file.created_at, removed_ttl_s=self._ttl_s
        )
        if answer != "ok":
            job_id, status = answer.split(" ")
            raise Conflict(
                f"file {file.id!r} is in use by job {job_id!r}, which is {status}; cancel the job "
                "or wait for its end"
            )

    async def undo(self, file_id: str) -> None:
        """Lets jobs be submitted again with a file that was removed and uploaded again."""
        await self._do(self._redis.delete(keys.REMOVED + file_id))

    async def created_at(self, file_id: str) -> int | None:
        """Returns when a removed file had been made, in Unix seconds; None if the file was not
        removed."""
        found = await self._do(self._redis.get(keys.REMOVED + file_id))
        return None if found is None else int(found)


@dataclass(frozen=True)
class Use:
    """The folder of a model, with a job that uses it and has not ended."""

    path: Path
    job_id: str
    status: str


def uses_below(folder: Path, found: Iterable[tuple[str, str, str]]) -> list[Use]:
    """Returns the uses of models in `folder`. `found` are each model, its job's id and status."""
    folder = folder.resolve()
    uses = [Use(Path(model).resolve(), job_id, status) for model, job_id, status in found]
    return [use for use in uses if use.path.is_relative_to(folder)]
