"""The seeds of a job with repeatable samples (`sampling.repeatable`)."""

from __future__ import annotations

import hashlib

from shared.job import Job


def group_seed(job: Job, *place: object) -> int | None:
    """Returns the seed of the first completion of the group at `place` in the job; each next
    completion has one more. None: the job does not ask for seeds."""
    if not job.sampling.repeatable:
        return None
    named = ":".join(map(str, (job.seed, *place)))
    return int.from_bytes(hashlib.sha256(named.encode()).digest()[:8], "big") >> 2
