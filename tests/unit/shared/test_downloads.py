"""Files that are sent whole or in part."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import httpx2 as httpx
import pytest

from shared.errors import MEDIA_TYPE
from shared.http.operations import DOWNLOADED, DownloadedFile
from shared.http.service import Service
from shared.settings import Settings
from tests.support.in_process import in_process


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
