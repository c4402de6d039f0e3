"""Which problems a step takes, and what a wrong data set is told: all rows of a job's data are
tried when it is submitted, not when their step comes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.data.choosing import select_problems
from services.orchestrator.data.order import TableOrder
from services.orchestrator.data.tables import InlineTable
from services.orchestrator.grpo.pipeline import syncs_after
from services.orchestrator.grpo.prompts import HeldOut, Prompts, load_prompts, with_steps
from services.orchestrator.jobs import prompt_checks
from services.orchestrator.jobs.prompt_checks import check_rows
from shared.errors import BadRequest
from shared.job import Job
from shared.settings import Settings
from tests.support.job_records import job_with
from tests.support.model_folders import make_model_folder


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


def job(train: str | list[dict[str, Any]], **data: Any) -> Job:
    return job_with(data={"train": train, "shuffle": False, **data})


def refused(job: Job) -> str:
    with pytest.raises(BadRequest) as raised:
        check_rows(job, load_prompts(job, Settings()))
    return raised.value.detail


def with_faults(value: Any, *places: int, count: int = 200) -> list[dict[str, Any]]:
    return [{"q": value if place in places else "1?"} for place in range(count)]


def test_a_row_beyond_the_first_step_is_found_with_how_many_there_are() -> None:
    data = with_faults("", 70, 90, 199)
    columns = {"columns": {"prompt": "q"}}
    assert refused(job(data, **columns)) == (
        "row 70 of data.train in the job: its prompt is empty; expected text; so have 2 more of "
        "its 200 rows a fault"
    )
    assert refused(job(with_faults(7, 150), **columns)) == (
        "row 150 of data.train in the job, column 'q': got 7; expected text or a list of chat "
        "messages, each with a role and its content"
    )


def test_a_template_that_fails_on_a_row_names_it() -> None:
    detail = refused(job(with_faults("1", 150, 151), template="{{ 1 // (q | int - 1) }}"))
    assert detail.startswith("data.template does not work on row 150 of data.train in the job: ")
    assert detail.endswith("; so have 1 more of its 200 rows a fault")


def test_a_value_that_cannot_be_sent_is_found_in_any_row() -> None:
    data = [{"prompt": "?", "answer": 2**70 if place == 100 else 1} for place in range(200)]
    assert refused(job(data)).startswith("row 100 of data.train, column 'answer': ")


def test_of_a_table_that_is_too_large_the_first_rows_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_checks, "CHECK_S", -1.0)
    submitted = job([{"prompt": "?"}] * 70 + [{"prompt": ""}] * 30)
    assert len(check_rows(submitted, load_prompts(submitted, Settings()))) == 4
    detail = refused(job([{"prompt": "?"}] + [{"prompt": ""}] * 99))
    assert detail == "row 1 of data.train in the job: its prompt is empty; expected text"


def test_rows_that_are_held_out_share_the_time_and_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held_out = [{"prompt": "?"}] * 64 + [{"prompt": ""}]
    data = {"train": [{"prompt": "?"}] * 100, "eval": held_out, "shuffle": False}
    submitted = job_with(data=data, evaluation={"num_prompts": 65})
    assert refused(submitted).startswith("row 64 of data.eval")
    monkeypatch.setattr(prompt_checks, "CHECK_S", -1.0)
    assert len(check_rows(submitted, load_prompts(submitted, Settings()))) == 4, (
        "64 rows of each were tried"
    )


def test_a_value_that_is_nested_too_deep_to_be_sent_is_found(tmp_path: Path) -> None:
    deep = '{"prompt": "?", "answer": ' + "[" * 300 + "]" * 300 + "}\n"
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?", "answer": []}\n' * 9 + deep)
    detail = refused(job(str(tmp_path / "rows.jsonl")))
    assert detail.startswith("row 9 of ") and "nested too deep" in detail and "'answer'" in detail


# --- the same data is tried once


def counting(submitted: Job, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns of how many rows prompts are made when the job is checked."""
    made, prompts = list[int](), load_prompts(submitted, Settings())
    make = prompts.made_of
    monkeypatch.setattr(prompts, "made_of", lambda rows: made.append(len(rows)) or make(rows))
    assert len(check_rows(submitted, prompts)) == 4
    return sum(made)


