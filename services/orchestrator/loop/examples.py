"""From scored rollouts to the trainer's input: examples, and the totals of their batch."""

from __future__ import annotations

from collections.abc import Sequence

from services.orchestrator.loop.advantages import Advantages, is_masked
from shared.job import Job
from shared.wire import Batch, Example, RolloutGroup, StepTotals


def to_examples(groups_P: Sequence[RolloutGroup], advantages_PG: Advantages) -> tuple[Example, ...]:
    """Returns an example for each rollout that has an advantage and sampled tokens, with the
    sampler's token ids, log-probs and versions as they came."""
    return tuple(
        Example(
            prompt_token_ids=group.prompt_token_ids,
            token_ids=rollout.token_ids,
            old_logprobs=rollout.logprobs,
            advantage=advantage,
            spans=rollout.spans,
            sampled=rollout.sampled,
            kept_ids=rollout.kept_ids,
            kept_counts=rollout.kept_counts,
        )
        for group, advantages_G in zip(groups_P, advantages_PG, strict=True)
        for rollout, advantage in zip(group.rollouts, advantages_G, strict=True)
        if advantage is not None and rollout.num_sampled
    )


def step_totals(batch: Batch, job: Job) -> StepTotals:
    """Returns the losses' denominators: counts of every graded rollout and its sampled tokens,
    whether its group has signal or not.

    With `advantages.mask_truncated` a completion that was cut off counts as a sequence of no
    tokens, as in TRL. A rollout without a reward is not counted: counting it would mean an
    advantage of 0. Replaced groups are not part of the batch (arXiv 2503.14476).
    """
    graded = [
        rollout
        for group, scores_G in zip(batch.groups, batch.scores, strict=True)
        for rollout, score in zip(group.rollouts, scores_G, strict=True)
        if score.value is not None
    ]
    counted = [rollout for rollout in graded if not is_masked(rollout, job)]
    return StepTotals(
        num_sequences=len(graded), num_tokens=sum(rollout.num_sampled for rollout in counted)
    )
