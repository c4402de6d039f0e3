"""The checks of a job: which error a failed check raises."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, cast

import pytest

from services.orchestrator.data.order import History
from services.orchestrator.errors import CheckFailed
from services.orchestrator.jobs.check_executor import CheckExecutor
from services.orchestrator.jobs.preflight import AcceptedData, Inspection, Preflight, inspect
from shared.errors import BadRequest, Failed, HoneError, Unavailable
from shared.job.file import parse_job
from shared.settings import Settings
from tests.support.job_records import record

JOB = record("queued").job


class FailingServices:
    def __init__(self, error: HoneError) -> None:
        self.error = error

    async def validate(self, *_: Any) -> None:
        raise self.error


def preflight(error: HoneError) -> Preflight:
    settings = Settings()
    services = cast(Any, FailingServices(error))
    return Preflight(JOB, settings, services, CheckExecutor(settings))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Unavailable("the environment at http://e cannot be reached"), Unavailable),
        (Failed("the grader's process died"), Unavailable),
        (BadRequest("unknown grader 'x'"), BadRequest),
    ],
)
async def test_a_submission_is_refused_by_what_is_wrong_and_sent_again_for_the_rest(
    error: HoneError, kind: type[HoneError]
) -> None:
    with pytest.raises(kind) as raised:
        await preflight(error).run("services")
    assert (raised.value.detail, raised.value.status) == (error.detail, kind.status)


async def test_at_the_start_of_an_attempt_every_failed_check_is_decided_as_one() -> None:
    run = preflight(error := Unavailable("no answer", code="deadline"))
    run.accepted = AcceptedData({}, History())
    with pytest.raises(CheckFailed) as raised:
        await run.run("services")
    assert (raised.value.needs, raised.value.cause) == ("services", error)


async def test_a_reward_that_does_not_work_is_told_which_columns_are_left_out() -> None:
    run = preflight(BadRequest("reward 'math' has no column 'day'"))
    run.data = Inspection(left_out=("column 'day' of dataset 'x' is left out of its rows",))
    with pytest.raises(BadRequest) as raised:
        await run.run("services")
    assert raised.value.detail == (
        "reward 'math' has no column 'day'; column 'day' of dataset 'x' is left out of its rows"
    )


def test_a_dry_run_says_how_the_columns_of_a_csv_were_read(
    tmp_path: Path, settings: Settings
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer\nx,7\ny,8\n")
    data = JOB.data.model_copy(update={"train": str(path), "eval": None})
    job = JOB.model_copy(update={"data": data})
    assert (
        inspect(job, settings, None, showing=True)
        .notes[0]
        .startswith(
            f"column 'answer' of dataset '{path}' was read as integers, because each of its texts"
        )
    )
    assert inspect(job, settings, None, showing=False).notes == ()


def test_an_answer_that_is_left_out_is_named_where_it_is_missed(
    tmp_path: Path, settings: Settings
) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"prompt": ["x"], "answer": [datetime.date(2024, 1, 2)]})
    pyarrow.parquet.write_table(table, path)
    job = parse_job(
        {
            "name": "t",
            "model": "m/m",
            "steps": 1,
            "data": {"train": str(path)},
            "training": {"objective": "sft"},
        }
    )
    with pytest.raises(BadRequest) as raised:
        inspect(job, settings, None, showing=False)
    assert "has no answer to learn: column 'answer' is None" in raised.value.detail
    assert "column 'answer' of dataset" in raised.value.detail
    assert "is left out of its rows, because its type is date32" in raised.value.detail
