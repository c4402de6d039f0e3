"""Computes advantages `[P][G]`, of rollouts and of their turns, from scores `[P][G]`. Pure.

    A = (r - baseline) / (std + 1e-6)

`AdvantageSpec` in shared/job/learning.py has the baselines and deviations with their sources. A
missing reward stays missing: baseline and deviation are over the other rewards, never over an
invented 0.

Credit by turns: turn k of a rollout's K turns has the return

    G_k = sum over j >= k of discount^(j - k) r_j

r_j is what turn j earned: `turn_rewards` of the rollout's `info`, times the weight of the grader
"environment". The last turn earned the rest of the rollout's reward. So the r_j add up to it, and
with a discount of 1 it is G_1.

A rollout with branches has the turns of all its rows, in the order of time (`TURN_TIMES` of its
`info`; without it one row after the other, its own last).

The advantage of turn k, and of each of its tokens, is `(G_k - baseline) / std`, by `[advantages]`.
Baseline and deviation are

    credit       over                                   source
    returns      the returns of all turns of the group  arXiv 2511.14846; the set: arXiv 2402.03300,
                                                        section 4.1.3
    turns        the returns of turn k in the group     arXiv 2505.11821

`baseline` "leave_one_out" is over the group's other rollouts, because the returns of one rollout
are made of the same rewards. `std` "batch" is over the returns of all turns of the batch.

A turn without reward (None) adds nothing, and is not a 0: if neither a turn nor any turn after it
has a reward, it has no return, counts in no baseline, and is not trained on. Under "turns", a turn
number that only one rollout reached has nothing to compare with: its advantage is 0.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from shared.errors import Failed
from shared.job import AdvantageSpec, Job, RewardSpec
from shared.wire import Batch, Branch, Rollout, RolloutGroup, Score

Advantage = float | tuple[float | None, ...] | None
"""A rollout's advantage: one number for all of its tokens, or with credit by turns one number per
turn. None: this rollout, or turn, gives no gradient and is not counted in the loss."""

Advantages = list[list[Advantage]]
"""`[P][G]`."""


def batch_advantages(batch: Batch, job: Job) -> Advantages:
    """Returns each rollout's advantage by the job's `[advantages]`.

    None: its reward is missing, its group has no signal, or it was cut off and `mask_truncated` is
    set. In the last two cases its reward still counts in baselines and deviations. With a KL term
    (`training.beta`) or a teacher, which give every token a gradient, a group without signal has
    advantages of 0. A rollout that came with advantages has their mean.
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
    """Returns the mean, over the sampled tokens, of the advantages that the rollout came with."""
    sampled = rollout.sampled or [1] * len(rollout.token_ids)
    return statistics.fmean(itertools.compress(rollout.advantages, sampled))


def is_masked(rollout: Rollout, job: Job) -> bool:
    """Returns whether a cut-off completion is left out of training."""
    return job.advantages.mask_truncated and rollout.finish_reason == "length"


def has_signal(scores_G: Sequence[Score], job: Job, group: RolloutGroup | None = None) -> bool:
    """Returns whether the rewards of a group give a gradient: two or more of its rollouts have
    rewards, and these differ. With its rollouts (`group`) and credit by turns: the returns of some
    turn differ.

    Differences in `shaping` rewards alone do not count: if all answers to a problem are wrong, some
    of them being shorter is no reason to train on it. If all rewards are shaping, all count.
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
    if not differ([score.value for score in present]):
        return False
    return not job.rewards or differ([outcome(score, job) for score in present])


def outcomes(job: Job) -> list[RewardSpec]:
    """Returns the job's outcome rewards: the rewards that are not `shaping`, or all if all are."""
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
    """Returns the outcome of a completion to which every grader that applies gives 1."""
    return sum(reward.weight for reward in _applicable(score, job) if reward.weight > 0)


def reaches(reward: float, mark: float) -> bool:
    """Returns whether a reward is at least the mark, up to rounding."""
    return reward >= mark - TOLERANCE * max(1.0, abs(mark))


def _advantages(batch: Batch, job: Job) -> Advantages:
    """Returns the advantages without regard to signal and masks."""
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
    """Returns the return of each turn `[K]` of a rollout."""
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


# --- rewards of a group compared ------------------------------------------------------------------

EPSILON = 1e-6
"""Added to every standard deviation in a denominator, as in verl. TRL's 1e-4 shrinks the advantages
where rewards differ by about as little; here differences below `TOLERANCE` count as none, and
larger ones in full. For rewards of 0 and 1 in a group of 8 the two choices differ by 0.03 %."""

