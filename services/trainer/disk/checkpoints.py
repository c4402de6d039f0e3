"""Checkpoints on disk: `<runs_dir>/<job>/checkpoints/step-000100/`, a Hugging Face folder from
which training also continues.

    config.json, *.safetensors, tokenizer ...   what plain `transformers` loads
    trainer/manifest.json                       its job and step; size and checksum of each other
                                                file
    trainer/...                                 the state of each rank (state.py)

A folder of that name is complete and on disk, because it is written aside and renamed. A checkpoint
that was damaged later is detected by its manifest and renamed to `damaged-step-000100`.

A job resumes from the newest complete checkpoint. A checkpoint of another job or model is refused,
with both values. The job's keys that do not change learning (memory, length, logs and the like) and
the number of ranks may have changed. Every rank checks a share of the files, and all make the same
choice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from services.trainer.disk.folders import discard, files_in, size_of
from services.trainer.engine import Ranks
from shared.errors import Conflict, Failed
from shared.host.logs import get_logger
from shared.job import CheckpointSpec, Job
from shared.job.job import differences, same_learning
from shared.weights.folders import CHECKPOINTS, MANIFEST, StoredFile, folder_name, step_of
from shared.wire import Checkpoint, JobId, OptimStepResult, StepResult, TrainerJob, Wire

DAMAGED = "damaged-"

FORMAT = 1
"""Version of the manifest and of the files in `trainer/`. It grows by 1 with each change that older
versions of Hone would misread."""

SHOWN_DIFFERENCES = 3

END_BYTES = 1 << 20


class Manifest(Wire):
    """`trainer/manifest.json`, of `FORMAT`. `model` is the fingerprint of the model that the job
    began with; `last_body` is the fingerprint of the last step's body, for which `last_result` is
    returned again."""

    format: int = 1
    job_id: JobId
    job: Job
    step: int
    model: str
    num_ranks: int
    versions: dict[str, str]
    skipped_steps: int
    last_body: str | None
    last_result: StepResult | OptimStepResult | None
    files: dict[str, StoredFile]


class DamagedCheckpoint(Exception):
    """A damaged checkpoint, with the fault as a sentence."""


def checkpoints_dir(runs_dir: Path, job_id: str) -> Path:
    return runs_dir.resolve() / job_id / CHECKPOINTS


def path_of(folder: Path, step: int) -> Path:
    """Returns the path of the checkpoint of `step` in a job's folder of checkpoints, whether it
    exists or not."""
    return folder / folder_name(step)


def list_checkpoints(folder: Path) -> tuple[Checkpoint, ...]:
    """Returns the complete checkpoints below `folder`, oldest step first."""
    checkpoints: list[Checkpoint] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if (step := step_of(path.name)) is not None:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                checkpoints.append(describe_checkpoint(path, step))
    return tuple(sorted(checkpoints, key=lambda checkpoint: checkpoint.step))


def check_seen(path: Path, rank: int) -> None:
    """Raises Failed unless this rank sees the folder that rank 0 sees."""
    if not path.is_dir():
        raise Failed(
            f"rank {rank} does not see {str(path)!r}, which rank 0 sees; HONE_RUNS_DIR has to be a "
            "folder that all nodes share"
        )


def describe_checkpoint(path: Path, step: int) -> Checkpoint:
    return Checkpoint(step=step, path=str(path), size_bytes=size_of(path))


def expendable(steps: list[int], spec: CheckpointSpec, keep: Collection[int] = ()) -> list[int]:
    """Returns the `steps` that may be removed: not among the last `keep_last`, not divisible by
    `keep_every`, and not in `keep`."""
    older = [step for step in sorted(steps)[: -spec.keep_last] if step not in keep]
    return [step for step in older if not spec.keep_every or step % spec.keep_every]


def remove_old(folder: Path, spec: CheckpointSpec, keep: Collection[int] = ()) -> None:
    for step in expendable(
        [checkpoint.step for checkpoint in list_checkpoints(folder)], spec, keep
    ):
        discard(path_of(folder, step))


def write_manifest(path: Path, manifest: Manifest) -> None:
    (path / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")


def read_manifest(path: Path) -> Manifest:
    """Returns the manifest of the checkpoint at `path`. Raises DamagedCheckpoint, and Conflict if
    another version of Hone wrote it."""
    try:
        document: Any = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise DamagedCheckpoint(f"{MANIFEST} is incomplete or garbled: {error}") from error
    written = cast(dict[str, Any], document).get("format") if isinstance(document, dict) else None
    if isinstance(written, int) and written > FORMAT:
        raise _of_another_version(path, f"got format {written}, expected at most {FORMAT}")
    try:
        return Manifest.model_validate(document)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise _of_another_version(path, f"{where}: {fault['msg']}") from error


def _of_another_version(path: Path, why: str) -> Conflict:
    return Conflict(
        f"the checkpoint {str(path)!r} is of another version of Hone: {MANIFEST}: {why}; continue "
        "with the version that wrote it, or move the checkpoint away to start again"
    )


def measure_files(path: Path, share: slice) -> dict[str, StoredFile]:
    """Returns size and checksum of a share of the files at `path`."""
    return {str(file.relative_to(path)): StoredFile.of(file) for file in files_in(path)[share]}


def check_files(path: Path, manifest: Manifest, share: slice) -> None:
    """Raises DamagedCheckpoint unless a share of the manifest's files at `path` are unchanged."""
    for name, expected in sorted(manifest.files.items())[share]:
        try:
            size_bytes = (path / name).stat().st_size
            if size_bytes != expected.size_bytes:
                raise DamagedCheckpoint(
                    f"{name} has {size_bytes} bytes, expected {expected.size_bytes}"
                )
            if StoredFile.of(path / name) != expected:
                raise DamagedCheckpoint(
                    f"{name} has other bytes than were written (another checksum)"
                )
        except OSError as error:
            raise DamagedCheckpoint(f"{name} cannot be read: {error.strerror or error}") from error


