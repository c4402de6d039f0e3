"""From rows with answers to lessons, and to what is trained on."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from services.orchestrator.grpo.advantages import batch_advantages
from services.orchestrator.grpo.examples import step_totals, to_examples
from services.orchestrator.grpo.groups import to_batch
from services.orchestrator.grpo.metrics import step_metrics
from services.orchestrator.grpo.pipeline import Pipeline, Step, syncs_after
from services.orchestrator.grpo.prompts import load_prompts, with_steps
from services.orchestrator.grpo.supervised import add_sft_advantages, sampling_prompts, sft_examples
from services.orchestrator.jobs.prompt_checks import check_rows
from services.orchestrator.samplers.clients import NOT_GRADED
from shared.errors import BadRequest
from shared.job import Job
from shared.job.file import parse_job
from shared.settings import Settings
from shared.wire import Prompt, Rollout, RolloutGroup, ScoredGroup, StepResult, TokenIds


def job(rows: list[dict[str, Any]] | None = None, **changes: Any) -> Job:
    return parse_job(
        {
            "name": "t",
            "model": "m/m",
            "steps": 9,
            "data": {"train": rows or [{"prompt": "1?", "answer": "one"}], "shuffle": False},
            "sampling": {"prompts_per_step": 2},
            "training": {"objective": "sft"},
            **changes,
        }
    )


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED = [said("user", "a")]
CHAT = [said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "d")]


def taught(job: Job) -> list[tuple[Any, ...]]:
    prompts = load_prompts(job, Settings())
    assert prompts.train is not None
    found = sft_examples(prompts.made_of(prompts.train), job, prompts.name)
    return [(lesson.prompt.content, *lesson.answers) for lesson in found]


def refused(asked: Job, row: int, message: str) -> None:
    with pytest.raises(BadRequest) as raised:
        check_rows(asked, load_prompts(asked, Settings()))
    assert raised.value.detail.startswith(f"row {row} of data.train in the job")
    assert message in raised.value.detail


def test_a_row_teaches_its_answer_column_or_what_the_template_makes() -> None:
    rows = [{"prompt": "1?", "answer": "one"}, {"prompt": "2?", "answer": "two"}]
    assert taught(job(rows)) == [("1?", "one"), ("2?", "two")]
    data = {"train": rows, "shuffle": False, "answer": "{{ answer | upper }}!"}
    assert taught(job(data=data)) == [("1?", "ONE!"), ("2?", "TWO!")]


def test_a_chat_teaches_each_answer_after_the_messages_before_it() -> None:
    asked = job([{"prompt": CHAT}])
    assert taught(asked) == [
        ((CHAT[0],), CHAT[1]),
        ((CHAT[0], CHAT[1], CHAT[2]), CHAT[3]),
    ]
    light = [*CHAT[:1], CHAT[1] | {"weight": 0}, *CHAT[2:]]
    assert taught(job([{"prompt": light}])) == [((light[0], light[1], light[2]), light[3])]
    whole = job([{"prompt": CHAT}], training={"objective": "sft", "train_on": "all"})
    assert taught(whole) == [((CHAT[0], CHAT[1], CHAT[2]), CHAT[3])]


def test_answers_are_normalized_as_prompts_are() -> None:
    parts = [{"type": "text", "text": "a"}]
    asked, good = {"role": "user", "content": parts, "weight": None}, said("assistant", "b")
    given = {"role": "assistant", "content": [{"type": "text", "text": "b"}], "weight": None}
    assert taught(job([{"prompt": [asked, given]}])) == [((ASKED[0],), good)]
    bad = said("assistant", "c")
    row = {"prompt": [asked], "chosen": [asked, given], "rejected": [asked, bad]}
    assert taught(job([row], training={"objective": "dpo"})) == [((ASKED[0],), good, bad)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1?"}, "has no answer to learn: column 'answer' is None; expected text"),
        ({"prompt": "1?", "answer": " "}, "has no answer to learn: column 'answer' is ' '"),
        ({"prompt": "1?", "answer": 1}, "has no answer to learn: column 'answer' is 1"),
        ({"prompt": [CHAT[1]]}, "its chat has no assistant's message to learn; expected one"),
        ({"prompt": [*ASKED, said("assistant", " ")]}, "expected content that is text"),
        (
            {"prompt": [*ASKED, said("assistant", "b") | {"weight": 0.5}]},
            "an assistant's message has weight 0.5; expected 0 or 1",
        ),
        ({"prompt": CHAT[:3]}, "has no answer to learn: column 'answer' is None"),
    ],
)
def test_a_row_without_an_answer_is_found_when_the_job_is_submitted(
    row: dict[str, Any], message: str
) -> None:
    refused(job([{"prompt": "0?", "answer": "zero"}] * 3 + [row]), 3, message)


DPO: dict[str, Any] = {"training": {"objective": "dpo"}}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "1?", "chosen": "b", "rejected": "c"}, ("1?", "b", "c")),
        ({"prompt": "1?", "chosen": [said("assistant", "b")], "rejected": "c"}, ("1?", "b", "c")),
        (
            {"prompt": ASKED, "chosen": [said("assistant", "b")], "rejected": "c"},
            (tuple(ASKED), said("assistant", "b"), "c"),
        ),
        (
            {
                "prompt": ASKED,
                "chosen": [*ASKED, said("assistant", "b")],
                "rejected": [*ASKED, said("assistant", "c")],
            },
            (tuple(ASKED), said("assistant", "b"), said("assistant", "c")),
        ),
    ],
)
def test_a_row_teaches_a_preference(row: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert taught(job([row], **DPO)) == [expected]


def test_openais_rows_of_preferences_are_read_as_they_are() -> None:
    row = {
        "input": {"messages": ASKED, "tools": []},
        "preferred_output": [said("assistant", "b")],
        "non_preferred_output": [said("assistant", "c")],
    }
    columns = {
        "prompt": "input",
        "chosen": "preferred_output",
        "rejected": "non_preferred_output",
    }
    assert taught(job(data={"train": [row], "columns": columns}, **DPO)) == [
        (tuple(ASKED), said("assistant", "b"), said("assistant", "c"))
    ]


def test_a_data_set_of_two_chats_and_no_prompt_teaches_preferences() -> None:
    """As trl-lib/ultrafeedback_binarized has it."""
    chats = {name: [*ASKED, said("assistant", name)] for name in ("chosen", "rejected")}
    data = {"train": [chats], "columns": {"prompt": "chosen"}, "system_prompt": "s"}
    system = said("system", "s")
    assert taught(job(data=data, **DPO)) == [
        ((system, *ASKED), said("assistant", "chosen"), said("assistant", "rejected"))
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1?", "rejected": "c"}, "column 'chosen': got None; expected an answer: text"),
        ({"prompt": "1?", "chosen": "b"}, "column 'rejected': got None; expected an answer: text"),
        (
            {"prompt": "1?", "chosen": "b", "rejected": ASKED},
            "column 'rejected': got [{'role': 'user', 'content': 'a'}]; expected an answer",
        ),
        ({"prompt": "1?", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are both 'b'"),
        ({"prompt": ASKED, "chosen": "a", "rejected": [said("assistant", "a")]}, "are both 'a'"),
        (
            {"prompt": ASKED, "chosen": [said("assistant", "")], "rejected": "b"},
            "column 'chosen': an assistant's message has content ''",
        ),
        (
            {"prompt": ASKED, "chosen": "b", "rejected": [CHAT[2], CHAT[3]]},
            "column 'rejected': its messages before the answer differ from the prompt's",
        ),
    ],
)
def test_a_row_without_a_preference_is_found_when_the_job_is_submitted(
    row: dict[str, Any], message: str
) -> None:
    refused(job([row], **DPO), 0, message)


def test_a_preference_is_a_chosen_and_a_rejected_example() -> None:
    asked = job(**DPO)
    two = group([1, 2], [4, 5])
    (first,) = two.rollouts
    second = first.model_copy(update={"token_ids": TokenIds([6])})
    made = batch(asked, two.model_copy(update={"rollouts": (first, second)}))
    examples = to_examples(made.groups, batch_advantages(made, asked))
    assert [(tuple(one.token_ids), one.advantage) for one in examples] == [((4, 5), 1), ((6,), -1)]
    totals = step_totals(made, asked)
    assert (totals.num_sequences, totals.num_tokens) == (2, 3)


def test_a_warm_up_needs_answers_too() -> None:
    asked = job(
        [{"prompt": "0?"}],
        training={},
        warmup={"steps": 1},
        rewards=[{"grader": "length"}],
    )
    refused(asked, 0, "has no answer to learn")


# --- what is trained on --------------------------------------------------------------------------


def group(prompt: list[int], answer: list[int]) -> RolloutGroup:
    rollout = Rollout(text="", token_ids=TokenIds(answer), finish_reason="stop")
    return RolloutGroup(prompt_token_ids=TokenIds(prompt), rollouts=(rollout,))


def failed() -> RolloutGroup:
    rollout = Rollout(text="", token_ids=TokenIds(), finish_reason="error", error="too long")
    return RolloutGroup(prompt_token_ids=TokenIds(), rollouts=(rollout,), overlong=True)


def batch(asked: Job, *groups: RolloutGroup):
    prompt = Prompt(index=0, content="1?", row={})
    scored = [
        ScoredGroup(
            prompt=prompt,
            group=add_sft_advantages(one, asked),
            scores=(NOT_GRADED,) * len(one.rollouts),
        )
        for one in groups
    ]
    return to_batch(1, scored, dated=False)


def test_the_answers_tokens_are_examples_with_an_advantage_of_1() -> None:
    asked = job()
    made = batch(asked, group([1, 2, 3], [4, 5]), failed(), group([1], [6]))
    examples = to_examples(made.groups, batch_advantages(made, asked))
    assert [
        (tuple(one.prompt_token_ids), tuple(one.token_ids), tuple(one.advantages))
        for one in examples
    ] == [((1, 2, 3), (4, 5), (1, 1)), ((1,), (6,), (1,))]
    assert all(not one.old_logprobs and not one.spans for one in examples)
    totals = step_totals(made, asked)
    assert (totals.num_sequences, totals.num_tokens) == (2, 3)


def test_train_on_all_learns_all_tokens_but_the_first() -> None:
    asked = job(training={"objective": "sft", "train_on": "all"})
    made = batch(asked, group([1, 2, 3], [4, 5]))
    (example,) = to_examples(made.groups, batch_advantages(made, asked))
    assert (tuple(example.prompt_token_ids), tuple(example.token_ids)) == ((1,), (2, 3, 4, 5))
    assert tuple(example.advantages) == (1, 1, 1, 1)


def test_a_supervised_steps_metrics_have_a_loss_and_no_reward() -> None:
    asked = job()
    made = batch(asked, group([1], [4, 5]), failed())
    result = StepResult(
        step=1,
        loss=0.7,
        grad_norm=1.0,
        learning_rate=1e-5,
        num_examples=1,
        num_tokens=2,
        train_s=0.1,
    )
    step = Step(made, result, None, seconds={}, replayed=False)
    metrics = step_metrics(step, asked)
    assert (metrics["supervised"], metrics["loss"], metrics["errored_rollouts"]) == (1.0, 0.7, 0.5)
    assert metrics["overlong_prompts"] == 0.5
    assert not {"reward", "frac_reward_zero_std", "missing_rewards"} & metrics.keys()


# --- which steps ---------------------------------------------------------------------------------


def warm(**changes: Any) -> Job:
    fixed = {"training": {}, "warmup": {"steps": 3}, "rewards": [{"grader": "length"}]}
    return job(**{**fixed, "max_staleness": 1, **changes})


def test_weights_reach_the_samplers_only_where_they_are_needed() -> None:
    assert [step for step in range(1, 10) if syncs_after(job(), step)] == [9]
    assert [step for step in range(1, 10) if syncs_after(warm(), step)] == [3, 4, 5, 6, 7, 8, 9]


def test_no_step_samples_before_the_warm_up_is_over() -> None:
    pipeline = Pipeline(warm(), Mock(), Mock(), Mock(), Mock())
    begins = [
        [step for step in range(1, 8) if pipeline._may_begin(step, current, served)]
        for current, served in [(1, 0), (3, 0), (4, 3), (5, 4)]
    ]
    assert begins == [[1], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]
    stale = Pipeline(warm(max_staleness=4), Mock(), Mock(), Mock(), Mock())
    assert [step for step in range(1, 8) if stale._may_begin(step, 1, 0)] == [1]


# --- jobs ----------------------------------------------------------------------------------------


def test_learning_rates_are_tens_of_those_of_rewards() -> None:
    assert job().learning_rate == pytest.approx(1e-5)
    assert job(lora={}).learning_rate == pytest.approx(1e-4)
    assert job(training={"objective": "sft", "learning_rate": 3e-6}).learning_rate == 3e-6
    assert job(**DPO).learning_rate == 1e-6
    assert warm().warmup_learning_rate == pytest.approx(1e-5)
    assert warm().learning_rate == 1e-6
    assert warm(lora={}).warmup_learning_rate == pytest.approx(1e-4)


def test_passes_that_are_all_warm_up_are_refused_when_the_rows_are_counted() -> None:
    """Two passes over 6 rows, two at a time, are 6 steps."""
    asked = warm(steps=0, data={"train": "x.jsonl", "epochs": 2}, warmup={"steps": 6})
    with pytest.raises(BadRequest, match=r"data\.epochs is 2: warmup\.steps is 6 and steps 6"):
        with_steps(asked, 6)
    assert with_steps(asked, 7).steps == 7


REWARDS = [{"grader": "length"}]
REWARDED: dict[str, Any] = {"training": {}, "rewards": REWARDS, "warmup": {"steps": 2}}
GAME: dict[str, Any] = {"file": "game.py", "name": "Game"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": REWARDS}, "there is a reward 'length', and no held-out problems"),
        (
            {"data": {"train": "x.jsonl", "eval": "y.jsonl"}, "stop": {"target": 0.5}},
            "stop.target is 0.5 and there are no [[rewards]]; expected [[rewards]] that grade",
        ),
        (
            {"data": {"eval": "y.jsonl"}, "steps": 0, "rewards": []},
            "'rewards': got []; expected at least 1 in the list",
        ),
        ({"warmup": {"steps": 2}}, 'training.objective is "sft" and warmup.steps is set'),
        (
            {"training": {"objective": "dpo", "minibatches": 2}},
            'training.objective is "dpo", training.epochs 1 and training.minibatches 2',
        ),
        (
            {"training": {"objective": "dpo", "train_on": "all"}},
            "training.train_on is set, and no step learns one answer",
        ),
        ({"difficulty": {"skip_right": 1}}, 'training.objective is "sft" and difficulty is set'),
        (
            {"training": {"objective": "sft", "beta": 0.1}},
            'training.objective is "sft" and training.beta is set',
        ),
        ({"environment": GAME}, 'training.objective is "sft" and the job has an [environment]'),
        (
            {"training": {}, "rewards": REWARDS, "data": {"train": "x", "answer": "{{ a }}"}},
            "data.answer is set, and no step learns one answer to each prompt; expected",
        ),
        (
            {"training": {"train_on": "all"}, "rewards": REWARDS},
            "training.train_on is set, and no step learns one answer",
        ),
        (
            REWARDED | {"warmup": {"steps": 9}},
            "warmup.steps is 9 and steps 9; expected fewer than steps",
        ),
        (
            {"training": {}, "warmup": {"steps": 2}, "environment": GAME},
            "warmup.steps is 2 and the job has an [environment]",
        ),
        ({"training": {"objective": "sft", "dpo_beta": 0.5}}, "training.dpo_beta is 0.5"),
        ({**REWARDED, "warmup": {"learning_rate": 0.5}}, "warmup.learning_rate is 0.5"),
    ],
)
def test_what_supervised_steps_have_no_use_for_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest) as raised:
        job(**changes)
    assert message in raised.value.detail


def sampled_after(job: Job) -> list[Any]:
    return [
        prompt.content for prompt in sampling_prompts(load_prompts(job, Settings()).first(), job)
    ]


def test_after_a_warm_up_no_completion_is_sampled_after_the_answer() -> None:
    assert sampled_after(job([{"prompt": CHAT}], **REWARDED))[0] == tuple(CHAT[:3])
    unlearned = {**REWARDED, "warmup": {}}
    assert sampled_after(job([{"prompt": CHAT}], **unlearned))[0] == tuple(CHAT)
    chosen = job([{"prompt": CHAT, "rejected": "c"}], **DPO)
    assert sampled_after(chosen)[0] == tuple(CHAT[:3])


def test_a_wrong_objective_is_the_only_fault_named() -> None:
    with pytest.raises(BadRequest, match="got 'SFT'") as raised:
        job(training={"objective": "SFT"})
    assert "rewards" not in raised.value.detail


def test_given_answers_need_no_bound_of_a_samplers_choice() -> None:
    assert not job(sampling={"prompts_per_step": 2, "top_p": 0.9}).needs_masks
