"""From scored rollouts to the trainer's input: examples, and the totals of their batch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from services.orchestrator.loop.advantages import Advantage, Advantages, is_masked, returns_of
from services.orchestrator.loop.turns import lengths
from shared.job import Job
from shared.wire import Batch, Example, Rollout, RolloutGroup, Score, StepTotals
from shared.wire.packed import Logprobs, Mask


def to_examples(groups_P: Sequence[RolloutGroup], advantages_PG: Advantages) -> tuple[Example, ...]:
    """Returns an example for each rollout that has an advantage and sampled tokens, with the
    sampler's token ids, log-probs and versions as they came. The tokens of a turn without an
    advantage are context."""
    return tuple(
        example
        for group, advantages_G in zip(groups_P, advantages_PG, strict=True)
        for rollout, advantage in zip(group.rollouts, advantages_G, strict=True)
        if advantage is not None and (example := _example(group, rollout, advantage))
    )


def _example(group: RolloutGroup, rollout: Rollout, advantage: Advantage) -> Example | None:
    sampled, advantages = rollout.sampled, Logprobs()
    if isinstance(advantage, tuple):
        sampled = only_turns(rollout, [one is not None for one in advantage])
        advantages = _per_token(rollout, advantage)
    if not (sampled.data.count(1) if sampled else len(rollout.token_ids)):
        return None
    return Example(
        prompt_token_ids=group.prompt_token_ids,
        token_ids=rollout.token_ids,
        old_logprobs=rollout.logprobs,
        advantage=of_all_tokens(advantage) or 0.0,
        advantages=advantages,
        spans=rollout.spans,
        sampled=sampled,
        kept_ids=rollout.kept_ids,
        kept_counts=rollout.kept_counts,
    )


def of_all_tokens(advantage: Advantage) -> float | None:
    """Returns a rollout's advantage as one number: the mean of its turns'."""
    if not isinstance(advantage, tuple):
        return advantage
    present = [one for one in advantage if one is not None]
    return math.fsum(present) / len(present) if present else None


def only_turns(rollout: Rollout, kept_K: Sequence[bool]) -> Mask:
    """Returns `sampled` `[T]` of the tokens of these turns alone."""
    before, *spans = lengths(rollout)
    sampled = rollout.sampled.data or bytes([1]) * len(rollout.token_ids)
    found, start = bytearray(before), before
    for kept, length in zip(kept_K, spans, strict=True):
        found += sampled[start : start + length] if kept else bytes(length)
        start += length
    return Mask(bytes(found))


def _per_token(rollout: Rollout, advantages_K: Sequence[float | None]) -> Logprobs:
    before, *spans = lengths(rollout)
    found = array("f", [0.0]) * before
    for advantage, length in zip(advantages_K, spans, strict=True):
        found += array("f", [advantage or 0.0]) * length
    return Logprobs(found)


def step_totals(batch: Batch, job: Job) -> StepTotals:
    """Returns the losses' denominators: counts of every graded rollout and its sampled tokens,
    whether its group has signal or not.

    With `advantages.mask_truncated` a completion that was cut off counts as a sequence of no
    tokens, as in TRL. A rollout without a reward, or a turn without a return, is not counted:
    counting it would mean an advantage of 0. Replaced groups are not part of the batch (arXiv
    2503.14476).
    """
    graded = [
        (rollout, score)
        for group, scores_G in zip(batch.groups, batch.scores, strict=True)
        for rollout, score in zip(group.rollouts, scores_G, strict=True)
        if score.value is not None
    ]
    counted = [
        _num_credited(rollout, score, job)
        for rollout, score in graded
        if not is_masked(rollout, job)
    ]
    return StepTotals(num_sequences=len(graded), num_tokens=sum(counted))


def _num_credited(rollout: Rollout, score: Score, job: Job) -> int:
    if job.advantages.credit == "episode":
        return rollout.num_sampled
    found = returns_of(rollout, score, job)
    return only_turns(rollout, [one is not None for one in found]).data.count(1)
