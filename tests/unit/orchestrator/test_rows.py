"""All rows of a job's data are tried when it is submitted, not when their step comes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.api import rows
from services.orchestrator.api.checking import MAX_CHECKS, Checking
from services.orchestrator.api.rows import check_rows
from services.orchestrator.loop.prompts import load_prompts
from shared.config import Settings
from shared.errors import BadRequest, Busy
from shared.gate import caller
from shared.job import Job
from shared.wire import ApiKey


def job(train: list[dict[str, Any]], **data: Any) -> Job:
    return Job.model_validate(
        {
            "name": "t",
            "model": "m/m",
            "steps": 4,
            "data": {"train": train, "shuffle": False, **data},
            "sampling": {"prompts_per_step": 4},
            "rewards": [{"grader": "length"}],
        }
    )


def refused(job: Job) -> str:
    with pytest.raises(BadRequest) as raised:
        check_rows(load_prompts(job, Settings()))
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


def test_a_template_that_works_on_no_row_is_told_once() -> None:
    detail = refused(job(with_faults("x"), template="{{ q"))
    assert detail.startswith("data.template does not work: ") and "rows a fault" not in detail


def test_a_value_that_cannot_be_sent_is_found_in_any_row() -> None:
    data = [{"prompt": "?", "answer": 2**70 if place == 100 else 1} for place in range(200)]
    assert refused(job(data)).startswith("row 100 of data.train, column 'answer': ")


def test_of_a_table_that_is_too_large_the_first_rows_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows, "CHECK_S", -1.0)
    prompts = load_prompts(job([{"prompt": "?"}] * 70 + [{"prompt": ""}] * 30), Settings())
    assert len(check_rows(prompts)) == 4
    detail = refused(job([{"prompt": "?"}] + [{"prompt": ""}] * 99))
    assert detail == "row 1 of data.train in the job: its prompt is empty; expected text"


def test_rows_that_are_held_out_share_the_time_and_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held_out = [{"prompt": "?"}] * 64 + [{"prompt": ""}]
    submitted = job([{"prompt": "?"}] * 100, eval=held_out)
    submitted = submitted.model_copy(
        update={"evaluation": submitted.evaluation.model_copy(update={"num_prompts": 65})}
    )
    assert refused(submitted).startswith("row 64 of data.eval")
    monkeypatch.setattr(rows, "CHECK_S", -1.0)
    assert len(check_rows(load_prompts(submitted, Settings()))) == 4, "64 rows of each were tried"


async def test_more_checks_than_can_wait_are_refused() -> None:
    checking, release = Checking(), threading.Event()
    under_way = [
        asyncio.create_task(checking.run(lambda: release.wait(60))) for _ in range(MAX_CHECKS)
    ]
    await asyncio.sleep(0)
    with pytest.raises(Busy, match="at most 32 are taken"):
        await checking.run(lambda: None)
    release.set()
    assert all(await asyncio.gather(*under_way))
    caller.set(ApiKey(name="bot", access="full", created_at=0))
    assert await checking.run(lambda: caller.get()) == caller.get()


def test_a_value_that_is_nested_too_deep_to_be_sent_is_found(tmp_path: Path) -> None:
    deep = '{"prompt": "?", "answer": ' + "[" * 300 + "]" * 300 + "}\n"
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?", "answer": []}\n' * 9 + deep)
    submitted = job([{"prompt": "?"}])
    data = submitted.data.model_copy(update={"train": str(tmp_path / "rows.jsonl")})
    detail = refused(submitted.model_copy(update={"data": data}))
    assert detail.startswith("row 9 of ") and "nested too deep" in detail and "'answer'" in detail