def quarantine(path: Path) -> Path:
    """Renames a damaged checkpoint, so that it is neither listed nor tried again, and returns its
    new path."""
    aside = path.with_name(DAMAGED + path.name)
    discard(aside)
    return path.replace(aside)


# --- the checkpoint to resume from ----------------------------------------------------------------


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to resume from, or None, and sentences about damaged ones."""

    path: Path | None
    manifest: Manifest | None
    damaged: tuple[str, ...]


def newest_step(ranks: Ranks, folder: Path) -> int:
    """Returns the step of the newest checkpoint in `folder`, by any writer; -1 without one."""
    return ranks.from_rank_0(
        lambda: max((checkpoint.step for checkpoint in list_checkpoints(folder)), default=-1)
    )


def newest_undamaged(ranks: Ranks, folder: Path, request: TrainerJob, model: str) -> ResumePoint:
    """Returns, on every rank, the checkpoint in `folder` to resume from. Raises Conflict if it is
    of another job or model.

    `model` is the fingerprint of the job's model.
    """
    damaged: list[str] = []
    while True:
        step = newest_step(ranks, folder)
        if step < 0:
            return ResumePoint(None, None, tuple(damaged))
        path = path_of(folder, step)
        manifest, fault = _examined(ranks, path, request, model)
        if manifest is not None:
            return ResumePoint(path, manifest, tuple(damaged))
        aside = ranks.from_rank_0(lambda path=path: quarantine(path))
        damaged.append(
            f"the checkpoint {path.name} of job {request.job_id!r} is damaged: {fault}; it is now "
            f"{str(aside)!r}"
        )
        get_logger().error(
            "damaged checkpoint",
            job=request.job_id,
            path=str(path),
            fault=fault,
            renamed_to=str(aside),
        )


def _examined(
    ranks: Ranks, path: Path, request: TrainerJob, model: str
) -> tuple[Manifest | None, str | None]:
    """Returns the checkpoint's manifest, or None and the first fault found by any rank. Raises
    Conflict on all ranks."""

    def examine() -> tuple[Manifest | None, str | None]:
        check_seen(path, ranks.rank)
        try:
            manifest = read_manifest(path)
            check_same_job(path, manifest, request, model)
            check_files(path, manifest, slice(ranks.rank, None, ranks.num_ranks))
        except DamagedCheckpoint as fault:
            return None, str(fault)
        return manifest, None

    findings = ranks.on_all_ranks(examine)
    fault = next((fault for _, fault in findings if fault), None)
    return (None, fault) if fault else findings[0]


def check_same_job(path: Path, manifest: Manifest, request: TrainerJob, model: str) -> None:
    """Raises Conflict, with both values, for a checkpoint of another job or model."""
    begin = f"training cannot continue from the checkpoint {str(path)!r}: it"
    away = "move it away to start again"
    if manifest.job_id != request.job_id:
        raise Conflict(
            f"{begin} is of job {manifest.job_id!r}, and this is job {request.job_id!r}; {away}"
        )
    if not same_learning(manifest.job, request.job):
        different = differences(manifest.job, request.job)
        raise Conflict(
            f"{begin} is of the same job id with another job: "
            f"{'; '.join(different[:SHOWN_DIFFERENCES])}; {away}"
        )
    if manifest.model != model:
        raise Conflict(
            f"{begin} began with another model: what is in {request.job.model!r} had the "
            f"fingerprint {manifest.model!r}, and now "
            f"has {model!r}; put the model back, or {away}"
        )


def fingerprint(files: Iterable[Path]) -> str:
    """Returns 16 hex digits that differ for another configuration, other tensors, or other weights
    in any file's first or last MiB.

    `files` are the model's configuration and weights, whole. A safetensors file begins with the
    names, shapes and places of all its tensors.
    """
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        size_bytes = file.stat().st_size
        digest.update(f"{file.name} {size_bytes}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(END_BYTES))
            stream.seek(max(0, size_bytes - END_BYTES), os.SEEK_SET)
            digest.update(stream.read(END_BYTES))
    return digest.hexdigest()[:16]
