"""Uploads and removals of one file at once."""

from __future__ import annotations

import asyncio
import io
import shutil
import time
from typing import Any

import httpx2 as httpx
import pytest

from services.orchestrator.api import files
from services.orchestrator.app import create_service
from services.orchestrator.data.uploads import Uploads, new_id
from services.orchestrator.store.records import Submission
from services.orchestrator.store.registrations import Removals
from services.orchestrator.store.store import Store
from shared.errors import BadRequest, Failed
from shared.job import Job
from shared.settings import Settings
from shared.wire import UploadedFile
from tests.support import orchestrator_stack
from tests.support.in_process import in_process
from tests.support.uploading import ROWS, upload

pytestmark = pytest.mark.slow

job = orchestrator_stack.job  # a fixture


def training_on(file_id: str, job: Job) -> Job:
    return Job.model_validate(job.model_dump(mode="json") | {"data": {"train": file_id}})


async def test_uploads_of_one_key_at_once_take_the_room_of_one(
    settings: Settings, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 1)
    full = settings.model_copy(update={"max_files_gib": 8 * 1024 / 2**30})
    transport = httpx.ASGITransport(app=create_service(full, Store(redis_url)).app)
    seen, copy = list[list[str]](), shutil.copyfileobj

    def slowly(*arguments: Any) -> None:
        time.sleep(0.2)
        seen.append([path.name for path in (full.runs_dir / ".files").glob("*file-*.*")])
        copy(*arguments)

    monkeypatch.setattr(shutil, "copyfileobj", slowly)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        same = (upload(http, b"x" * 6000, idempotency_key="k") for _ in range(4))
        answers = await asyncio.gather(*same)
        (file,) = (await http.get("/v1/files")).json()["data"]
    assert [answer.json() for answer in answers] == [file] * 4
    (written,) = seen
    assert len(written) == 1


async def test_a_removal_waits_for_an_upload_of_the_same_file(
    settings: Settings, redis_url: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no job would be refused that is submitted with it while it goes."""
    reached, go, undo = asyncio.Event(), asyncio.Event(), Removals.undo

    async def late(self: Removals, file_id: str) -> None:
        reached.set()
        await go.wait()
        await undo(self, file_id)

    store = Store(redis_url)
    await store.open()
    async with in_process(create_service(settings, store).app) as http:
        id = (await upload(http, idempotency_key="k")).json()["id"]
        monkeypatch.setattr(Removals, "undo", late)
        again = asyncio.create_task(upload(http, idempotency_key="k"))
        await reached.wait()
        removal = asyncio.create_task(http.delete(f"/v1/files/{id}"))
        await asyncio.sleep(0.3)
        go.set()
        assert ((await again).status_code, (await removal).status_code) == (200, 200)
        assert (await http.get(f"/v1/files/{id}")).status_code == 404
    with pytest.raises(BadRequest, match="was removed"):
        await store.submit(Submission(training_on(id, job), settings.runs_dir))
    await store.close()


async def test_an_upload_waits_for_a_removal_of_the_same_file(
    settings: Settings, redis_url: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it answers with is there then, and jobs can name it."""
    reached, go, note = asyncio.Event(), asyncio.Event(), Removals.add

    async def noted(self: Removals, file: UploadedFile) -> None:
        await note(self, file)
        reached.set()
        await go.wait()

    store = Store(redis_url)
    await store.open()
    monkeypatch.setattr(Removals, "add", noted)
    async with in_process(create_service(settings, store).app) as http:
        id = (await upload(http, idempotency_key="k")).json()["id"]
        removal = asyncio.create_task(http.delete(f"/v1/files/{id}"))
        await reached.wait()
        again = asyncio.create_task(upload(http, idempotency_key="k"))
        await asyncio.sleep(0.3)
        go.set()
        assert ((await again).status_code, (await removal).status_code) == (200, 200)
        assert (await http.get(f"/v1/files/{id}")).status_code == 200
    assert (await store.submit(Submission(training_on(id, job), settings.runs_dir))).status
    await store.close()


async def test_a_removal_that_a_crash_broke_off_is_finished_at_the_next_start(
    settings: Settings, redis_url: str
) -> None:
    """Else its file would be listed, and no job could be submitted with it. One of the same key
    that was uploaded after the removal stays."""
    store, uploads = Store(redis_url), Uploads(settings.runs_dir)
    await store.open()
    broken_off, again, other = (
        uploads.add(io.BytesIO(ROWS), "rows.jsonl", "fine-tune", new_id(key)) for key in "abc"
    )
    await store.removals.add(broken_off)
    await store.removals.add(again.model_copy(update={"created_at": again.created_at - 1}))
    app = create_service(settings, store, works=False).app
    async with app.router.lifespan_context(app), asyncio.timeout(90):
        while len(found := uploads.list()) == 3 or await store.removals.created_at(again.id):
            await asyncio.sleep(0.02)
        assert {file.id for file in found} == {again.id, other.id}


async def test_a_file_that_could_not_be_removed_can_be_used_as_before(
    settings: Settings, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise Failed("cannot write to folder '.files': Input/output error; check HONE_RUNS_DIR")

    monkeypatch.setattr(Uploads, "remove", refused)
    store = Store(redis_url)
    async with in_process(create_service(settings, store).app) as http:
        id = (await upload(http)).json()["id"]
        assert (await http.delete(f"/v1/files/{id}")).status_code == 500
    assert await store.removals.created_at(id) is None
