"""Credit by turns against numbers worked out by hand: returns, advantages, and the tokens that get
them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from services.orchestrator.extensions.environments.recording import branch, row_of
from services.orchestrator.grpo.advantages import batch_advantages, has_signal, returns_of
from services.orchestrator.grpo.examples import (
    placed_examples,
    step_totals,
    to_examples,
    trained_tokens,
)
from services.orchestrator.grpo.groups import teaches
from services.orchestrator.grpo.metrics import reward_metrics
from services.orchestrator.jobs.rollouts import graded
from services.reward.graders.own_code import environment_part
from shared.errors import Failed
from shared.http import codec
from shared.job import Job
from shared.wire import (
    Batch,
    Logprobs,
    Part,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    ScoredGroup,
    Span,
    StepResult,
    TokenIds,
)

ENVIRONMENT = {"source": "class Game: ...", "name": "Game"}


def job_of(*rewards: dict[str, Any], training: Any = None, **advantages: Any) -> Job:
    document: dict[str, Any] = {
        "name": "t",
        "model": "m/m",
        "steps": 1,
        "data": {"train": "x"},
        "environment": ENVIRONMENT,
        "rewards": rewards or ({"grader": "environment"},),
        "advantages": {"credit": "returns", "std": "none", **advantages},
        "training": training or {},
    }
    return Job.model_validate(document)


def rollout_of(ids: list[int]) -> Rollout:
    return Rollout(
        text="x",
        token_ids=TokenIds(ids),
        logprobs=Logprobs([-0.5] * len(ids)),
        finish_reason="stop",
        spans=(Span(version=0, start=0),),
    )


def rollout(turn_rewards: list[float | None] | None, reward: float | None = None) -> Rollout:
    """Answers of two tokens, 7 and 8, and between them a tool's 9."""
    numbers = range(len(turn_rewards or [None]))
    row = row_of(([9] * bool(number), rollout_of([7, 8])) for number in numbers)
    info = {"turn_rewards": turn_rewards} if turn_rewards else {}
    earned = [one for one in turn_rewards or () if one is not None]
    info["reward"] = reward if reward is not None else sum(earned)
    return row.model_copy(update={"info": info})


def scored(found: Rollout, job: Job, **others: float) -> Score:
    """The score that the graders give: the environment's, and these values of others."""
    part = environment_part(found.info)
    parts = {"environment": part, **{name: Part(value=value) for name, value in others.items()}}
    present = [
        reward.weight * (parts[reward.label].value or 0.0)
        for reward in job.rewards
        if parts[reward.label].verdict != "skipped"
    ]
    return Score(value=sum(present) if present else None, parts=parts)


def batch_of(job: Job, *groups: list[Rollout]) -> Batch:
    return Batch(
        step=1,
        version=0,
        prompts=tuple(Prompt(index=index, content="p", row={}) for index in range(len(groups))),
        groups=tuple(
            RolloutGroup(prompt_token_ids=(1,), rollouts=tuple(rollouts)) for rollouts in groups
        ),
        scores=tuple(tuple(scored(one, job) for one in rollouts) for rollouts in groups),
    )


@pytest.mark.parametrize(
    ("turn_rewards", "reward", "discount", "expected"),
    [
        # the last turn earned 2 and the rest of the episode's 7: 6; before it 6/2; first 1 + 3/2
        ([1.0, None, 2.0], 7.0, 0.5, [2.5, 3.0, 6.0]),
        ([1.0, None, 2.0], 7.0, 1.0, [7.0, 6.0, 6.0]),
        # nothing from the last turn on earned anything, so it has no return, and not 0
        ([1.0, 3.0, None], None, 0.5, [2.5, 3.0, None]),
        ([1.0, None, 0.0], None, 0.0, [1.0, None, 0.0]),
        ([None, None], 0.5, 0.5, [0.25, 0.5]),
        (None, 0.5, 0.5, [0.5]),
    ],
)
def test_returns_by_hand(
    turn_rewards: Any, reward: float | None, discount: float, expected: list[float | None]
) -> None:
    job, found = job_of(turn_discount=discount), rollout(turn_rewards, reward)
    assert returns_of(found, scored(found, job), job) == expected


