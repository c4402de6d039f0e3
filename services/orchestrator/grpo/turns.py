"""Credit by turns: what each answer of a conversation is credited with. Pure.

Turn k of a rollout's K turns has the return

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

A turn without reward (None) adds nothing, and is no 0: a turn that nothing from it on earned has no
return, counts in no baseline, and is not trained on. A turn number that one rollout alone reached
has nothing to compare with under "turns": its advantage is 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from services.orchestrator.grpo.normalizing import differ, normalize
from shared.errors import Failed
from shared.job import AdvantageSpec, RewardSpec
from shared.wire import Branch, Rollout, Score

Returns = list[float | None]
"""`[K]` of a rollout's turns, in the order of time; None: nothing from this turn on earned
anything."""

TURN_TIMES = "turn_times"
"""In a rollout's `info`: for each answer, row by row, a number that grows with time."""

V = TypeVar("V")


Row = Rollout | Branch
"""A rollout's own row, or another one of it."""


def rows(rollout: Rollout) -> list[Row]:
    """Returns the rollout's rows; its own is the last."""
    return [*rollout.branches, rollout]


def num_answers(row: Row) -> int:
    """Returns how many answers the row has."""
    return len(row.turns) or 1


def num_turns(rollout: Rollout) -> int:
    """Returns how many answers the rollout has, in all of its rows."""
    return sum(map(num_answers, rows(rollout)))


def of_rows(rollout: Rollout, values_K: Iterable[V]) -> list[list[V]]:
    """Returns the values of the turns, which are in the order of time, row by row."""
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
    """Returns G `[K]` of the rollout. `total` is what it has by `rewards`, a part of the job's or
    all. Without it the rollout has no return. Raises Failed for more turn rewards than turns."""
    num = num_turns(rollout)
    if total is None:
        return [None] * num
    earned_K = _earned(rollout, rewards, num)
    given = [earned for earned in earned_K if earned is not None]
    if not given or differ([total, math.fsum(given)]) or _has_others(score, rewards):
        earned_K[-1] = total - math.fsum(given) + (earned_K[-1] or 0.0)
    found: Returns = []
    following: float | None = None
    for earned in reversed(earned_K):
        later = discount * following if following is not None and discount else None
        terms = [term for term in (earned, later) if term is not None]
        following = math.fsum(terms) if terms else None
        found.append(following)
    return found[::-1]


def lengths(row: Row) -> list[int]:
    """Returns how many tokens the row has before its first answer, and from the beginning of each
    answer to the next one's: `[1 + K]`."""
    starts = list(row.turns) or [0]
    ends = [*starts, len(row.token_ids)]
    return [end - start for start, end in zip([0, *starts], ends, strict=True)]


def by_number(returns_G: Sequence[Returns]) -> list[Returns]:
    """Returns for each turn number the returns of the rollouts that reached it."""
    most = max(map(len, returns_G), default=0)
    return [[found[k] for found in returns_G if k < len(found)] for k in range(most)]


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
    found = {
        place: advantage
        for places, advantages in zip(sets, normalized, strict=True)
        for place, advantage in zip(places, advantages, strict=True)
    }
    return [
        [
            tuple(found[p, g, k] for k in range(len(of_turns)))
            if any(one is not None for one in of_turns)
            else None
            for g, of_turns in enumerate(returns_G)
        ]
        for p, returns_G in enumerate(returns_PG)
    ]


def _compared(
    p: int, returns_G: Sequence[Returns], credit: str
) -> list[list[tuple[int, int, int]]]:
    """Returns the sets of a group's turns that are compared with each other, as their places."""
    turns = [(p, g, k) for g, found in enumerate(returns_G) for k in range(len(found))]
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
    """Returns r `[K]` as far as the environment says; None where a turn has no reward."""
    given: Sequence[Any] = rollout.info.get("turn_rewards") or ()
    if len(given) > num:
        raise Failed(
            f"a rollout has {len(given)} turn_rewards and {num} answers; expected at most one "
            "for each answer"
        )
    weights = [reward.weight for reward in rewards if reward.grader == "environment"]
    if not any(weights):
        return [None] * num
    weight = math.fsum(weights)
    found: Returns = [None if reward is None else weight * float(reward) for reward in given]
    found += [None] * (num - len(given))
    return [found[place] for place in _by_time(rollout)]


def _has_others(score: Score, rewards: Sequence[RewardSpec]) -> bool:
    """Returns whether the rollout has rewards that are not the environment's and train."""
    others = [r.label for r in rewards if r.grader != "environment" and r.weight]
    return any(score.parts[label].value is not None for label in others if label in score.parts)