def test_rows_that_passed_are_not_tried_again_for_another_job_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "?"}\n' * 100)
    first = job(str(path), filter="prompt")
    assert counting(first, monkeypatch) == 104, "all rows, and the rows of the first step"
    other = first.model_copy(update={"name": "other", "seed": 7, "steps": 9})
    assert counting(other, monkeypatch) == 4
    spec = first.data.model_copy(update={"template": "Q: {{ prompt }}"})
    assert counting(first.model_copy(update={"data": spec}), monkeypatch) == 104
    path.write_text('{"prompt": "!"}\n' * 100)
    assert counting(first, monkeypatch) == 104, "the same file with another content"
    path.write_text('{"prompt": "!"}\n' * 99 + '{"prompt": ""}\n')
    assert load_prompts(first, Settings()).num_train == 99, "its filter leaves out what is empty"


def test_an_index_of_a_file_is_of_the_content_that_it_has_now(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for count, prompt in ((5, "a"), (9, "bb"), (5, "a")):
        path.write_text(f'{{"prompt": "{prompt}"}}\n' * count)
        prompts = load_prompts(job(str(path)), Settings())
        assert prompts.num_train == count
        assert {each.content for each in prompts.for_step(1)} == {prompt}


# --- whether prompts leave room for their completions


def fitting(tmp_path: Path, lengths: list[int], *, window: int = 20, **sampling: Any) -> Job:
    """A job whose prompts have these lengths, for a model that holds `window` tokens."""
    folder = tmp_path / "model"
    model = folder if folder.exists() else make_model_folder(folder, window)
    train = [{"prompt": "w3 " * length} for length in lengths]
    whole = job(train).model_dump(mode="json")
    whole["sampling"] |= {"max_tokens": 8, **sampling}
    return Job.model_validate(whole | {"model": str(model)})


def test_a_prompt_that_leaves_no_room_is_refused_with_the_keys_that_help(tmp_path: Path) -> None:
    assert refused(fitting(tmp_path, [12, 13, 12, 20])) == (
        "row 1 of data.train: its prompt has 13 tokens, which with sampling.max_tokens 8 makes 21, "
        "and the model holds 20; lower sampling.max_tokens, leave such rows out by data.filter, or "
        'set sampling.overlong_prompts to "drop" or "truncate"; so have 1 more of its 4 rows a '
        "fault"
    )
    whole = fitting(tmp_path, [12])
    assert len(check_rows(whole, load_prompts(whole, Settings()))) == 4
    bounded = whole.model_copy(update={"max_model_len": 19})
    assert "makes 20, and the job's max_model_len holds 19; lower" in refused(bounded)


def test_prompts_that_are_to_be_dropped_or_cut_are_refused_only_where_none_fits(
    tmp_path: Path,
) -> None:
    dropping = fitting(tmp_path, [12, 13], overlong_prompts="drop")
    check_rows(dropping, load_prompts(dropping, Settings()))
    none = fitting(tmp_path, [13, 30], overlong_prompts="drop")
    assert refused(none).startswith("none of the 2 prompts of data.train leaves room for sampling.")
    cutting = fitting(tmp_path, [13, 30], overlong_prompts="truncate")
    check_rows(cutting, load_prompts(cutting, Settings()))


def test_held_out_prompts_have_room_for_their_own_completions(tmp_path: Path) -> None:
    whole = fitting(tmp_path, [12]).model_dump(mode="json")
    whole["data"]["eval"] = [{"prompt": "w3 " * 12}]
    for most, sentence in (
        (9, "row 0 of data.eval: its prompt has 12 tokens, which with "),
        (8, ""),
    ):
        tried = Job.model_validate(whole | {"evaluation": {"max_tokens": most}})
        if sentence:
            assert f"{sentence}evaluation.max_tokens 9 makes 21" in refused(tried)
        else:
            check_rows(tried, load_prompts(tried, Settings()))


def test_a_prompt_without_tokens_is_refused_by_its_row(tmp_path: Path) -> None:
    whole = fitting(tmp_path, [1]).model_dump(mode="json")
    whole["data"]["train"] = [{"prompt": "w3"}, {"prompt": " "}]
    assert refused(Job.model_validate(whole)) == "row 1 of data.train: its prompt has no tokens"