def test_graders_rewards_are_the_last_turns_and_the_first_return_is_the_reward() -> None:
    rewards = {"grader": "environment", "weight": 0.5}, {"grader": "right", "weight": 2.0}
    job, found = job_of(*rewards), rollout([1.0, 2.0, None])
    score = scored(found, job, right=0.25)
    assert score.value == 2.0  # 0.5 * 3 + 2 * 0.25
    assert returns_of(found, score, job) == [2.0, 1.5, 0.5]
    without = job_of({"grader": "right"})  # that takes nothing of what the environment gives
    assert returns_of(found, scored(found, without, right=0.25), without) == [0.25] * 3


def test_a_missing_reward_leaves_no_turn_a_return() -> None:
    job, found = job_of(), rollout([1.0, 2.0])
    assert returns_of(found, Score(value=None, parts={}), job) == [None, None]


def test_a_reward_of_weight_0_gives_no_turn_a_return() -> None:
    job, found = job_of({"grader": "environment"}, {"grader": "seen", "weight": 0.0}), [1.0, None]
    assert returns_of(rollout(found), scored(rollout(found), job, seen=1.0), job) == [1.0, None]
    unweighed = job_of({"grader": "environment", "weight": 0.0}, {"grader": "right"})
    score = scored(rollout([1.0, 2.0, None]), unweighed, right=0.25)
    none = unweighed.model_copy(
        update={"advantages": unweighed.advantages.model_copy(update={"turn_discount": 0.0})}
    )
    assert returns_of(rollout([1.0, 2.0, None]), score, none) == [None, None, 0.25]


def forked(turn_rewards: list[float | None]) -> Rollout:
    """Says 1 2; continues with 3, and then, from 1 2 again, with 4 5 6. Rewards are row by row."""
    own = row_of([((), rollout_of([1, 2])), ([9], rollout_of([4, 5, 6]))])
    other = row_of([((), rollout_of([3]))])
    info: dict[str, Any] = {"turn_rewards": turn_rewards, "turn_times": [5, 2, 7]}
    info["reward"] = sum(one for one in turn_rewards if one is not None)
    return own.model_copy(
        update={"branches": (branch(TokenIds([1, 1, 2, 9]), other, "edited"),), "info": info}
    )


def test_an_answer_before_a_fork_is_credited_with_what_both_rows_earn_later() -> None:
    # In time: 1 2 earned 0.5, 3 earned 1, 4 5 6 earned 0. The branch's answer stands first.
    job, found = job_of(credit="turns", turn_discount=0.5), forked([1.0, 0.5, 0.0])
    assert returns_of(found, scored(found, job), job) == [1.0, 1.0, 0.0]
    batch = batch_of(job, [found, rollout([0.0, 0.0, 2.0])])  # [0.5, 1, 2]
    assert batch_advantages(batch, job) == [[(0.25, 0.0, -1.0), (-0.25, 0.0, 1.0)]]
    of_branch, own, _ = to_examples(batch.groups, batch_advantages(batch, job))
    assert of_branch.token_ids == [3] and of_branch.advantages == [0.0]
    assert own.token_ids == [1, 2, 9, 4, 5, 6] and own.sampled == [1, 1, 0, 1, 1, 1]
    assert own.advantages == [0.25, 0.25, 0.25, -1.0, -1.0, -1.0]
    totals = step_totals(batch, job)
    assert (totals.num_sequences, totals.num_tokens) == (3, 12)


def test_what_the_trainer_says_of_tokens_stands_at_the_row_of_their_rollout() -> None:
    """The branch's one token comes first, and is not shown."""
    job = job_of(credit="turns", turn_discount=0.5)
    batch = batch_of(job, [forked([1.0, 0.5, 0.0]), rollout([0.0, 0.0, 2.0])])
    placed = placed_examples(batch.groups, batch_advantages(batch, job))
    assert [place for place, _ in placed] == [None, (0, 0), (0, 1)]
    numbers = [float(number) for number in range(12)]
    result = StepResult(
        step=1,
        loss=0.0,
        grad_norm=0.0,
        learning_rate=0.0,
        num_examples=3,
        num_tokens=12,
        train_s=0.0,
        logprobs=Logprobs([-number for number in numbers]),
        entropies=Logprobs(numbers),
    )
    told = trained_tokens(batch, placed, result)
    own = told.logprobs[0][0]
    assert own[:2] == (-1.0, -2.0) and math.isnan(own[2]) and own[3:] == (-3.0, -4.0, -5.0)
    second = [each for each in told.entropies[0][1] if not math.isnan(each)]
    assert second == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]


