"""Groups without signal are replaced within bounds; batches without rewards are refused."""

from __future__ import annotations

import pytest

from services.orchestrator.errors import OperatorActionNeeded
from services.orchestrator.grpo.advantages import batch_advantages
from services.orchestrator.grpo.groups import (
    missing_share,
    refill,
    to_batch,
    too_many_missing,
)
from services.orchestrator.samplers.clients import NOT_GRADED
from shared.errors import Failed
from shared.job import Job
from shared.wire import Part, Prompt, Rollout, RolloutGroup, Score, ScoredGroup, TokenIds
from tests.support.scored_batches import make_job, make_rollout, score


def refilling(rounds: int) -> Job:
    job = make_job()
    return job.model_copy(update={"sampling": job.sampling.model_copy(update={"refills": rounds})})


def graded(name: int, *rewards: float | None, versions: tuple[int, ...] = (3,)) -> ScoredGroup:
    rollouts = (make_rollout(versions=versions),) * len(rewards)
    group = RolloutGroup(prompt_token_ids=(1,), rollouts=rollouts)
    return ScoredGroup(
        prompt=Prompt(index=name, content="p", row={}),
        group=group,
        scores=tuple(score(make_job(), reward) for reward in rewards),
    )


def cut_off(graded: ScoredGroup, count: int) -> ScoredGroup:
    """The group with its first `count` completions cut off by the limit of tokens."""
    rollouts = tuple(
        rollout.model_copy(update={"finish_reason": "length" if index < count else "stop"})
        for index, rollout in enumerate(graded.group.rollouts)
    )
    group = graded.group.model_copy(update={"rollouts": rollouts})
    return ScoredGroup(prompt=graded.prompt, group=group, scores=graded.scores)


class Fresh:
    """Gives the groups of each round in turn, and remembers what was asked."""

    def __init__(self, *rounds: list[ScoredGroup]) -> None:
        self._rounds = rounds
        self.asked: list[tuple[int, int]] = []

    async def __call__(self, round: int, count: int) -> list[ScoredGroup]:
        self.asked.append((round, count))
        return self._rounds[round - 1][:count]


def names(groups: list[ScoredGroup]) -> list[int]:
    return [group.prompt.index for group in groups]


async def test_each_round_replaces_only_what_is_still_without_signal() -> None:
    groups = [graded(0, 1.0, 1.0), graded(1, 0.0, 1.0), graded(2, 0.0, 0.0)]
    fresh = Fresh([graded(10, 0.0, 0.0), graded(11, 1.0, 0.0)], [graded(20, 0.5, 0.0)], [])
    kept, dropped = await refill(groups, refilling(3), fresh)
    assert fresh.asked == [(1, 2), (2, 1)], "and stops once all have signal"
    assert names(kept) == [20, 1, 11] and names(dropped) == [0, 2, 10]


async def test_rounds_are_bounded_and_what_has_no_signal_then_stays() -> None:
    flat = [graded(0, 1.0, 1.0), graded(1, 0.0, 0.0)]
    fresh = Fresh([graded(10, 1.0, 1.0), graded(11, 1.0, 1.0)])
    kept, dropped = await refill(flat, refilling(1), fresh)
    assert fresh.asked == [(1, 2)] and names(kept) == [10, 11] and names(dropped) == [0, 1]
    none = Fresh()
    assert (await refill(flat, refilling(0), none))[0] == flat and none.asked == []


async def test_a_group_that_was_all_cut_off_is_replaced_where_these_are_masked() -> None:
    job = refilling(1)
    masks = job.model_copy(
        update={"advantages": job.advantages.model_copy(update={"mask_truncated": True})}
    )
    cut, half = cut_off(graded(0, 0.0, 0.5), 2), cut_off(graded(1, 0.0, 0.5), 1)
    ungraded = cut_off(graded(2, 0.0, 0.5, None), 2)  # the third is not cut off, and not graded
    fresh = Fresh([graded(10, 0.0, 1.0), graded(11, 0.0, 1.0)])
    kept, dropped = await refill([cut, half, ungraded], masks, fresh)
    assert (names(kept), names(dropped), fresh.asked) == ([10, 1, 11], [0, 2], [(1, 2)])
    none = Fresh()
    assert (await refill([cut], job, none), none.asked) == (([cut], []), [])


async def test_a_data_set_that_runs_out_of_prompts_replaces_what_it_can() -> None:
    fresh = Fresh([graded(10, 0.0, 1.0)], [])
    flat = [graded(0, 1.0, 1.0), graded(1, 0.0, 0.0)]
    kept, dropped = await refill(flat, refilling(5), fresh)
    assert names(kept) == [10, 1] and names(dropped) == [0]
    assert fresh.asked == [(1, 2), (2, 1)]


