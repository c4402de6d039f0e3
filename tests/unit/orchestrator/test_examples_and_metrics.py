"""From scored rollouts to examples and metrics, by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from services.orchestrator.extensions.environments.recording import row_of
from services.orchestrator.grpo.examples import step_totals, to_examples
from services.orchestrator.grpo.metrics import reward_metrics, step_metrics
from services.orchestrator.grpo.pipeline import Step
from services.orchestrator.jobs.after_step import failing_rewards
from services.orchestrator.samplers.clients import NOT_GRADED, score_item
from shared.job import Job
from shared.wire import (
    Batch,
    Logprobs,
    Mask,
    Part,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    Span,
    StepResult,
    StepTotals,
)
from tests.support.scored_batches import make_job, make_rollout, score

JOB = make_job()


def rollout(length: int, reason: str = "stop") -> Rollout:
    return make_rollout(length, reason, versions=(3,))


GROUPS = (
    RolloutGroup(prompt_token_ids=(1, 2), rollouts=(rollout(2), rollout(4, "length"))),
    RolloutGroup(prompt_token_ids=(3,), rollouts=(rollout(3), rollout(3))),
)
SCORES = (
    (score(JOB, 1.0), score(JOB, 0.0)),
    (score(JOB, 1.0), score(JOB, None)),
)


def test_only_rollouts_with_signal_become_examples_and_tokens_stay_as_sampled() -> None:
    examples = to_examples(GROUPS, [[0.5, -0.5], [None, None]])
    assert [
        (example.prompt_token_ids, example.token_ids, example.advantage) for example in examples
    ] == [
        ((1, 2), (0, 1), 0.5),
        ((1, 2), (0, 1, 2, 3), -0.5),
    ]


def test_an_empty_completion_is_no_example() -> None:
    group = RolloutGroup(prompt_token_ids=(1,), rollouts=(rollout(0, "error"), rollout(1)))
    assert len(to_examples((group,), [[0.5, -0.5]])) == 1


def test_reward_metrics_leave_missing_rewards_out_and_count_them() -> None:
    metrics = reward_metrics(SCORES, JOB)
    assert metrics["reward"] == pytest.approx(2 / 3)
    assert metrics["missing_rewards"] == pytest.approx(1 / 4)
    assert metrics["frac_reward_zero_std"] == pytest.approx(1 / 2)
    assert metrics["reward_std"] == pytest.approx(
        (1 / 3) ** 0.5
    )  # of 1, 0 and 1, unbiased as TRL's
    assert metrics["group_reward_std"] == pytest.approx(0.5**0.5)
    assert metrics["rewards/right/mean"] == pytest.approx(2 / 3)
    assert metrics["rewards/right/std"] == pytest.approx((1 / 3) ** 0.5)


def test_nothing_graded_has_no_reward_rather_than_zero() -> None:
    metrics = reward_metrics(((score(JOB, None),),), JOB)
    assert "reward" not in metrics and metrics["missing_rewards"] == 1.0


def make_step(dropped: tuple[tuple[Score, ...], ...] = (), **changes: Any) -> Step:
    prompts = tuple(Prompt(index=index, content="p", row={}) for index in range(2))
    batch = Batch(step=5, version=3, prompts=prompts, groups=GROUPS, scores=SCORES, dropped=dropped)
    result = StepResult(
        step=5,
        loss=0.1,
        grad_norm=2.0,
        learning_rate=1e-6,
        num_examples=2,
        num_tokens=6,
        train_s=0.2,
        metrics={"entropy": 0.7},
    )
    return Step(
        batch,
        result.model_copy(update=changes),
        1,
        {"train": 0.2},
        replayed=False,
    )


def test_step_metrics_carry_lengths_staleness_and_time() -> None:
    metrics = step_metrics(make_step(), JOB)
    assert metrics["completions/mean_length"] == pytest.approx(12 / 4)
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 4)
    # The rollout of 4 tokens was cut off; the others, of 2, 3 and 3, ended by themselves.
    assert metrics["completions/mean_terminated_length"] == pytest.approx(8 / 3)
    lengths = ("min_length", "max_length", "min_terminated_length", "max_terminated_length")
    assert [metrics[f"completions/{name}"] for name in lengths] == [2, 4, 2, 3]
    assert (metrics["staleness"], metrics["entropy"], metrics["time/train"]) == (1, 0.7, 0.2)
    assert (metrics["skipped_steps"], metrics["dropped_groups"]) == (0, 0)


def test_dropped_groups_count_in_rewards_which_would_else_look_better() -> None:
    zero, missing = score(JOB, 0.0), score(JOB, None)
    metrics = step_metrics(make_step(dropped=((zero, zero), (zero, missing))), JOB)
    assert metrics["dropped_groups"] == 2
    assert metrics["reward"] == pytest.approx(2 / 6)
    assert metrics["missing_rewards"] == pytest.approx(2 / 8)
    assert metrics["frac_reward_zero_std"] == pytest.approx(3 / 4)


def test_a_rollout_that_came_with_advantages_and_no_reward_did_not_go_wrong() -> None:
    given = [rollout(2).model_copy(update={"advantages": Logprobs([a, a])}) for a in (1.0, -1.0)]
    group = RolloutGroup(prompt_token_ids=(1,), rollouts=tuple(given))
    scores = (NOT_GRADED, NOT_GRADED)
    assert reward_metrics((scores,), JOB, (group,))["errored_rollouts"] == 0
    dropped = reward_metrics((scores, scores), JOB, (group,))
    assert dropped["errored_rollouts"] == pytest.approx(1 / 2)


def test_rollouts_that_ended_in_an_error_are_counted_and_have_no_length() -> None:
    step = make_step()
    errored = rollout(0, "error")
    groups = (step.batch.groups[0], RolloutGroup(prompt_token_ids=(3,), rollouts=(errored,) * 2))
    scores = (step.batch.scores[0], (NOT_GRADED, NOT_GRADED))
    batch = step.batch.model_copy(update={"groups": groups, "scores": scores})
    metrics = step_metrics(dataclasses.replace(step, batch=batch), JOB)
    assert metrics["errored_rollouts"] == pytest.approx(2 / 4)
    assert metrics["missing_rewards"] == 0.0 and metrics["reward"] == pytest.approx(1 / 2)
    assert metrics["completions/mean_length"] == pytest.approx(6 / 2)


def test_lengths_are_of_what_the_policy_sampled_as_in_trl() -> None:
    # Two completions of four tokens, of which a tool said three of one.
    step = make_step()
    with_tool = rollout(4).model_copy(update={"sampled": Mask([1, 0, 0, 0])})
    group = RolloutGroup(prompt_token_ids=(3,), rollouts=(with_tool, rollout(4)))
    batch = step.batch.model_copy(update={"groups": (group,)})
    metrics = step_metrics(dataclasses.replace(step, batch=batch), JOB)
    assert metrics["completions/mean_length"] == pytest.approx(5 / 2)
    assert metrics["completions/max_length"] == 4


def test_a_conversation_is_graded_by_the_length_that_the_policy_sampled() -> None:
    with_tool = rollout(4).model_copy(update={"sampled": Mask([1, 0, 0, 1])})
    prompt = Prompt(index=0, content="p", row={"a": 1})
    assert score_item(prompt, with_tool).num_tokens == 2
    assert score_item(prompt, rollout(4)).num_tokens == 4


def test_a_conversation_is_graded_after_the_prompt_of_its_last_answer() -> None:
    ends = ("assistant\n", "assistant\n<think>\n")
    row = row_of(((1,), rollout(2).model_copy(update={"prompt_end": end})) for end in ends)
    prompt = Prompt(index=0, content="p", row={})
    found = score_item(prompt, row.model_copy(update={"text": "4?</think>5"}))
    assert found.prompt_end == "assistant\n<think>\n"
    assert score_item(prompt, rollout(2)).prompt_end is None


def test_a_reward_that_is_missing_is_told_beside_one_that_fails_on_some_texts() -> None:
    error = ("python_grader_runtime_error",)
    missing = Part(value=None, verdict="error", detail="1 value for 4", errors=error)
    least = Part(value=0.0, verdict="wrong", detail="log(0)", errors=error)
    skipped = Part(value=None, verdict="skipped")
    rows = ({"a": missing, "b": least}, {"a": missing, "b": Part(value=1.0)}, {"b": skipped})
    scores = tuple(Score(value=None, parts=parts) for parts in rows)
    batch = make_step().batch.model_copy(update={"scores": (scores,), "dropped": ()})
    assert failing_rewards(batch) == [
        "reward 'a' is missing for 2 of 3 completions (1 value for 4)",
        "reward 'b' fails on 1 of 3 completions, which get the least of their row (log(0))",
    ]


def test_a_step_whose_update_was_refused_is_counted() -> None:
    assert step_metrics(make_step(skipped=True), JOB)["skipped_steps"] == 1


def scored_batch() -> Batch:
    prompts = tuple(Prompt(index=index, content="p", row={}) for index in range(2))
    return Batch(step=1, version=0, prompts=prompts, groups=GROUPS, scores=SCORES)


def with_sections(**sections: Any) -> Job:
    return Job.model_validate(JOB.model_dump() | sections)


def test_totals_count_every_graded_rollout_of_the_batch_by_hand() -> None:
    # Rollouts of 2, 4, 3 and 3 tokens; the last has no reward, and the one of 4 was cut off.
    assert step_totals(scored_batch(), JOB) == StepTotals(num_sequences=3, num_tokens=9)
    masked = with_sections(advantages={"mask_truncated": True})
    assert step_totals(scored_batch(), masked) == StepTotals(num_sequences=3, num_tokens=5)


def test_totals_and_examples_count_and_carry_what_the_policy_sampled() -> None:
    said = {"sampled": (1, 0), "kept_ids": (0, 7, 1), "kept_counts": (2, 1)}
    turns = Rollout.model_validate(rollout(2).model_dump() | said)
    group = GROUPS[0].model_copy(update={"rollouts": (turns, rollout(4))})
    batch = scored_batch().model_copy(update={"groups": (group, GROUPS[1])})
    assert step_totals(batch, JOB).num_tokens == 1 + 4 + 3
    (example, _) = to_examples(batch.groups, [[0.5, -0.5], [None, None]])
    assert example.spans == (Span(version=3, start=0),)
    assert (example.sampled, example.kept_ids, example.kept_counts) == ([1, 0], [0, 7, 1], [2, 1])