def test_a_row_of_turns_without_returns_is_no_sequence_of_the_loss() -> None:
    job = job_of(credit="turns", turn_discount=0.0)
    batch = batch_of(job, [forked([None, 1.0, 1.0]), rollout([2.0])])
    assert len(to_examples(batch.groups, batch_advantages(batch, job))) == 2
    totals = step_totals(batch, job)
    assert (totals.num_sequences, totals.num_tokens) == (2, 7)
    by_episode = job_of(credit="episode")
    assert step_totals(batch, by_episode).num_sequences == 3


def test_more_turn_rewards_than_answers_are_refused_with_both_numbers() -> None:
    job, found = job_of(), rollout([1.0])
    more = found.model_copy(update={"info": {"turn_rewards": [1.0, 2.0], "reward": 3.0}})
    with pytest.raises(Failed, match="has 2 turn_rewards and 1 answers; expected at most one"):
        returns_of(more, scored(more, job), job)


# Returns at a discount of 1: [3, 2], [1, 0], [2].
GROUP = [rollout([1.0, 2.0]), rollout([1.0, 0.0]), rollout([2.0])]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        # all five: mean 8/5
        ({"credit": "returns"}, [(1.4, 0.4), (-0.6, -1.6), (0.4,)]),
        # of the other rollouts: (1 + 0 + 2) / 3 = 1, (3 + 2 + 2) / 3 = 7/3, (3 + 2 + 1 + 0) / 4
        (
            {"credit": "returns", "baseline": "leave_one_out"},
            [(2.0, 1.0), (-4 / 3, -7 / 3), (0.5,)],
        ),
        # turn 1: mean 2; turn 2: mean 1
        ({"credit": "turns"}, [(1.0, 1.0), (-1.0, -1.0), (0.0,)]),
        ({"credit": "turns", "baseline": "leave_one_out"}, [(1.5, 2.0), (-1.5, -2.0), (0.0,)]),
        # turn 1: deviation 1; turn 2: sqrt 2
        ({"credit": "turns", "std": "group"}, [(1.0, 0.7071068), (-1.0, -0.7071068), (0.0,)]),
        # of all five: variance (1.96 + 0.16 + 0.36 + 2.56 + 0.16) / 4 = 1.3
        (
            {"credit": "turns", "std": "batch"},
            [(0.8770580, 0.8770580), (-0.8770580, -0.8770580), (0.0,)],
        ),
        ({"credit": "episode"}, [1.0, -1.0, 0.0]),
    ],
)
def test_advantages_of_turns_by_hand(how: dict[str, Any], expected: list[Any]) -> None:
    job = job_of(**how)
    (found,) = batch_advantages(batch_of(job, GROUP), job)
    assert found == [pytest.approx(one, abs=2e-6) for one in expected]


def test_a_turn_that_one_rollout_alone_reached_has_nothing_to_compare_with() -> None:
    job = job_of(credit="turns")
    longer = [rollout([1.0, 5.0]), rollout([3.0]), rollout([2.0])]
    (found,) = batch_advantages(batch_of(job, longer), job)  # 6, 3 and 2
    assert found == [pytest.approx(one) for one in [(7 / 3, 0.0), (-2 / 3,), (-5 / 3,)]]
    missing = [rollout([1.0, 5.0]), rollout([3.0, None]), rollout([None, 9.0])]
    job = job_of(credit="turns", turn_discount=0.0)
    assert batch_advantages(batch_of(job, missing), job) == [[(-1.0, -2.0), (1.0, None), (None, 2)]]


