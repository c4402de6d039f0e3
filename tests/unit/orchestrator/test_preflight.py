"""The checks of a job: which error a failed check raises, and how much may wait to be checked."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from services.orchestrator.data.order import History
from services.orchestrator.errors import CheckFailed
from services.orchestrator.jobs import check_executor
from services.orchestrator.jobs.check_executor import CheckExecutor, CheckTurns
from services.orchestrator.jobs.preflight import AcceptedData, Inspection, Preflight, inspect
from shared.errors import BadRequest, Busy, Failed, HoneError, Unavailable
from shared.job import Job
from shared.job.file import parse_job
from shared.settings import Settings
from tests.support.job_records import record
from tests.support.model_folders import make_model_folder

JOB = record("queued").job


def preflight(error: HoneError) -> Preflight:
    settings = Settings()
    failing = Mock(validate=AsyncMock(side_effect=error))
    return Preflight(JOB, settings, failing, CheckExecutor(settings))


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


def job_of(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Job:
    return parse_job(
        {
            "name": "t",
            "model": str(folder),
            "steps": 1,
            "data": {"train": rows, "shuffle": False},
            "rewards": [{"grader": "length"}],
            "sampling": {"max_tokens": 8},
            **changes,
        }
    )


def dry_notes(job: Job, settings: Settings) -> tuple[str, ...]:
    return inspect(job, settings, None, showing=True).notes


SFT = {"training": {"objective": "sft"}, "rewards": []}
DPO = {"training": {"objective": "dpo"}, "rewards": []}


@pytest.mark.parametrize("changes", [{}, SFT, DPO])
def test_a_dry_run_shows_text_prompts_without_and_with_the_models_chat_template(
    tmp_path: Path, settings: Settings, changes: dict[str, Any]
) -> None:
    folder = make_model_folder(tmp_path / "chat")
    row = {"prompt": "w5 w6", "answer": "w7", "chosen": "w7", "rejected": "w8"}
    assert dry_notes(job_of(folder, [row], **changes), settings) == (
        f"the prompts are text, and go to the model {str(folder)!r} without its chat template: row "
        "0 as 'w5 w6'; as a chat message it would be 'user w5 w6 '. If the model is a chat model, "
        "make messages of the prompts: data.messages, or data.system_prompt",
    )
    chat = row | {"prompt": [{"role": "user", "content": "w5 w6"}]}
    assert dry_notes(job_of(folder, [chat], **changes), settings) == ()
    plain = make_model_folder(tmp_path / "plain", chat=False)
    assert dry_notes(job_of(plain, [row], **changes), settings) == ()


def test_a_long_prompt_is_shown_by_its_ends(tmp_path: Path, settings: Settings) -> None:
    folder = make_model_folder(tmp_path / "chat")
    long = "w5 " + "w6" * 500 + " w7"
    (note,) = dry_notes(job_of(folder, [{"prompt": long}]), settings)
    assert f"row 0 as {long[:150] + ' ... ' + long[-150:]!r}; as a chat" in note
    assert len(note) < 1100


def test_a_dry_run_says_of_a_prompt_that_begins_twice(tmp_path: Path, settings: Settings) -> None:
    folder = make_model_folder(tmp_path / "model", chat=False)
    (folder / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    rows = [{"prompt": "w5"}, {"prompt": "<s> w6"}]
    assert dry_notes(job_of(folder, rows), settings) == (), "it adds none"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert dry_notes(job_of(folder, rows), settings) == (
        f"the prompt of row 1 begins with '<s>', and the tokenizer of {str(folder)!r} puts another "
        "one before it; leave '<s>' out of the prompt",
    )
    assert dry_notes(job_of(folder, rows[:1]), settings) == ()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_waits_is_bounded_by_its_bytes_not_by_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check_executor, "MAX_WAITING_BYTES", 100 * check_executor.LEAST_BYTES)
    turns = CheckTurns(1)
    tasks = [asyncio.create_task(turns.take("a")) for _ in range(101)]
    await settle()
    with pytest.raises(Busy, match="100 jobs wait to be checked, which take 409600 bytes") as busy:
        await turns.take("a")
    assert busy.value.retry_after_s == 60, "a hundred at a second each, and a minute at most"
    tasks += [asyncio.create_task(turns.take("b")) for _ in range(60)]
    await settle()
    refused = [task for task in tasks if task.done() and isinstance(task.exception(), Busy)]
    assert len(refused) == 10, "another caller has its share all the same: a half"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_large_job_is_taken_where_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_executor, "MAX_WAITING_BYTES", 10)
    await asyncio.wait_for(CheckTurns(2).take("a", 1000), 5)
