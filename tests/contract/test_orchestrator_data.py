"""Data over the API: uploaded files, dry runs, and a job that continues with the data it had."""

from __future__ import annotations

import asyncio
import fcntl
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from hone import view
from services.orchestrator.api import files
from services.orchestrator.app import create_service
from services.orchestrator.data.uploads import Uploads
from services.orchestrator.store.store import Store
from shared.errors import MEDIA_TYPE, BadRequest
from shared.job import Job
from shared.settings import Settings
from shared.wire import DryRun, Plan, SubmitRequest
from tests.support.in_process import in_process
from tests.support.model_folders import make_model_folder
from tests.support.orchestrator_stack import (  # noqa: F401
    Stack,
    job,
    orchestrator_client,
    stack,
)
from tests.support.uploading import ROWS, upload

pytestmark = pytest.mark.slow


def with_data(job: Job, **data: Any) -> Job:  # noqa: F811
    return Job.model_validate(job.model_dump(mode="json") | {"data": data})


# --- files


async def test_a_file_is_uploaded_listed_read_and_removed(stack: Stack) -> None:  # noqa: F811
    made = await upload(stack.http)
    file = made.json()
    assert made.status_code == 200
    assert file == {
        "id": file["id"],
        "object": "file",
        "bytes": len(ROWS),
        "created_at": file["created_at"],
        "filename": "rows.jsonl",
        "purpose": "fine-tune",
        "status": "processed",
    }
    assert (await stack.http.get(f"/v1/files/{file['id']}")).json() == file
    content = await stack.http.get(f"/v1/files/{file['id']}/content")
    assert content.content == ROWS
    assert content.headers["content-type"] == "application/octet-stream"
    again = create_service(stack.settings, Store("redis://127.0.0.1:1"))
    async with in_process(again.app) as http:
        listed = (await http.get("/v1/files")).json()
    assert listed["data"] == [file] and listed["has_more"] is False, "after a restart too"
    removed = await stack.http.delete(f"/v1/files/{file['id']}")
    assert removed.json() == {"id": file["id"], "object": "file", "deleted": True}
    gone = await stack.http.get(f"/v1/files/{file['id']}")
    assert gone.status_code == 404 and "no uploaded file" in gone.json()["error"]["message"]
    assert list((stack.settings.runs_dir / ".files").iterdir()) == []


async def test_files_are_listed_page_by_page(stack: Stack) -> None:  # noqa: F811
    ids = [(await upload(stack.http, name=f"{n}.jsonl")).json()["id"] for n in range(3)]
    whole = (await stack.http.get("/v1/files?order=asc")).json()
    order = [file["id"] for file in whole["data"]]
    assert sorted(order) == sorted(ids)
    first = (await stack.http.get("/v1/files?order=asc&limit=2")).json()
    assert [file["id"] for file in first["data"]] == order[:2] and first["has_more"] is True
    rest = (await stack.http.get(f"/v1/files?order=asc&after={first['last_id']}")).json()
    assert [file["id"] for file in rest["data"]] == order[2:] and rest["has_more"] is False
    assert (await stack.http.get("/v1/files?purpose=batch")).json()["data"] == []
    await stack.http.delete(f"/v1/files/{order[1]}")
    for direction, left in (("asc", order[2:]), ("desc", order[:1])):
        query = f"order={direction}&after={order[1]}"
        on = (await stack.http.get(f"/v1/files?{query}")).json()
        assert [file["id"] for file in on["data"]] == left, "a list continues where a file was"
    never = await stack.http.get(f"/v1/files?after=file-{'0' * 24}")
    assert never.status_code == 422 and never.headers["content-type"] == MEDIA_TYPE
    wrong = await stack.http.get("/v1/files?after=file-1")
    assert wrong.status_code == 422 and "after is 'file-1'" in wrong.json()["detail"]