@pytest.mark.parametrize("credit", ["returns", "turns"])
def test_rollouts_alike_turn_by_turn_teach_nothing(credit: str) -> None:
    # Their own returns, 2 and 1, differ, and say nothing about what was done better.
    job = job_of(credit=credit)
    alike = batch_of(job, [rollout([1.0, 1.0]), rollout([1.0, 1.0])])
    assert batch_advantages(alike, job) == [[None, None]]
    graded_group = ScoredGroup(
        prompt=alike.prompts[0], group=alike.groups[0], scores=alike.scores[0]
    )
    assert not teaches(graded_group, job)
    with_kl = job_of(credit=credit, training={"beta": 0.1})
    assert batch_advantages(alike, with_kl) == [[(0.0, 0.0), (0.0, 0.0)]]
    metrics = reward_metrics(alike.scores, job, alike.groups)
    assert metrics["frac_reward_zero_std"] == 1.0 and metrics["reward"] == 2.0


def test_equal_episodes_with_other_turns_teach_by_turns_alone() -> None:
    early, late = rollout([1.0, 0.0]), rollout([0.0, 1.0])
    by_turn, by_episode = job_of(credit="turns", turn_discount=0.5), job_of(credit="episode")
    batch = batch_of(by_turn, [early, late])
    assert batch_advantages(batch, by_turn) == [[(0.25, -0.5), (-0.25, 0.5)]]
    assert batch_advantages(batch, by_episode) == [[None, None]]
    shaping = job_of({"grader": "environment", "shaping": True}, {"grader": "right"})
    assert not has_signal(
        [scored(one, shaping, right=1.0) for one in (early, late)], shaping, batch.groups[0]
    )


def test_every_token_of_an_answer_has_its_turns_advantage() -> None:
    job = job_of(credit="turns")
    group = [rollout([1.0, 2.0, None]), rollout([1.0, 0.0, None]), rollout([2.0])]
    batch = batch_of(job, group)
    first, second, third = to_examples(batch.groups, batch_advantages(batch, job))
    assert first.token_ids == [7, 8, 9, 7, 8, 9, 7, 8]
    assert first.advantages == [1, 1, 1, 1, 1, 1, 0, 0]
    assert first.sampled == [1, 1, 0, 1, 1, 0, 0, 0]  # nothing is known of the last answer
    assert second.advantages == [-1, -1, -1, -1, -1, -1, 0, 0] and second.advantage == -1
    assert third.advantages == [0, 0] and third.sampled == [1, 1]
    totals = step_totals(batch, job)
    assert (totals.num_sequences, totals.num_tokens) == (3, 10)
    assert [one.turn_advantages for one in graded(batch, job)] == [
        *((1.0, 1.0, None), (-1.0, -1.0, None), (0.0,))
    ]


def test_a_cut_off_conversation_counts_in_the_baseline_and_is_not_trained_on() -> None:
    job = job_of(credit="turns", mask_truncated=True)
    cut = GROUP[0].model_copy(update={"finish_reason": "length"})
    batch = batch_of(job, [cut, *GROUP[1:]])
    assert batch_advantages(batch, job) == [[None, (-1.0, -1.0), (0.0,)]]
    assert step_totals(batch, job).num_tokens == 6


def test_a_row_knows_where_answers_begin_and_old_rows_are_read() -> None:
    found = rollout([1.0, 2.0, 3.0])
    assert found.turns == [0, 3, 6]
    assert row_of([([5, 5], found)]).turns == [2, 5, 8]
    old = found.model_dump_json(exclude={"turns"}).encode()
    assert codec.decode_tolerantly(Rollout, old).turns == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"environment": None}, 'advantages.credit is "turns" and the job has no [environment]'),
        ({"advantages": {"credit": "turns", "combine": "normalize_then_sum"}}, "expected combine"),
        ({"rewards": [], "teacher": {"model": "t"}}, "there are no [[rewards]]"),
        (
            {"advantages": {"turn_discount": 0.9}},
            'turn_discount is 0.9 and advantages.credit "episode"',
        ),
        ({"training": {"loss": "gspo"}}, "whose ratio is of the sequence"),
        ({"training": {"importance": "sequence"}}, "whose ratio is of the sequence"),
    ],
)
def test_what_cannot_credit_turns_is_refused(changes: dict[str, Any], sentence: str) -> None:
    job = {**job_of(credit="turns").model_dump(), "rewards": [{"grader": "right"}]}
    with pytest.raises(ValidationError) as caught:
        Job.model_validate({**job, **changes})
    assert sentence in str(caught.value)
