"""Which checkpoint a job goes on from: the newest whole one, if it is this job's, this model's and
of this many ranks.

One of another job, model or number of ranks is refused, with both values. A damaged one is renamed,
said loudly, and the next older one is taken. Every rank reads a share of the checksums, and all
come to the same choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from services.trainer.disk import checkpoints
from services.trainer.disk.checkpoints import Damaged, Manifest
from services.trainer.processes.together import Ranks
from shared.errors import Conflict
from shared.logs import get_logger
from shared.wire import TrainerJob

SHOWN_DIFFERENCES = 3


@dataclass(frozen=True)
class Found:
    """What was found: a checkpoint to go on from, or None, and sentences about those that were
    damaged."""

    path: Path | None
    manifest: Manifest | None
    damaged: tuple[str, ...]


def newest_whole(ranks: Ranks, folder: Path, request: TrainerJob, model: str) -> Found:
    """Returns, on every rank, the checkpoint in `folder` to go on from. Raises Conflict if it is
    another's.

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
    """Returns the manifest of the checkpoint, or None and the first fault that any rank found.
    Raises Conflict on all ranks."""

    def examine() -> tuple[Manifest | None, str | None]:
        checkpoints.check_seen(path, ranks.rank)
        try:
            manifest = checkpoints.read_manifest(path)
            check_ours(path, manifest, request, model, ranks.num_ranks)
            checkpoints.check_files(path, manifest, slice(ranks.rank, None, ranks.num_ranks))
        except Damaged as fault:
            return None, str(fault)
        return manifest, None

    findings = ranks.together(examine)
    fault = next((fault for _, fault in findings if fault), None)
    return (None, fault) if fault else findings[0]


def check_ours(
    path: Path, manifest: Manifest, request: TrainerJob, model: str, num_ranks: int
) -> None:
    """Raises Conflict, with both values, for a checkpoint of another job, model, ZeRO stage or
    number of ranks."""
    begin = f"the checkpoint {str(path)!r} cannot be gone on from: it"
    away = "move it away to begin anew"
    if manifest.job_id != request.job_id:
        raise Conflict(
            f"{begin} is of job {manifest.job_id!r}, and this is job {request.job_id!r}; {away}"
        )
    if manifest.num_ranks != num_ranks:
        raise Conflict(
            f"{begin} was written by {manifest.num_ranks} rank(s), and this trainer has "
            f"{num_ranks} (HONE_TRAINER_RANKS a node, on "
            f"HONE_TRAINER_NODES nodes); start the trainer with as many as before, or {away}"
        )
    if manifest.job != request.job:
        different = _differences(
            manifest.job.model_dump(mode="json"), request.job.model_dump(mode="json")
        )
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


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Returns what differs, as `memory.zero_stage was 2 and is 3`."""
    found: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            found += _differences(
                cast(dict[str, Any], before), cast(dict[str, Any], after), f"{prefix}{name}."
            )
        elif before != after:
            found.append(f"{prefix}{name} was {before!r} and is {after!r}")
    return found