TOLERANCE = 1e-6
"""Rewards that differ by less than this, relative to their size or to 1, are equal. Float32's
rounding is an eighth of it."""

Rewards = Sequence[Sequence[float | None]]
"""`[P][G]`; None: missing, or not applicable."""


def normalize(
    rewards_PG: Rewards, spec: AdvantageSpec, owners_PG: Sequence[Sequence[int]] | None = None
) -> list[list[float | None]]:
    """Returns `(r - baseline) / (std + 1e-6)` over each group; standard deviations are unbiased
    ones. Rewards with the same owner belong to the same rollout; None: each belongs to another one.

    A group with fewer than two rewards, or with rewards that are equal up to rounding, is all 0.
    """
    batch_deviation = deviation(values_of(rewards_PG)) if spec.std == "batch" else 0.0
    owners_PG = owners_PG or [range(len(rewards_G)) for rewards_G in rewards_PG]
    return [
        _normalize_group(rewards_G, spec, batch_deviation, owners_G)
        for rewards_G, owners_G in zip(rewards_PG, owners_PG, strict=True)
    ]


def _normalize_group(
    rewards_G: Sequence[float | None],
    spec: AdvantageSpec,
    batch_deviation: float,
    owners_G: Sequence[int],
) -> list[float | None]:
    present = values_of([rewards_G])
    of_owner: dict[int, list[float]] = {}
    for reward, owner in zip(rewards_G, owners_G, strict=True):
        if reward is not None:
            of_owner.setdefault(owner, []).append(reward)
    if not differ(present) or len(of_owner) < 2:
        return [None if reward is None else 0.0 for reward in rewards_G]
    mean, count = statistics.fmean(present), len(present)
    scale = {
        "group": statistics.stdev(present) + EPSILON,
        "batch": batch_deviation + EPSILON,
        "none": 1.0,
    }[spec.std]

    def baseline(owner: int) -> float:
        if spec.baseline == "mean":
            return mean
        own = of_owner[owner]
        return (mean * count - math.fsum(own)) / (count - len(own))

    return [
        None if reward is None else (reward - baseline(owner)) / scale
        for reward, owner in zip(rewards_G, owners_G, strict=True)
    ]


def over_batch(sums_PG: list[list[float | None]]) -> list[list[float | None]]:
    """Returns `(S - mean) / (std + 1e-6)` over all groups together."""
    present = values_of(sums_PG)
    if not present:
        return sums_PG
    mean, spread = statistics.fmean(present), deviation(present)
    return [
        [None if total is None else (total - mean) / (spread + EPSILON) for total in sums_G]
        for sums_G in sums_PG
    ]


def values_of(rewards_PG: Rewards) -> list[float]:
    """Returns the rewards that are not missing."""
    return [reward for rewards_G in rewards_PG for reward in rewards_G if reward is not None]


def deviation(values: Sequence[float]) -> float:
    """Returns the unbiased standard deviation; 0 of fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def differ(rewards: Sequence[float | None]) -> bool:
    """Returns whether there are two rewards that differ by more than rounding."""
    present = values_of([rewards])
    if len(present) < 2:
        return False
    low, high = min(present), max(present)
    return high - low > TOLERANCE * max(1.0, abs(low), abs(high))


# --- turns ----------------------------------------------------------------------------------------

Returns = list[float | None]
"""The returns `[K]` of a rollout's turns, in the order of time; None: neither this turn nor a later
one has a reward."""

TURN_TIMES = "turn_times"
"""The key in a rollout's `info` of a number for each answer, row by row, that grows with time."""

V = TypeVar("V")


Row = Rollout | Branch
"""A rollout's own row, or one of its branches."""


def rows(rollout: Rollout) -> list[Row]:
    """Returns the rollout's rows: its branches, then its own row."""
    return [*rollout.branches, rollout]


def num_answers(row: Row) -> int:
    """Returns how many answers the row has."""
    return len(row.turns) or 1


def num_turns(rollout: Rollout) -> int:
    """Returns how many answers all rows of the rollout have together."""
    return sum(map(num_answers, rows(rollout)))


def of_rows(rollout: Rollout, values_K: Iterable[V]) -> list[list[V]]:
    """Returns the values `[K]` of the turns, which are in the order of time, grouped by row."""
    of_place = dict(zip(_by_time(rollout), values_K, strict=True))
    places = itertools.count()
    return [
        [of_place[place] for place in itertools.islice(places, num_answers(row))]
        for row in rows(rollout)
    ]


