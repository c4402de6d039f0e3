"""Which problems a step takes, and what a wrong data set is told."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from services.orchestrator.data.choosing import select_problems
from services.orchestrator.data.order import TableOrder
from services.orchestrator.data.tables import InlineTable
from services.orchestrator.grpo.pipeline import syncs_after
from services.orchestrator.grpo.prompts import HeldOut, Prompts, with_steps
from shared.errors import BadRequest
from shared.job import Job
from tests.support.job_records import job_with


def make_job(**changes: Any) -> Job:
    return job_with(**changes | {"data": {"train": "x.jsonl", **changes.get("data", {})}})


def made(
    job: Job, given: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]] = ()
) -> Prompts:
    """The prompts of rows in memory."""
    _, train = select_problems(InlineTable("train", tuple(given)), job.data, job.data.max_samples)
    sets: list[HeldOut] = []
    if held_out:
        table = InlineTable("held out", tuple(held_out))
        columns, problems = select_problems(table, job.data, job.evaluation.num_prompts)
        sets = [HeldOut("", job.data, table, columns.names, problems)]
    return Prompts(job, TableOrder(job, train), sets, name="dataset 'x.jsonl'", train=train)


def indices(prompts: Prompts, step: int) -> list[int]:
    return [prompt.index for prompt in prompts.for_step(step)]


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{i}", "answer": i} for i in range(count)]


def test_a_step_takes_the_same_prompts_for_any_caller_at_any_time() -> None:
    first, second = (made(make_job(), rows(50)) for _ in range(2))
    second.for_step(3)
    assert [indices(first, step) for step in (1, 2, 9)] == [
        indices(second, step) for step in (1, 2, 9)
    ]
    assert indices(first, 1) != indices(made(make_job(seed=1), rows(50)), 1)


def test_a_pass_takes_every_row_once_and_the_next_one_in_another_order() -> None:
    prompts = made(make_job(), rows(10))
    taken = [index for step in range(1, 6) for index in indices(prompts, step)]
    assert sorted(taken[:10]) == list(range(10)) and sorted(taken[10:]) == list(range(10))
    assert taken[:10] != taken[10:]
    assert len(indices(made(make_job(), rows(3)), 1)) == 4, "fewer rows than prompts repeat"


def test_prompts_that_replace_others_are_fresh_and_the_same_for_any_caller() -> None:
    prompts = made(make_job(), rows(50))
    rounds = [[prompt.index for prompt in prompts.for_step(2, round)] for round in range(4)]
    assert [len(indices) for indices in rounds] == [4, 4, 4, 4]
    assert len({index for indices in rounds for index in indices}) == 16
    again = made(make_job(), rows(50))
    assert [prompt.index for prompt in again.for_step(2, 3)] == rounds[3]
    assert [prompt.index for prompt in again.for_step(3, 3)] != rounds[3]


def test_a_small_data_set_runs_out_of_fresh_prompts() -> None:
    prompts = made(make_job(), rows(6))
    rounds = [[prompt.index for prompt in prompts.for_step(1, round)] for round in range(3)]
    assert sorted(rounds[0] + rounds[1]) == list(range(6)) and rounds[2] == []


def test_held_out_prompts_are_always_the_same_first_ones() -> None:
    prompts = made(make_job(evaluation={"num_prompts": 2}), rows(5), rows(9))
    assert [prompt.index for prompt in prompts.held_out()[""]] == [0, 1]
    assert made(make_job(), rows(5)).held_out() == {}


def test_a_system_prompt_makes_chat_messages() -> None:
    job = make_job(data={"system_prompt": "Be brief."})
    (prompt, *_) = made(job, rows(5)).for_step(1)
    assert prompt.content == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"p{prompt.index}"},
    )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    ],
    ids=["text", "a tool call, which needs no content"],
)
def test_chat_messages_stay_as_they_are(message: dict[str, Any]) -> None:
    messages = [message]
    (prompt, *_) = made(make_job(), ([{"prompt": messages}] * 4)).for_step(1)
    assert prompt.content == tuple(messages)


@pytest.mark.parametrize(
    "message", [{"role": "user"}, {"role": "user", "content": None}, {"role": 3, "content": "2+2?"}]
)
def test_a_message_without_role_or_content_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="chat messages, each with a role and its content"):
        made(make_job(), ([{"prompt": [message]}] * 4)).for_step(1)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
            "part 0 of the 'content' of message 0 is of type 'image_url'; expected",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "the 'arguments' of call 0 of message 0 are '{'; expected an object, or the JSON text",
        ),
    ],
)
def test_a_message_that_no_template_can_be_given_is_refused_with_its_row(
    message: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(BadRequest) as raised:
        made(make_job(), [{"prompt": [message]}] * 4).first()
    assert re.match(r"row \d of dataset 'x.jsonl', column 'prompt': ", raised.value.detail)
    assert sentence in raised.value.detail


def test_epochs_are_counted_as_they_were_written() -> None:
    """In floats 1.1 * 100 is more than 110."""
    job = make_job(data={"epochs": 1.1}, steps=0, sampling={"prompts_per_step": 10})
    prompts = made(job, rows(100))
    assert with_steps(job, prompts.num_train).steps == 11


def test_weights_serve_before_any_evaluation_of_them() -> None:
    sets = {"hard": {"source": "h"}}
    job = make_job(evaluation={"every": 2, "sets": sets}, sync_every=3, max_staleness=2)
    assert [step for step in range(1, 6) if syncs_after(job, step)] == [2, 3, 4, 5]
