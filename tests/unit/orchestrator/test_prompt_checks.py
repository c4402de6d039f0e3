"""All rows of a job's data are tried when it is submitted, not when their step comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.grpo.prompts import load_prompts
from services.orchestrator.jobs import prompt_checks
from services.orchestrator.jobs.prompt_checks import check_rows
from shared.errors import BadRequest
from shared.job import Job
from shared.settings import Settings
from tests.support.job_records import job_with
from tests.support.model_folders import make_model_folder


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