def returns(
    rollout: Rollout,
    score: Score,
    total: float | None,
    rewards: Sequence[RewardSpec],
    discount: float,
) -> Returns:
    """Returns the returns G `[K]` of the rollout. `total` is its reward by `rewards`, all or a part
    of the job's; without it there is no return. Raises Failed for more turn rewards than turns."""
    num = num_turns(rollout)
    if total is None:
        return [None] * num
    earned_K = _earned(rollout, rewards, num)
    turn_rewards = [earned for earned in earned_K if earned is not None]
    if not turn_rewards or differ([total, math.fsum(turn_rewards)]) or _has_others(score, rewards):
        earned_K[-1] = total - math.fsum(turn_rewards) + (earned_K[-1] or 0.0)
    reversed_returns: Returns = []
    following: float | None = None
    for earned in reversed(earned_K):
        later = discount * following if following is not None and discount else None
        terms = [term for term in (earned, later) if term is not None]
        following = math.fsum(terms) if terms else None
        reversed_returns.append(following)
    return reversed_returns[::-1]


def lengths(row: Row) -> list[int]:
    """Returns how many tokens the row has before its first answer, and from the beginning of each
    answer to the next one's: `[1 + K]`."""
    starts = list(row.turns) or [0]
    ends = [*starts, len(row.token_ids)]
    return [end - start for start, end in zip([0, *starts], ends, strict=True)]


def by_number(returns_G: Sequence[Returns]) -> list[Returns]:
    """Returns for each turn number the returns of the rollouts that reached it."""
    most = max(map(len, returns_G), default=0)
    return [[returns_K[k] for returns_K in returns_G if k < len(returns_K)] for k in range(most)]


def turn_advantages(
    returns_PG: Sequence[Sequence[Returns]], spec: AdvantageSpec
) -> list[list[tuple[float | None, ...] | None]]:
    """Returns the advantages `[K]` of each rollout's turns; None: no turn has a return."""
    sets = [
        places
        for p, returns_G in enumerate(returns_PG)
        for places in _compared(p, returns_G, spec.credit)
    ]
    normalized = normalize(
        [[returns_PG[p][g][k] for p, g, k in places] for places in sets],
        spec,
        [[g for _, g, _ in places] for places in sets],
    )
    advantage_of = {
        place: advantage
        for places, advantages in zip(sets, normalized, strict=True)
        for place, advantage in zip(places, advantages, strict=True)
    }
    return [
        [
            tuple(advantage_of[p, g, k] for k in range(len(of_turns)))
            if any(one is not None for one in of_turns)
            else None
            for g, of_turns in enumerate(returns_G)
        ]
        for p, returns_G in enumerate(returns_PG)
    ]


def _compared(
    p: int, returns_G: Sequence[Returns], credit: str
) -> list[list[tuple[int, int, int]]]:
    """Returns the sets of a group's turns, (prompt, rollout, turn), that are compared."""
    turns = [(p, g, k) for g, returns_K in enumerate(returns_G) for k in range(len(returns_K))]
    if credit == "returns":
        return [turns]
    most = max(map(len, returns_G), default=0)
    return [[place for place in turns if place[2] == k] for k in range(most)]


def _by_time(rollout: Rollout) -> list[int]:
    """Returns the places of the answers, counted row by row, in the order of time."""
    places = range(num_turns(rollout))
    times: Sequence[Any] = rollout.info.get(TURN_TIMES) or places
    return sorted(places, key=times.__getitem__)


def _earned(rollout: Rollout, rewards: Sequence[RewardSpec], num: int) -> Returns:
    """Returns the environment's rewards r `[K]`; None where a turn has no reward."""
    turn_rewards: Sequence[Any] = rollout.info.get("turn_rewards") or ()
    if len(turn_rewards) > num:
        raise Failed(
            f"a rollout has {len(turn_rewards)} turn_rewards and {num} answers; expected at most "
            "one for each answer"
        )
    weights = [reward.weight for reward in rewards if reward.grader == "environment"]
    if not any(weights):
        return [None] * num
    weight = math.fsum(weights)
    earned: Returns = [
        None if reward is None else weight * float(reward) for reward in turn_rewards
    ]
    earned += [None] * (num - len(turn_rewards))
    return [earned[place] for place in _by_time(rollout)]


def _has_others(score: Score, rewards: Sequence[RewardSpec]) -> bool:
    """Returns whether the rollout has rewards, with a weight, that are not the environment's."""
    others = [r.label for r in rewards if r.grader != "environment" and r.weight]
    return any(score.parts[label].value is not None for label in others if label in score.parts)
