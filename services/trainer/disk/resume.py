"""Chooses the checkpoint that a job resumes from: the newest complete one, if it is of this job and
this model.

A checkpoint of another job or model is refused, with both values. The job's keys in `MAY_CHANGE`
(memory, length, logs and the like) and the number of ranks may have changed. A damaged checkpoint
is renamed and reported, and the next older one is taken. Every rank checks a share of the files,
and all make the same choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.trainer.disk import checkpoints
from services.trainer.disk.checkpoints import Damaged, Manifest
from services.trainer.processes.together import Ranks
from shared.errors import Conflict
from shared.host.logs import get_logger
from shared.job.job import differences, same_learning
from shared.wire import TrainerJob

SHOWN_DIFFERENCES = 3


@dataclass(frozen=True)
class Found:
    """The checkpoint to resume from, or None, and sentences about damaged ones."""

    path: Path | None
    manifest: Manifest | None
    damaged: tuple[str, ...]


def newest_whole(ranks: Ranks, folder: Path, request: TrainerJob, model: str) -> Found:
    """Returns, on every rank, the checkpoint in `folder` to resume from. Raises Conflict if it is
    of another job or model.

    `model` is the fingerprint of the job's model.
    """
    damaged: list[str] = []
    while True:
        step = ranks.from_rank_0(
            lambda: max(
                (checkpoint.step for checkpoint in checkpoints.listed(folder)), default=None
            )
        )
        if step is None:
            return Found(None, None, tuple(damaged))
        path = checkpoints.path_of(folder, step)
        manifest, fault = _examined(ranks, path, request, model)
        if manifest is not None:
            return Found(path, manifest, tuple(damaged))
        aside = ranks.from_rank_0(lambda path=path: checkpoints.set_aside(path))
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
        checkpoints.check_seen(path, ranks.rank)
        try:
            manifest = checkpoints.read_manifest(path)
            check_ours(path, manifest, request, model)
            checkpoints.check_files(path, manifest, slice(ranks.rank, None, ranks.num_ranks))
        except Damaged as fault:
            return None, str(fault)
        return manifest, None

    findings = ranks.together(examine)
    fault = next((fault for _, fault in findings if fault), None)
    return (None, fault) if fault else findings[0]


def check_ours(path: Path, manifest: Manifest, request: TrainerJob, model: str) -> None:
    """Raises Conflict, with both values, for a checkpoint of another job or model."""
    begin = f"training cannot go on from the checkpoint {str(path)!r}: it"
    away = "move it away to begin anew"
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