async def test_an_upload_with_a_key_is_stored_once(stack: Stack) -> None:  # noqa: F811
    first, again = [await upload(stack.http, idempotency_key="k1") for _ in range(2)]
    assert first.json() == again.json()
    assert len((await stack.http.get("/v1/files")).json()["data"]) == 1
    other = await upload(stack.http, b'{"prompt": "y"}\n', idempotency_key="k1")
    assert other.status_code == 409 and other.json()["code"] == "body_differs"
    assert len((await stack.http.get("/v1/files")).json()["data"]) == 1


async def test_what_is_no_upload_is_a_sentence(stack: Stack) -> None:  # noqa: F811
    async def refused(sentence: str, status: int = 422, **request: Any) -> None:
        response = await stack.http.post("/v1/files", **request)
        assert response.status_code == status, response.text
        assert sentence in response.json()["detail"]

    file = {"file": ("a.jsonl", ROWS)}
    await refused("expected multipart/form-data", json={"purpose": "fine-tune"})
    await refused("'purpose': got None; expected one of fine-tune", files=file)
    await refused("'purpose': got 'x'", files=file, data={"purpose": "x"})
    fields = {"purpose": "fine-tune", "porpose": "x"}
    await refused("unknown field 'porpose'", files=file, data=fields | {"purpose": ""})
    await refused("no file in its field 'file'", files={"purpose": (None, "fine-tune")})
    await refused("its field 'file' more than once", files=[("file", ("a.jsonl", ROWS))] * 2)
    for name in ("../a.jsonl", "a\\b.jsonl", "a\x1b[31m.jsonl", "a" * 300):
        named = {"file": (name, ROWS)}
        await refused("the file's name is ", files=named, data={"purpose": "fine-tune"})
    await refused(f"got '{'x' * 79};", files=file, data={"purpose": "x" * 1000})
    expiring = {"purpose": "fine-tune", "expires_after[anchor]": "x", "expires_after[seconds]": "1"}
    await refused("unknown field 'expires_after[anchor]'", files=file, data=expiring)
    empty = {"file": ("a.jsonl", b"")}
    await refused("the file 'a.jsonl' is empty", files=empty, data={"purpose": "fine-tune"})
    of_a_page = {"origin": "https://example.org"}
    await refused("a page of another site", 403, files=file, headers=of_a_page)
    assert (await stack.http.get("/v1/files")).json()["data"] == []


async def test_a_file_beyond_the_limit_is_refused(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1 << 20)
    service = create_service(settings, Store("redis://127.0.0.1:1"))
    async with in_process(service.app) as http:
        for size in ((1 << 20) + 1, 2 << 20):
            response = await upload(http, b"x" * size)
            assert response.status_code == 413 and response.json()["code"] == "too_large"
            assert response.json()["detail"].endswith("bytes; expected at most 1048576")
        assert (await upload(http, b"x" * (1 << 20))).status_code == 200


async def test_uploads_beyond_the_quota_are_refused_and_leave_nothing(
    settings: Settings, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 3)
    full = settings.model_copy(update={"max_files_gib": 20 * 1024 / 2**30})
    service = create_service(full, Store(redis_url))
    async with in_process(service.app) as http:
        first = (await upload(http, b"x" * 15_000, idempotency_key="k1")).json()["id"]
        refused = await upload(http, b"y" * 6000)
        assert refused.status_code == 413 and refused.json()["code"] == "too_large"
        assert refused.json()["detail"] == (
            "a file of 6000 bytes beside 1 uploaded ones of 15000 bytes, those under way included; "
            "expected at most 20480 bytes in all (setting HONE_MAX_FILES_GIB): remove some by "
            "DELETE /v1/files/{id}, or raise it"
        )
        answers = await asyncio.gather(*(upload(http, b"z" * 3000) for _ in range(4)))
        assert sorted(answer.status_code for answer in answers) == [200, 413, 413, 413]
        assert (await upload(http, b"a")).status_code == 200
        refused = await upload(http, b"a")
        assert "there are 3 uploaded files; expected at most 3: " in refused.json()["detail"]
        again = await upload(http, b"x" * 15_000, idempotency_key="k1")
        assert (again.status_code, again.json()["id"]) == (200, first), "it is no file more"
        folders = [path.name for path in (settings.runs_dir / ".files").iterdir()]
        listed = (await http.get("/v1/files")).json()["data"]
        assert sorted(folders) == sorted(file["id"] for file in listed)
        Uploads(settings.runs_dir).remove(first)
        assert (await upload(http, b"y" * 6000)).status_code == 200


