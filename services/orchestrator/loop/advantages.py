"""From scores `[P][G]` to advantages `[P][G]`. Pure; `AdvantageSpec` in shared/job/learning.py has
the formulas and their sources.

A missing reward stays missing: baseline and deviation are over the other rewards, never over an
invented 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from shared.job import AdvantageSpec, Job, RewardSpec
from shared.wire import Batch, Rollout, Score

EPSILON = 1e-6
"""Added to every standard deviation in a denominator, as in verl. TRL's 1e-4 shrinks advantages of
rewards that differ about as little; here differences below `TOLERANCE` count as none, and all
others in full. For rewards of 0 and 1 in a group of 8 it changes 0.03 %."""

TOLERANCE = 1e-6
"""Rewards that differ by less than this, relative to their size or to 1, are equal. Float32's
rounding is an eighth of it."""

Advantages = list[list[float | None]]
"""`[P][G]`; None: no gradient comes from this rollout, and it is not counted in the loss."""

Rewards = Sequence[Sequence[float | None]]
"""`[P][G]`; None: missing, or not applicable."""


def batch_advantages(batch: Batch, job: Job) -> Advantages:
    """Returns each rollout's advantage by the job's `[advantages]`.

    None: its reward is missing, its group has no signal, or it was cut off and `mask_truncated` is
    set. In the last two cases its reward still counts in baselines and deviations. With a KL term
    (`training.beta`), which every token has, a group without signal has advantages of 0.
    """
    combine = (
        _normalized_then_summed
        if job.advantages.combine == "normalize_then_sum"
        else _summed_then_normalized
    )
    advantages_PG = combine(batch.scores, job)
    without_signal = 0.0 if job.training.beta else None
    for group, scores_G, advantages_G in zip(
        batch.groups, batch.scores, advantages_PG, strict=True
    ):
        signal = has_signal(scores_G, job)
        for index, rollout in enumerate(group.rollouts):
            if is_masked(rollout, job):
                advantages_G[index] = None
            elif not signal and advantages_G[index] is not None:
                advantages_G[index] = without_signal
    return advantages_PG


def is_masked(rollout: Rollout, job: Job) -> bool:
    """Returns whether a cut-off completion is left out of training."""
    return job.advantages.mask_truncated and rollout.finish_reason == "length"


def has_signal(scores_G: Sequence[Score], job: Job) -> bool:
    """Returns whether a group teaches anything: two or more of its rollouts have rewards, and these
    differ.

    Differences in `shaping` rewards alone do not count: that some wrong answers are shorter is no
    reason to train on a problem that all got wrong. If all rewards are shaping, all count.
    """
    present = [score for score in scores_G if score.value is not None]
    if job.advantages.combine == "normalize_then_sum":
        return any(
            _differ([_value(score, reward.label) for score in present])
            for reward in outcomes(job)
            if reward.weight
        )
    return _differ([score.value for score in present]) and _differ(
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


def _summed_then_normalized(scores_PG: Sequence[Sequence[Score]], job: Job) -> Advantages:
    return normalize(
        [[score.value for score in scores_G] for scores_G in scores_PG], job.advantages
    )


def _normalized_then_summed(scores_PG: Sequence[Sequence[Score]], job: Job) -> Advantages:
    """GDPO, arXiv 2601.05242: `S = sum_k w_k (r_k - baseline_k) / (std_k + eps)`, then `(S - mean
    S) / (std S + eps)` over the batch, which `std` "none" leaves out. An inapplicable reward adds
    nothing to a rollout's sum."""
    sums_PG: Advantages = [
        [None if score.value is None else 0.0 for score in scores_G] for scores_G in scores_PG
    ]
    for reward in job.rewards:
        rewards_PG = [
            [_value_if_scored(score, reward.label) for score in scores_G] for scores_G in scores_PG
        ]
        for sums_G, terms_G in zip(sums_PG, normalize(rewards_PG, job.advantages), strict=True):
            for index, (total, term) in enumerate(zip(sums_G, terms_G, strict=True)):
                if total is not None and term is not None:
                    sums_G[index] = total + reward.weight * term
    present = _present(sums_PG)
    if job.advantages.std == "none" or not present:
        return sums_PG
    mean, deviation = statistics.fmean(present), _deviation(present)
    return [
        [None if total is None else (total - mean) / (deviation + EPSILON) for total in sums_G]
        for sums_G in sums_PG
    ]


def normalize(rewards_PG: Rewards, spec: AdvantageSpec) -> Advantages:
    """Returns `(r - baseline) / (std + 1e-6)` over each group; standard deviations are unbiased
    ones.

    A group with fewer than two rewards, or with equal rewards, is all 0: it has no comparison, and
    rounding is no difference.
    """
    batch_deviation = _deviation(_present(rewards_PG)) if spec.std == "batch" else 0.0
    return [_normalize_group(rewards_G, spec, batch_deviation) for rewards_G in rewards_PG]


def _normalize_group(
    rewards_G: Sequence[float | None], spec: AdvantageSpec, batch_deviation: float
) -> list[float | None]:
    present = _present([rewards_G])
    if not _differ(present):
        return [None if reward is None else 0.0 for reward in rewards_G]
    mean, count = statistics.fmean(present), len(present)
    others = (
        count / (count - 1) if spec.baseline == "leave_one_out" else 1.0
    )  # r - mean of others = n / (n - 1) (r - mean)
    scale = {
        "group": statistics.stdev(present) + EPSILON,
        "batch": batch_deviation + EPSILON,
        "none": 1.0,
    }[spec.std]
    return [None if reward is None else others * (reward - mean) / scale for reward in rewards_G]


def _applicable(score: Score, job: Job) -> list[RewardSpec]:
    """Returns the outcomes that apply to the completion."""
    skipped = {label for label, part in score.parts.items() if part.verdict == "skipped"}
    return [reward for reward in outcomes(job) if reward.label not in skipped]


def _value(score: Score, name: str) -> float | None:
    part = score.parts.get(name)
    return part.value if part else None


def _value_if_scored(score: Score, name: str) -> float | None:
    return _value(score, name) if score.value is not None else None


def _present(rewards_PG: Rewards) -> list[float]:
    return [reward for rewards_G in rewards_PG for reward in rewards_G if reward is not None]


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _differ(rewards: Sequence[float | None]) -> bool:
    """Returns whether there are two rewards that differ by more than rounding."""
    present = _present([rewards])
    if len(present) < 2:
        return False
    low, high = min(present), max(present)
    return high - low > TOLERANCE * max(1.0, abs(low), abs(high))
