"""From scores `[P][G]` to advantages `[P][G]`. Pure; `AdvantageSpec` in shared/job/learning.py has
the formulas and their sources, turns.py has the credit by turns.

A missing reward stays missing: baseline and deviation are over the other rewards, never over an
invented 0.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from services.orchestrator.grpo.normalizing import TOLERANCE, differ, normalize, over_batch
from services.orchestrator.grpo.turns import Returns, by_number, returns, turn_advantages
from shared.job import Job, RewardSpec
from shared.wire import Batch, Rollout, RolloutGroup, Score

Advantage = float | tuple[float | None, ...] | None
"""Of a rollout: a number for all of its tokens, or with credit by turns a number for each turn's.
None: no gradient comes from this rollout, or turn, and it is not counted in the loss."""

Advantages = list[list[Advantage]]
"""`[P][G]`."""


def batch_advantages(batch: Batch, job: Job) -> Advantages:
    """Returns each rollout's advantage by the job's `[advantages]`.

    None: its reward is missing, its group has no signal, or it was cut off and `mask_truncated` is
    set. In the last two cases its reward still counts in baselines and deviations. With a KL term
    (`training.beta`) or a teacher, which every token has, a group without signal has advantages
    of 0. Of a rollout that came with advantages, their mean.
    """
    advantages_PG = _advantages(batch, job)
    for group, scores_G, advantages_G in zip(
        batch.groups, batch.scores, advantages_PG, strict=True
    ):
        signal = has_signal(scores_G, job, group)
        for index, rollout in enumerate(group.rollouts):
            if is_masked(rollout, job):
                advantages_G[index] = None
            elif rollout.advantages:
                advantages_G[index] = _mean_given(rollout)
            elif not signal:
                has_more = job.training.beta or job.teacher
                advantages_G[index] = _zero(advantages_G[index]) if has_more else None
    return advantages_PG


def _zero(advantage: Advantage) -> Advantage:
    if isinstance(advantage, tuple):
        return tuple(None if one is None else 0.0 for one in advantage)
    return None if advantage is None else 0.0


def _mean_given(rollout: Rollout) -> float:
    """Returns the mean of the given advantages over the sampled tokens."""
    sampled = rollout.sampled or [1] * len(rollout.token_ids)
    return statistics.fmean(itertools.compress(rollout.advantages, sampled))


def is_masked(rollout: Rollout, job: Job) -> bool:
    """Returns whether a cut-off completion is left out of training."""
    return job.advantages.mask_truncated and rollout.finish_reason == "length"


def has_signal(scores_G: Sequence[Score], job: Job, group: RolloutGroup | None = None) -> bool:
    """Returns whether a group teaches anything: two or more of its rollouts have rewards, and these
    differ. With its rollouts (`group`) and credit by turns: the returns of some turn differ.

    Differences in `shaping` rewards alone do not count: that some wrong answers are shorter is no
    reason to train on a problem that all got wrong. If all rewards are shaping, all count.
    """
    if group is not None and job.advantages.credit != "episode":
        scored = list(zip(group.rollouts, scores_G, strict=True))
        of_all = [returns_of(rollout, score, job) for rollout, score in scored]
        of_outcomes = [_outcome_returns(rollout, score, job) for rollout, score in scored]
        return any(map(differ, by_number(of_all))) and any(map(differ, by_number(of_outcomes)))
    present = [score for score in scores_G if score.value is not None]
    if job.advantages.combine == "normalize_then_sum":
        return any(
            differ([_value(score, reward.label) for score in present])
            for reward in outcomes(job)
            if reward.weight
        )
    return differ([score.value for score in present]) and differ(
        [outcome(score, job) for score in present]
    )


def outcomes(job: Job) -> list[RewardSpec]:
    """Returns the rewards for how good an answer is: rewards that are not `shaping`, or all if all
    are."""
    return [reward for reward in job.rewards if not reward.shaping] or list(job.rewards)


def outcome(score: Score, job: Job) -> float | None:
    """Returns the score's value from outcome rewards only; None if it has no value, or no outcome
    applies."""
    if score.value is None or not _applicable(score, job):
        return None
    judging = outcomes(job)
    shaping = [reward for reward in job.rewards if reward not in judging]
    return score.value - sum(
        reward.weight * (_value(score, reward.label) or 0.0) for reward in shaping
    )


def full_mark(score: Score, job: Job) -> float:
    """Returns the outcome that the completion would have if every grader that applies to it gave
    1."""
    return sum(reward.weight for reward in _applicable(score, job) if reward.weight > 0)


def reaches(reward: float, mark: float) -> bool:
    """Returns whether a reward is at least the mark, rounding apart."""
    return reward >= mark - TOLERANCE * max(1.0, abs(mark))


def _advantages(batch: Batch, job: Job) -> Advantages:
    """Returns the advantages as if every group had signal."""
    if job.advantages.credit != "episode":
        returns_PG = [
            [returns_of(*scored, job) for scored in zip(group.rollouts, scores_G, strict=True)]
            for group, scores_G in zip(batch.groups, batch.scores, strict=True)
        ]
        return [[*found_G] for found_G in turn_advantages(returns_PG, job.advantages)]
    if not job.rewards:  # the teacher alone
        return [
            [None if score.value is None else 0.0 for score in scores_G]
            for scores_G in batch.scores
        ]
    if job.advantages.combine == "normalize_then_sum":
        return _normalized_then_summed(batch.scores, job)
    values_PG = [[score.value for score in scores_G] for scores_G in batch.scores]
    return [[*advantages_G] for advantages_G in normalize(values_PG, job.advantages)]


def returns_of(rollout: Rollout, score: Score, job: Job) -> Returns:
    """Returns what each turn `[K]` of a rollout is credited with."""
    return returns(rollout, score, score.value, job.rewards, job.advantages.turn_discount)


def _outcome_returns(rollout: Rollout, score: Score, job: Job) -> Returns:
    total, discount = outcome(score, job), job.advantages.turn_discount
    return returns(rollout, score, total, outcomes(job), discount)


def _normalized_then_summed(scores_PG: Sequence[Sequence[Score]], job: Job) -> Advantages:
    """GDPO, arXiv 2601.05242: `S = sum_k w_k (r_k - baseline_k) / (std_k + eps)`, then `(S - mean
    S) / (std S + eps)` over the batch, which `std` "none" leaves out. An inapplicable reward adds
    nothing to a rollout's sum."""
    sums_PG: list[list[float | None]] = [
        [None if score.value is None else 0.0 for score in scores_G] for scores_G in scores_PG
    ]
    for reward in job.rewards:
        rewards_PG = [
            [None if score.value is None else _value(score, reward.label) for score in scores_G]
            for scores_G in scores_PG
        ]
        for sums_G, terms_G in zip(sums_PG, normalize(rewards_PG, job.advantages), strict=True):
            for index, (total, term) in enumerate(zip(sums_G, terms_G, strict=True)):
                if total is not None and term is not None:
                    sums_G[index] = total + reward.weight * term
    whole_PG = sums_PG if job.advantages.std == "none" else over_batch(sums_PG)
    return [[*sums_G] for sums_G in whole_PG]


def _applicable(score: Score, job: Job) -> list[RewardSpec]:
    """Returns the outcomes that apply to the completion."""
    skipped = {label for label, part in score.parts.items() if part.verdict == "skipped"}
    return [reward for reward in outcomes(job) if reward.label not in skipped]


def _value(score: Score, name: str) -> float | None:
    part = score.parts.get(name)
    return part.value if part else None