async def test_no_one_else_waits_for_an_upload_that_waits(
    settings: Settings, redis_url: str
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    service = create_service(settings, Store(redis_url))
    settings.runs_dir.mkdir()
    async with in_process(service.app) as http:
        with (settings.runs_dir / ".files.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            uploading = asyncio.create_task(upload(http))
            while not (settings.runs_dir / ".files").exists():
                await asyncio.sleep(0.01)
            assert (await http.get("/v1/files")).json()["data"] == []
            assert not uploading.done()
        assert (await uploading).status_code == 200


async def test_a_job_trains_on_a_file_which_stays_until_it_has_ended(
    stack: Stack,  # noqa: F811
) -> None:
    blocked = asyncio.Event()
    stack.fakes.fault["train_step"] = lambda _: blocked.wait()
    file = (await upload(stack.http)).json()["id"]
    record = await stack.submit(with_data(stack.job, train=file, columns={"prompt": "question"}))
    assert record.data["train"].startswith("xxh3-")
    await stack.until(record.id, "running")
    refused = await stack.http.delete(f"/v1/files/{file}")
    assert refused.status_code == 409
    assert f"in use by job {record.id!r}, which is running" in refused.json()["detail"]
    blocked.set()
    assert (await stack.until(record.id)).status == "succeeded"
    assert (await stack.http.delete(f"/v1/files/{file}")).status_code == 200


# --- dry runs


def made_model(folder: Path) -> Path:
    """A model's folder whose tokenizer has a token per word and begins texts with one of its
    own."""
    words = {"<unk>": 0, "<s>": 1, "<eos>": 2} | {f"w{n}": n for n in range(3, 20)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    make_model_folder(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<eos>"}}')
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}w9 {{ eos_token }}"
    )
    return folder


async def test_a_dry_run_shows_the_first_prompts_and_their_tokens(
    stack: Stack,  # noqa: F811
    tmp_path: Path,
) -> None:
    model = made_model(tmp_path / "model")
    rows = [{"q": f"w{n} w4 w5", "answer": n} for n in range(3, 9)]
    messages = [{"role": "user", "content": "w7 {{ q }}"}]
    shape = {"train": rows, "eval": rows[:2]}
    for data, start, end, num_tokens in (
        (shape | {"messages": messages}, "user w7 ", " w9 <eos>", 7),
        (shape | {"template": "w7 {{ q }}"}, "w7 ", "", 5),
    ):
        sampling = stack.job.sampling.model_copy(update={"prompts_per_step": 6})
        changes = {"model": str(model), "sampling": sampling}
        job = with_data(stack.job, **data).model_copy(update=changes)  # noqa: F811
        tried = await stack.client.call(
            "POST", "/v1/jobs/dry_run", SubmitRequest(job=job), DryRun, deadline_s=60
        )
        assert (tried.num_train, tried.num_held_out, tried.columns) == (6, 2, ("q", "answer"))
        assert len(tried.prompts) == 4
        for prompt in tried.prompts:
            assert prompt.text == f"{start}{rows[prompt.index]['q']}{end}"
            assert prompt.num_tokens == num_tokens
        shown = view.dry_run(tried).plain
        assert "is valid: 6 problems, 2 held out; nothing was submitted" in shown
        assert f"row {tried.prompts[0].index}, {tried.prompts[0].num_tokens} tokens:" in shown
    assert (await stack.http.get("/v1/jobs")).json()["jobs"] == []


async def test_a_plan_counts_the_prompts_of_the_data(
    stack: Stack,  # noqa: F811
    tmp_path: Path,
) -> None:
    model = made_model(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"

    async def planned(**data: Any) -> Plan:
        wanted = with_data(stack.job, **data).model_copy(update={"model": str(model)})
        body = SubmitRequest(job=wanted)
        return await stack.client.call("POST", "/v1/jobs/plan", body, Plan, deadline_s=60)

    # the last of 4 rows is the longest; the template adds "w7", and the tokenizer "<s>"
    rows.write_text("".join(json.dumps({"q": "w3 " * n, "answer": n}) + "\n" for n in (1, 2, 3, 9)))
    data = {"train": str(rows), "eval": None, "template": "w7 {{ q }}"}
    found = await planned(**data)
    assert found.prompt_tokens == 11
    assert "the longest of all 4 prompts has 11 tokens" in found.notes
    # of 600 rows every third is counted: rows 0, 3, ..., 597
    lengths = [2] * 600
    lengths[597], lengths[598] = 5, 9
    rows.write_text("".join(json.dumps({"q": "w3 " * n, "answer": n}) + "\n" for n in lengths))
    found = await planned(**data)
    assert found.prompt_tokens == 7
    assert "the longest of 200 of the prompts has 7 tokens" in found.notes
    rows.unlink()
    found = await planned(**data)
    (note,) = (note for note in found.notes if "taken to be of 508 tokens" in note)
    assert found.prompt_tokens == 508, "512 of the model less sampling.max_tokens"
    assert str(rows) in note, "it says why"


async def test_a_dry_run_says_what_would_be_refused(stack: Stack, tmp_path: Path) -> None:  # noqa: F811
    async def refused(**data: Any) -> str:
        with pytest.raises(BadRequest) as raised:
            body = SubmitRequest(job=with_data(stack.job, **data))
            await stack.client.call("POST", "/v1/jobs/dry_run", body, DryRun, deadline_s=60)
        return raised.value.detail

    assert "data.train is 'https://a.b/c', a URL" in await refused(train="https://a.b/c")
    rows = [{"prompt": "x", "level": 1}]
    torn = str(tmp_path / "torn.jsonl")
    Path(torn).write_text('{"prompt": "x", "answer": "\\ud800"}\n')
    assert (await refused(train=torn)).startswith("row 0 of data.train, column 'answer': ")
    of_test = await refused(train=rows, eval=torn)
    assert of_test.startswith("row 0 of data.eval, column 'answer': ")
    template = r"{{ '\ud800' }}"
    assert "row 0 of data.train, its prompt: " in await refused(train=rows, template=template)


async def test_a_model_of_the_hub_that_was_not_looked_at_is_not_valid_without_a_word(
    stack: Stack,  # noqa: F811
) -> None:
    why = (
        "the model 'owner/model' was not looked at: it is not in the Hugging Face cache here, and "
        "HF_HUB_OFFLINE is set"
    )
    (warning,) = (await stack.submit()).warnings
    assert warning == f"{why}; what is wrong with it shows only when the job begins"
    body = SubmitRequest(job=stack.job)
    tried = await stack.client.call("POST", "/v1/jobs/dry_run", body, DryRun, deadline_s=60)
    assert tried.not_counted == why and tried.warnings == (warning,)
    assert {prompt.num_tokens for prompt in tried.prompts} == {None}
    shown = view.dry_run(tried).plain
    assert f"tokens are not counted: {why}" in shown and f"warning: {warning}" in shown


# --- the same data on resuming


async def test_a_job_whose_data_changed_is_paused_by_name_until_it_is_back(
    stack: Stack,  # noqa: F811
    tmp_path: Path,
) -> None:
    path = tmp_path / "train.jsonl"
    before = path.read_text()
    step_3 = stack.fakes.hold("train_step", lambda body: body.step == 3)
    record = await stack.submit()
    await step_3.arrival()
    await stack.post(f"{record.id}/pause")
    await stack.until(record.id, "paused")
    path.write_text(before + json.dumps({"prompt": "new", "answer": 1}) + "\n")
    step_3.released.set()
    stack.fakes.fault.clear()
    await stack.post(f"{record.id}/resume")
    paused = await stack.until(record.id, "paused")
    assert f"dataset '{path}' has changed since the job was submitted" in (paused.error or "")
    assert f"`hone resume {record.id}` continues from there" in (paused.error or "")
    path.write_text(before)
    await stack.post(f"{record.id}/resume")
    assert (await stack.until(record.id)).status == "succeeded"
