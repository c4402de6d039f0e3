"""Which stored rollouts a job still needs."""

from __future__ import annotations

from shared.job import Job


def first_needed(job: Job, checkpoint_step: int) -> int:
    """Returns the oldest step whose batch is kept once there is a checkpoint of `checkpoint_step`.

    Kept are the newest `rollouts.keep_last`, and all that a trainer replays that goes on from the
    oldest of the newest `checkpoints.keep_last` checkpoints, the others being damaged.
    """
    if not job.rollouts.keep_last:
        return 1
    spec = job.checkpoints
    regular = range(spec.every, checkpoint_step, spec.every) if spec.every else ()
    oldest = [0, *regular, checkpoint_step][-spec.keep_last :][0]
    return max(min(checkpoint_step - job.rollouts.keep_last, oldest) + 1, 1)
