"""Which results of operations are kept, and for how long; files that are sent whole or in part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import httpx2 as httpx
import pytest

from shared.errors import MEDIA_TYPE, NotFound
from shared.http import operations
from shared.http.operations import DOWNLOADED, DownloadedFile, DrainState, Operation, Operations
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import Checkpoint
from tests.support.in_process import in_process


async def answer() -> Checkpoint:
    return Checkpoint(step=1, path="/x", size_bytes=1)


async def many(count: int) -> tuple[Operations, list[Operation], Callable[[], Operation]]:
    """Returns that many finished operations, and what starts one more."""
    table = Operations(10.0, DrainState("trainer"))

    def start() -> Operation:
        return table.start(answer, f"key {len(table._by_id)}", "body", "POST /x")

    started = [start() for _ in range(count)]
    await asyncio.wait({operation.task for operation in started})
    await asyncio.sleep(0)
    return table, started, start


async def test_no_answer_is_lost_before_it_is_fetched_however_many_there_are() -> None:
    table, started, start = await many(1_400)
    for operation in started:
        start()
        assert await table.wait(table.get(operation.id), 0) == await answer()


async def test_fetched_answers_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "KEEP_COUNT", 2)
    table, started, start = await many(4)
    for operation in started[:3]:
        await table.wait(operation, 0)
    start()
    with pytest.raises(NotFound):
        table.get(started[0].id)
    assert [table.get(operation.id) for operation in started[1:]] == started[1:]


async def test_no_answer_is_kept_for_longer_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "KEEP_S", 0.0)
    table, started, start = await many(1)
    await asyncio.sleep(0.01)
    start()
    with pytest.raises(NotFound):
        table.get(started[0].id)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    return path


@pytest.fixture
async def http(path: Path, settings: Settings) -> AsyncGenerator[httpx.AsyncClient]:
    service = Service("trainer", settings)

    @service.app.get("/file", response_class=DownloadedFile, responses=DOWNLOADED)
    async def file() -> DownloadedFile:
        return DownloadedFile(path)

    async with in_process(service.app) as http:
        yield http


@pytest.mark.parametrize(
    ("asked", "status", "content"),
    [
        (None, 200, b"0123456789"),
        ("bytes=4-", 206, b"456789"),
        ("bytes=4-4", 206, b"4"),
        ("bytes=4-99", 206, b"456789"),
        ("bytes=-3", 206, b"789"),
        ("bytes=-99", 206, b"0123456789"),
        ("bytes=10-", 416, b""),
    ],
)
async def test_a_file_is_sent_whole_or_the_range_of_it(
    http: httpx.AsyncClient, asked: str | None, status: int, content: bytes
) -> None:
    answer = await http.get("/file", headers={"range": asked} if asked else {})
    assert (answer.status_code, answer.content) == (status, content)


@pytest.mark.parametrize(
    "asked", ["lines=1-2", "bytes", "bytes=", "bytes=-", "bytes=a-", "bytes=4-3", "bytes=0-1,3-4"]
)
async def test_a_range_that_is_none_is_a_problem(http: httpx.AsyncClient, asked: str) -> None:
    answer = await http.get("/file", headers={"range": asked})
    assert (answer.status_code, answer.headers["content-type"]) == (400, MEDIA_TYPE)
    assert answer.json()["detail"] == (
        f"the header Range is {asked!r}; expected one range of bytes, such as bytes=1000-1999 or "
        "bytes=1000-"
    )


async def test_a_file_that_was_removed_meanwhile_is_not_found(
    http: httpx.AsyncClient, path: Path
) -> None:
    path.unlink()
    answer = await http.get("/file")
    assert (answer.status_code, answer.headers["content-type"]) == (404, MEDIA_TYPE)
    assert answer.json()["detail"] == f"{str(path)!r} is not there any more"
