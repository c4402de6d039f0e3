"""A job's stored rollouts with their rewards and advantages, and graded by other rewards. Reads the
run folder and writes nothing there."""

from __future__ import annotations

import asyncio
import heapq
import math
import statistics
from collections.abc import Sequence

from services.orchestrator.grpo.advantages import batch_advantages
from services.orchestrator.grpo.examples import of_all_tokens
from services.orchestrator.samplers.clients import RewardClient
from services.orchestrator.samplers.status import Caller
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.tasks import gather_all
from shared.errors import BadRequest
from shared.job import Job
from shared.settings import Settings
from shared.wire import (
    Batch,
    GradedRollout,
    RegradedRollout,
    RegradedStep,
    RegradeReport,
    RegradeRequest,
)

TOLERANCE = 1e-6


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
            advantage=of_all_tokens(advantage),
            turn_advantages=advantage if isinstance(advantage, tuple) else (),
            forked=tuple(branch.because for branch in rollout.branches),
        )
        for prompt, group, scores, advantages in zip(
            batch.prompts, batch.groups, batch.scores, advantages_PG, strict=True
        )
        for rollout, score, advantage in zip(group.rollouts, scores, advantages, strict=True)
    )


async def regrade(
    request: RegradeRequest,
    job: Job,
    folder: RunFolder,
    settings: Settings,
) -> RegradeReport:
    """Returns the differences in the requested steps. Raises NotFound for a step without stored
    rollouts, and BadRequest for rewards that the reward service refuses for the job's columns."""
    check_steps(request, folder)
    changed_job = job.model_copy(update={"rewards": request.rewards, "teacher": None})
    reward = RewardClient(Caller(changed_job, settings.per_trainer[0]))
    steps: list[RegradedStep] = []
    examples: list[RegradedRollout] = []
    try:
        await reward.validate(_columns(await asyncio.to_thread(folder.batch, request.first_step)))
        for step in range(request.first_step, request.last_step + 1):
            batch = await asyncio.to_thread(folder.batch, step)
            scores_PG = await gather_all(map(reward.score, batch.prompts, batch.groups))
            again = batch.model_copy(update={"scores": tuple(scores_PG)})
            pairs = compare(step, graded(batch, job), graded(again, changed_job))
            steps.append(summary(step, pairs))
            examples = heapq.nlargest(
                request.num_examples, [*examples, *filter(_difference, pairs)], key=_difference
            )
    finally:
        await reward.client.close()
    return RegradeReport(steps=tuple(steps), examples=tuple(examples))


def check_steps(request: RegradeRequest, folder: RunFolder) -> None:
    """Raises BadRequest for steps in the wrong order, and NotFound for a step that is not
    stored."""
    first, last = request.first_step, request.last_step
    if last < first:
        raise BadRequest(
            f"steps {first}:{last}: expected the last step not to come before the first"
        )
    stored = set(folder.batch_steps())
    absent = next((step for step in range(first, last + 1) if step not in stored), None)
    if absent is not None:
        folder.batch(absent)  # raises an error that lists the stored steps


def compare(
    step: int, old: Sequence[GradedRollout], new: Sequence[GradedRollout]
) -> list[RegradedRollout]:
    """Returns the step's `[P*G]` rollouts, before and after."""
    return [
        RegradedRollout(step=step, position=position, old=before, new=after)
        for position, (before, after) in enumerate(zip(old, new, strict=True))
    ]


def summary(step: int, pairs: Sequence[RegradedRollout]) -> RegradedStep:
    old = [pair.old.reward for pair in pairs]
    new = [pair.new.reward for pair in pairs]
    return RegradedStep(
        step=step,
        num_rollouts=len(pairs),
        old_reward=_mean(old),
        new_reward=_mean(new),
        old_missing=old.count(None),
        new_missing=new.count(None),
        num_changed=sum(bool(_difference(pair)) for pair in pairs),
        flipped=tuple(
            pair.position
            for pair in pairs
            if _sign(pair.old.advantage) != _sign(pair.new.advantage)
        ),
    )


def _difference(pair: RegradedRollout) -> float:
    """Returns by how much the reward differs: infinity if the old or new reward is missing, 0 if
    only by rounding."""
    old, new = pair.old.reward, pair.new.reward
    if old is None or new is None:
        return 0.0 if old is new else math.inf
    difference = abs(new - old)
    return difference if difference > TOLERANCE * max(1.0, abs(old), abs(new)) else 0.0


def _sign(advantage: float | None) -> int:
    return 0 if not advantage else int(math.copysign(1, advantage))


def _mean(rewards: Sequence[float | None]) -> float | None:
    present = [reward for reward in rewards if reward is not None]
    return statistics.fmean(present) if present else None


def _columns(batch: Batch) -> tuple[str, ...]:
    """Returns the columns that every stored prompt's row has."""
    first, *rest = (prompt.row for prompt in batch.prompts)
    return tuple(name for name in first if all(name in row for row in rest))
