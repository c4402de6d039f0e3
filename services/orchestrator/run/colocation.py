"""Checks of jobs for a sampler and a trainer that take turns on one GPU (HONE_COLOCATE)."""

from __future__ import annotations

from shared.errors import BadRequest
from shared.job import SYNC_METHODS, Job
from shared.settings import Settings


def check_colocation(job: Job, settings: Settings) -> None:
    """Raises BadRequest for a job that would sample while the trainer has the GPU, frees the
    sampler's memory by itself, or keeps memory that the trainer cannot move off the GPU. A job of 0
    steps loads no trainer."""
    if not (settings.colocate and job.trains):
        return
    if job.max_staleness:
        raise BadRequest(
            "HONE_COLOCATE is set, so sampler and trainer take turns on one GPU: got max_staleness "
            f"{job.max_staleness}, expected 0"
        )
    if SYNC_METHODS[job.weight_sync].ends_requests:
        raise BadRequest(
            f"HONE_COLOCATE is set, so the sampler sleeps at each step anyway: got weight_sync "
            f'"{job.weight_sync}", expected "auto" or one that loads in place'
        )
    if job.memory.zero_stage == 3 and not job.memory.offload_optimizer:
        raise BadRequest(
            "HONE_COLOCATE is set, so the trainer leaves the GPU to the sampler, which DeepSpeed's "
            "ZeRO-3 cannot: got memory.zero_stage 3, expected 2, or memory.offload_optimizer = true"
        )
    if any(len(slot.rollout_urls) > 1 for slot in settings.per_trainer):
        raise BadRequest(
            "HONE_COLOCATE is set, so the sampler is the one on the trainer's GPU: got "
            f"HONE_ROLLOUT_URL {settings.rollout_url!r}, expected one URL for each trainer"
        )
