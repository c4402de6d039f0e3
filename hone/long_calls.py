"""Calls of a client that last: the download of a checkpoint, and an evaluation until its report.

An interrupted download resumes, also in a later call: a file ends in `.part` until its checksum is
right. An evaluation is a job of 0 steps, made of another job."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pydantic import BaseModel

from shared.errors import BadRequest, Failed, HoneError, Unavailable
from shared.http.client import Client
from shared.job import MAX_NAME, EvaluatedModel, Job
from shared.job.file import parse_job
from shared.weights.folders import StoredFile
from shared.wire import CheckpointFile, EvaluationReport, JobProgress, JobRecord

if TYPE_CHECKING:
    from hone.async_client import AsyncClient


Progress = Callable[[str, int, int], None]
"""Called with a file's name, its bytes so far, and its size."""

PART = ".part"

PATIENCE_S = 60.0
"""Seconds without a new byte after which a download is given up."""


class CheckpointDownload(BaseModel):
    """The checkpoint of `step`, whose `files` are in `folder`."""

    step: int
    folder: Path
    files: tuple[CheckpointFile, ...]


@dataclass(frozen=True)
class Download:
    """Files at `path` of the orchestrator, put into `folder`."""

    client: Client
    path: str
    folder: Path
    progress: Progress

    async def all(self, files: Sequence[CheckpointFile]) -> None:
        """Downloads all files. Raises Failed if the disk refuses them or a file arrives damaged,
        and Unavailable if the orchestrator stays away."""
        for file in files:
            _check_name(file.name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            missing = [file for file in files if not await asyncio.to_thread(self._is_there, file)]
            self._check_space(missing)
            for file in missing:
                await self._one(file)
        except OSError as error:
            raise Failed(
                f"{str(self.folder)!r} cannot be written: {error.strerror or error}; --to names "
                "another folder"
            ) from error

    def _is_there(self, file: CheckpointFile) -> bool:
        target = self.folder / file.name
        is_there = target.is_file() and _is_same(target, file)
        if is_there:
            self.progress(file.name, file.size_bytes, file.size_bytes)
        return is_there

    def _check_space(self, missing: Sequence[CheckpointFile]) -> None:
        needed_bytes = sum(file.size_bytes - _size(self._part(file)) for file in missing)
        free_bytes = shutil.disk_usage(self.folder).free
        if needed_bytes > free_bytes:
            raise Failed(
                f"no space in {str(self.folder)!r}: {needed_bytes} bytes are missing and "
                f"{free_bytes} are free; --to names another folder",
                code="disk_full",
            )

    async def _one(self, file: CheckpointFile) -> None:
        part = self._part(file)
        part.parent.mkdir(parents=True, exist_ok=True)
        if _size(part) > file.size_bytes:
            part.unlink()
        part.touch()
        have_bytes = await self.client.download(
            f"{self.path}/{quote(file.name)}",
            part,
            file.size_bytes,
            patience_s=PATIENCE_S,
            progress=lambda num_bytes: self.progress(file.name, num_bytes, file.size_bytes),
        )
        if have_bytes < file.size_bytes:
            raise _differs(part, f"{file.name} ended after {have_bytes} bytes", file)
        if not await asyncio.to_thread(_is_same, part, file):
            raise _differs(part, f"{file.name} arrived with other bytes", file)
        part.replace(self.folder / file.name)

    def _part(self, file: CheckpointFile) -> Path:
        return self.folder / (file.name + PART)


def _check_name(name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise BadRequest(f"the checkpoint has a file {name!r:.200}; expected one within its folder")


def _differs(part: Path, what: str, file: CheckpointFile) -> Failed:
    """Removes the partial file; returns the error."""
    part.unlink()
    return Failed(
        f"{what}; the checkpoint's has {file.size_bytes}, with the checksum {file.crc32:08x}; what "
        "arrived was removed: try again",
        code="digest_differs",
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_same(path: Path, file: CheckpointFile) -> bool:
    if path.stat().st_size != file.size_bytes:
        return False
    return StoredFile.of(path).crc32 == file.crc32


# --- evaluations ---------------------------------------------------------------------------------

NAME = "eval"
"""The name of a job that evaluates; `eval-demo` if it is made of a job called `demo`, so that
`demo` is still the newest job that trained."""

OF_TRAINING = ("checkpoints", "stop", "wandb", "trackers", "request")
"""Sections of a job that are not taken over, because they are about its training."""


class Paused(HoneError):
    """The evaluation is paused, and waits for an operator."""


def trained_dtype(record: JobRecord) -> str | None:
    """Returns the dtype in which the job's checkpoints are; None if it is not known yet."""
    asked = record.job.training.dtype
    return (record.summary or {}).get("dtype") or (None if asked == "auto" else asked)


def evaluation_of(job: Job, models: Sequence[EvaluatedModel | Mapping[str, Any]]) -> Job:
    """Returns the job of 0 steps that evaluates at least one model on the held-out problems of
    `job`, by its rewards and its `[evaluation]`. Raises BadRequest."""
    given = [dict(model) for model in models]
    if not given:
        raise BadRequest("no model to evaluate; expected at least one")
    document = job.model_dump(mode="json", exclude={"data": {"train", "epochs"}})
    for section in OF_TRAINING:
        del document[section]
    document["evaluation"]["models"] = given
    is_named = job.name == NAME or job.name.startswith(f"{NAME}-")
    changes = {
        "name": job.name if is_named else f"{NAME}-{job.name}"[:MAX_NAME],
        "model": given[0].get("model", job.model),
        "model_revision": given[0].get("revision"),
        "steps": 0,
    }
    return parse_job(document | changes, "the evaluation")


async def follow(
    client: AsyncClient, job_id: str, progress: Callable[[JobProgress], None]
) -> EvaluationReport:
    """Returns the report once the job has ended. If the call is interrupted, the job is cancelled.
    Raises Paused if the job is paused, Failed if it has failed or was cancelled, and Unavailable if
    the orchestrator is unreachable for long, while the job continues."""
    try:
        events = client.events(job_id, follow=True, progress=progress)
        async with contextlib.aclosing(events):
            async for _ in events:
                pass
        return _report_of(await client.get(job_id))
    except asyncio.CancelledError:
        with contextlib.suppress(HoneError):  # the interruption says more
            await client.cancel(job_id)
        raise
    except Unavailable as error:
        raise Unavailable(
            f"{error.detail}; job {job_id} continues, and `hone logs -f {job_id}` shows its report"
        ) from error


def _report_of(record: JobRecord) -> EvaluationReport:
    if record.status == "paused":
        raise Paused(
            f"job {record.id} is paused: {record.error}; `hone resume {record.id}` continues where "
            f"it was, and `hone logs -f {record.id}` shows its report"
        )
    if report := report_in(record):
        return report
    why = f": {record.error}" if record.error else ""
    raise Failed(f"job {record.id} is {record.status}{why}")


def report_in(record: JobRecord) -> EvaluationReport | None:
    """Returns the report of a job of 0 steps that has succeeded; None for any other job."""
    found = (record.summary or {}).get("evaluation")
    return EvaluationReport.model_validate(found) if found else None
