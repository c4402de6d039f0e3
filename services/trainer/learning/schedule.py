"""The learning rate of each step, from 1: a pure function, so no state is saved or restored.

The steps of `[warmup]` have its own rate. Without these steps, with s the step, S the job's steps
and w its `warmup_steps`,

    s <= w    peak * s / w
    s > w     min + (peak - min) * f(p),  p = (s - max(w, 1)) / (S - max(w, 1))

    constant  the peak
    linear    f(p) = 1 - p
    cosine    f(p) = (1 + cos(pi p)) / 2      (arXiv 1608.03983)

so step w (without warm-up, the first step) has the peak, and the last step has `min_learning_rate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from shared.job import Job

DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2,
}


def learning_rate(job: Job, step: int) -> float:
    """Returns the rate of `step`, from 1."""
    training = job.training
    if step <= job.warmup.steps:
        return job.warmup_learning_rate
    step, steps = step - job.warmup.steps, job.steps - job.warmup.steps
    peak, warmup = job.learning_rate, training.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if training.schedule == "constant":
        return peak
    start = max(warmup, 1)
    progress = min(1.0, (step - start) / (steps - start)) if steps > start else 0.0
    return training.min_learning_rate + (peak - training.min_learning_rate) * DECAYS[
        training.schedule
    ](progress)
