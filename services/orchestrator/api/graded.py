"""A stored batch in the form that people look at."""

from __future__ import annotations

from services.orchestrator.loop.advantages import batch_advantages
from shared.job import Job
from shared.wire import Batch, GradedRollout


def graded(batch: Batch, job: Job) -> tuple[GradedRollout, ...]:
    """Returns the batch's `[P*G]` rollouts with their verdicts and advantages."""
    advantages_PG = batch_advantages(batch, job)
    return tuple(
        GradedRollout(
            prompt_index=prompt.index,
            prompt=prompt.content,
            completion=rollout.text,
            finish_reason=rollout.finish_reason,
            versions=rollout.versions,
            reward=score.value,
            parts=score.parts,
            advantage=advantage,
        )
        for prompt, group, scores, advantages in zip(
            batch.prompts, batch.groups, batch.scores, advantages_PG, strict=True
        )
        for rollout, score, advantage in zip(group.rollouts, scores, advantages, strict=True)
    )
