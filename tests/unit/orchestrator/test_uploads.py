"""Uploads beside each other: what they may take together, and whom they keep waiting."""

from __future__ import annotations

import fcntl
import io
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.orchestrator.data.uploads import Quota, Uploads, new_id
from shared.errors import BadRequest, Busy, Conflict, TooLarge
from shared.host import disk
from shared.wire import UploadedFile

KIB_10 = 10 * 1024 / 2**30


class Interrupted(io.BytesIO):
    """Content that does something else before it is read on."""

    def __init__(self, content: bytes, act: Callable[[], object]) -> None:
        super().__init__(content)
        self._act: Callable[[], object] | None = act

    def read(self, size: int | None = -1) -> bytes:
        act, self._act = self._act, None
        if act:
            act()
        return super().read(size)


def add(uploads: Uploads, content: bytes | io.BytesIO, key: str | None = None) -> UploadedFile:
    file = content if isinstance(content, io.BytesIO) else io.BytesIO(content)
    return uploads.add(file, "rows.jsonl", "fine-tune", new_id(key))


def folders(runs_dir: Path) -> list[str]:
    return sorted(path.name for path in (runs_dir / ".files").iterdir())


def test_a_file_that_is_being_written_counts_for_the_quota(tmp_path: Path) -> None:
    uploads, refused = Uploads(tmp_path, Quota(10, KIB_10)), list[str]()

    def add_another() -> None:
        with pytest.raises(TooLarge) as raised:
            add(uploads, b"y" * 5000)
        refused.append(raised.value.detail)

    file = add(uploads, Interrupted(b"x" * 6000, add_another))
    assert "a file of 5000 bytes beside 1 uploaded ones of 6000 bytes" in refused[0]
    assert uploads.path_of(uploads.get(file.id)).read_bytes() == b"x" * 6000
    assert folders(tmp_path) == [file.id]


def test_an_upload_that_is_sent_again_needs_no_room(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path, Quota(1, KIB_10))
    file = add(uploads, b"x" * 6000, "key")
    found = list[list[str]]()
    again = Interrupted(b"x" * 6000, lambda: found.append(folders(tmp_path)))
    assert add(uploads, again, "key") == file
    with pytest.raises(Conflict, match="with other content"):
        add(uploads, b"x" * 5999 + b"y", "key")
    with pytest.raises(Conflict, match="with other content"):
        add(uploads, b"x" * 6001, "key")
    assert found == [[file.id]] and folders(tmp_path) == [file.id]


def test_one_at_a_time_stores_or_removes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads, order = Uploads(tmp_path), list[int]()
    first, second, other = new_id("1"), new_id("1"), new_id("2")
    assert first == second != other
    most, inside = 0, 0

    def work(number: int) -> None:
        nonlocal most, inside
        for _ in range(20):
            with uploads.alone_with(first):
                inside += 1
                most = max(most, inside)
                time.sleep(0.0005)
                inside -= 1
                order.append(number)

    monkeypatch.setattr(disk, "LOOK_AT_LOCK_S", 0.0)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, len(order)) == (1, 80)
    monkeypatch.setattr(disk, "LOCK_S", 0.0)
    busy = pytest.raises(Busy, match=r"'.*\.lock-file-.*' has been locked by others")
    with uploads.alone_with(first), uploads.alone_with(other), busy, uploads.alone_with(second):
        raise AssertionError("someone else has it")
    assert folders(tmp_path) == []


def test_what_a_crash_left_of_an_upload_goes_when_it_is_sent_again(tmp_path: Path) -> None:
    uploads, id = Uploads(tmp_path, Quota(1, KIB_10)), new_id("key")
    left = tmp_path / f".files/.{id}.abcd"
    left.mkdir(parents=True)
    (left / "content.jsonl").write_bytes(b"x" * 6000)
    assert add(uploads, b"x" * 6000, "key").id == id
    assert folders(tmp_path) == [id]


def test_what_a_crash_left_counts_for_an_hour(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path, Quota(10, KIB_10))
    left, removed = (tmp_path / f".files/{name}" for name in (".file-1.abcd", ".removed-file-2.ab"))
    for folder in (left, removed):
        folder.mkdir(parents=True)
        (folder / "content.csv").write_bytes(b"x" * 6000)
        os.utime(folder, (0, time.time() - 7200))
    hour_ago = time.time() - 3500
    os.utime(left / "content.csv", (hour_ago, hour_ago))
    with pytest.raises(TooLarge, match="beside 1 uploaded ones of 6000 bytes"):
        add(uploads, b"y" * 5000)
    os.utime(left / "content.csv", (0, hour_ago - 200))
    os.utime(removed / "content.csv", (0, hour_ago - 200))
    file = add(uploads, b"y" * 5000)
    assert folders(tmp_path) == [file.id]


def test_no_one_waits_while_contents_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "LOCK_S", 0.0)
    uploads = Uploads(tmp_path)
    file = add(uploads, b"x", "key")
    again = Interrupted(b"x", lambda: add(uploads, b"y"))
    assert add(uploads, again, "key") == file
    assert len(uploads.list()) == 2


def test_an_upload_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LOCK_S", 0.05)
    uploads = Uploads(tmp_path)
    with (tmp_path / ".files.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Busy, match=r"'.*\.files\.lock' has been locked by others for 0\.05 s"):
            add(uploads, b"x")
        assert folders(tmp_path) == []
    file = add(uploads, b"x")
    assert folders(tmp_path) == [file.id]


def test_an_empty_file_is_refused_and_takes_no_room(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"the file 'rows\.jsonl' is empty"):
        add(Uploads(tmp_path), b"")
    assert list(tmp_path.iterdir()) == []