async def test_nothing_is_replaced_for_rewards_that_are_missing() -> None:
    fresh = Fresh([graded(10, 0.0, 1.0)])
    groups = [graded(0, None, None), graded(1, None, 0.0)]
    assert (await refill(groups, refilling(3), fresh)) == (groups, []) and fresh.asked == []


def test_a_batch_carries_its_oldest_version_and_what_was_dropped() -> None:
    batch = to_batch(
        7,
        [graded(0, 1.0, versions=(4, 5)), graded(1, 0.0, versions=(5,))],
        [graded(2, 0.0)],
    )
    assert (batch.step, batch.version, [prompt.index for prompt in batch.prompts]) == (7, 4, [0, 1])
    assert batch.dropped == (graded(2, 0.0).scores,) and batch.graded
    with pytest.raises(Failed, match="step 7: no rollout says which weights sampled it"):
        to_batch(7, [graded(0, 1.0, versions=())])


def errored(name: int, count: int, why: str = "the prompt has 9000 tokens") -> ScoredGroup:
    rollout = Rollout(text="", token_ids=TokenIds(), finish_reason="error", error=why)
    group = RolloutGroup(prompt_token_ids=TokenIds(), rollouts=(rollout,) * count)
    return ScoredGroup(
        prompt=Prompt(index=name, content="p", row={}), group=group, scores=(NOT_GRADED,) * count
    )


def test_rollouts_that_ended_in_an_error_are_neither_missing_nor_trained_on() -> None:
    batch = to_batch(7, [graded(0, 1.0, 0.0), errored(1, 2)])
    assert batch.version == 3 and missing_share(batch.scores) == 0.0
    assert too_many_missing(batch) is None
    assert batch_advantages(batch, make_job())[1] == [None, None]
    assert missing_share([[NOT_GRADED]]) == 0.0


async def test_groups_of_errors_are_replaced_as_those_without_signal_are() -> None:
    fresh = Fresh([graded(10, 0.0, 1.0)])
    kept, dropped = await refill([graded(0, 0.0, 1.0), errored(1, 2)], refilling(1), fresh)
    assert names(kept) == [0, 10] and names(dropped) == [1]


def test_a_batch_of_nothing_but_errors_pauses_with_the_first_few() -> None:
    whys = ("too long", "the template broke", "too long", "no time", "not finite")
    groups = [errored(index, 1, why) for index, why in enumerate(whys)]
    with pytest.raises(OperatorActionNeeded) as raised:
        to_batch(7, groups)
    assert raised.value.detail == (
        "step 7: all 5 rollouts ended in an error; too long; the template broke; no time; "
        "look into the logs of the samplers, or correct the job's prompts or environment"
    )


def test_missing_rewards_are_told_with_their_share_and_the_first_reasons() -> None:
    def failed(detail: str) -> Score:
        return Score(value=None, parts={"judge": Part(value=None, verdict="error", detail=detail)})

    group = graded(0, 1.0, 1.0, 1.0, 1.0)
    scores = (score(make_job(), 1.0), failed("no key"), failed("no key"), failed("refused"))
    batch = to_batch(2, [ScoredGroup(prompt=group.prompt, group=group.group, scores=scores)])
    assert too_many_missing(batch) == (
        "step 2: 75% of the rewards are missing; expected at most 50%; judge: no key; judge: "
        "refused; look into the log of the reward service"
    )
    assert too_many_missing(to_batch(2, [graded(0, 1.0, None)])) is None


async def test_overlong_prompts_are_replaced_where_the_job_drops_them() -> None:
    job = make_job()
    sampling = job.sampling.model_copy(update={"overlong_prompts": "drop"})
    drops = job.model_copy(update={"sampling": sampling})
    flat, bad = graded(1, 1.0, 1.0), graded(2, None, None)
    overlong = ScoredGroup(
        prompt=bad.prompt,
        group=bad.group.model_copy(update={"overlong": True}),
        scores=(NOT_GRADED, NOT_GRADED),
    )
    fresh = Fresh([overlong], [graded(4, 0.0, 1.0)])
    kept, dropped = await refill([flat, overlong], drops, fresh)
    assert (names(kept), names(dropped), fresh.asked) == ([1, 4], [2, 2], [(1, 1), (2, 1)])
    endless = Fresh(*[[overlong]] * 20)
    assert len((await refill([overlong], drops, endless))[1]) == len(endless.asked) == 10
    kept, dropped = await refill([flat, overlong], job, Fresh())
    assert (names(kept), dropped) == ([1, 2], [])
