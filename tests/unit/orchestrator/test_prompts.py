"""Which problems a step takes, and what a wrong data set is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.loop.prompts import Prompts, load_prompts
from shared.errors import BadRequest
from shared.job import Job


def make_job(train: str = "x.jsonl", **changes: Any) -> Job:
    document: dict[str, Any] = {
        "name": "t",
        "model": "m/m",
        "steps": 5,
        "data": {"train": train, **changes.pop("data", {})},
        "rewards": [{"grader": "length"}],
        "sampling": {"prompts_per_step": 4},
    }
    return Job.model_validate(document | changes)


class Rows(list[dict[str, Any]]):
    @property
    def column_names(self) -> list[str]:
        return list(self[0])


def indices(prompts: Prompts, step: int) -> list[int]:
    return [prompt.index for prompt in prompts.for_step(step)]


def rows(count: int) -> Rows:
    return Rows({"prompt": f"p{i}", "answer": i} for i in range(count))


def test_a_step_takes_the_same_prompts_whoever_asks_and_whenever() -> None:
    first, second = (Prompts(make_job(), rows(50), None) for _ in range(2))
    second.for_step(3)
    assert [indices(first, step) for step in (1, 2, 9)] == [
        indices(second, step) for step in (1, 2, 9)
    ]
    assert indices(first, 1) != indices(Prompts(make_job(seed=1), rows(50), None), 1)


def test_a_pass_takes_every_row_once_and_the_next_one_in_another_order() -> None:
    prompts = Prompts(make_job(), rows(10), None)
    taken = [index for step in range(1, 6) for index in indices(prompts, step)]
    assert sorted(taken[:10]) == list(range(10)) and sorted(taken[10:]) == list(range(10))
    assert taken[:10] != taken[10:]


def test_fewer_rows_than_prompts_repeat() -> None:
    assert sorted(indices(Prompts(make_job(), rows(3), None), 1))[:3] != []
    assert len(indices(Prompts(make_job(), rows(3), None), 1)) == 4


def test_prompts_that_replace_others_are_fresh_ones_and_the_same_whoever_asks() -> None:
    prompts = Prompts(make_job(), rows(50), None)
    rounds = [[prompt.index for prompt in prompts.for_step(2, round)] for round in range(4)]
    assert [len(indices) for indices in rounds] == [4, 4, 4, 4]
    assert len({index for indices in rounds for index in indices}) == 16
    again = Prompts(make_job(), rows(50), None)
    assert [prompt.index for prompt in again.for_step(2, 3)] == rounds[3]
    assert [prompt.index for prompt in again.for_step(3, 3)] != rounds[3]


def test_a_small_data_set_runs_out_of_fresh_prompts() -> None:
    prompts = Prompts(make_job(), rows(6), None)
    rounds = [[prompt.index for prompt in prompts.for_step(1, round)] for round in range(3)]
    assert sorted(rounds[0] + rounds[1]) == list(range(6)) and rounds[2] == []


def test_held_out_prompts_are_always_the_same_first_ones() -> None:
    prompts = Prompts(make_job(evaluation={"num_prompts": 2}), rows(5), rows(9))
    assert [prompt.index for prompt in prompts.held_out()] == [0, 1]
    assert Prompts(make_job(), rows(5), None).held_out() == ()


def test_a_system_prompt_makes_chat_messages() -> None:
    job = make_job(data={"system_prompt": "Be brief."})
    (prompt, *_) = Prompts(job, rows(5), None).for_step(1)
    assert prompt.content == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"p{prompt.index}"},
    )


def test_chat_messages_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": "2+2?"}]
    (prompt, *_) = Prompts(make_job(), Rows([{"prompt": messages}] * 4), None).for_step(1)
    assert prompt.content == tuple(messages)


def test_a_prompt_that_is_no_text_names_row_and_value() -> None:
    with pytest.raises(BadRequest, match=r"row \d of dataset '.+', column 'prompt': got 7"):
        Prompts(make_job(), Rows([{"prompt": 7}] * 4), None).for_step(1)


@pytest.mark.parametrize(
    "message", [{"role": "user"}, {"role": "user", "content": None}, {"role": 3, "content": "2+2?"}]
)
def test_a_message_without_role_or_content_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="chat messages, each with a role and its content"):
        Prompts(make_job(), Rows([{"prompt": [message]}] * 4), None).for_step(1)


def test_an_assistants_tool_call_needs_no_content() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    (prompt, *_) = Prompts(make_job(), Rows([{"prompt": messages}] * 4), None).for_step(1)
    assert prompt.content == tuple(messages)


def test_files_are_read_and_columns_checked(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{i}?", "numbers": [i, 2]}) + "\n" for i in range(6))
    )
    prompts = load_prompts(make_job(str(path)))
    assert prompts.columns == ("prompt", "numbers")
    assert {tuple(prompt.row["numbers"]) for prompt in prompts.for_step(1)} <= {
        (i, 2) for i in range(6)
    }
    with pytest.raises(
        BadRequest,
        match=r"has no column 'question' \(data.prompt_column\); its columns are prompt, numbers",
    ):
        load_prompts(make_job(str(path), data={"prompt_column": "question"}))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("missing.jsonl", None, "no dataset file at"),
        ("empty.jsonl", "", "has no rows"),
        ("header.csv", "prompt,answer\n", "header.csv' has no rows"),
        ("empty.csv", "", "has no rows"),
        ("broken.jsonl", "{not json\n", "cannot be read"),
        ("data.txt", "hello", "is not a file ending in"),
    ],
)
def test_unusable_data_is_a_sentence(
    tmp_path: Path, name: str, content: str | None, sentence: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadRequest) as raised:
        load_prompts(make_job(str(path)))
    assert sentence in raised.value.detail and name in raised.value.detail
