"""Files that survive a power cut: what is flushed, and in which order."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shared.errors import Busy
from shared.host import disk


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records flushes and renames, with the name of what they are of."""
    seen: list[str] = []
    fsync = os.fsync
    replace, link = Path.replace, Path.hardlink_to

    def spy_fsync(descriptor: int) -> None:
        seen.append(f"flush {Path(f'/proc/self/fd/{descriptor}').readlink().name.split('.')[0]}")
        fsync(descriptor)

    def spy_replace(self: Path, target: Path) -> Path:
        seen.append(f"rename to {target.name}")
        return replace(self, target)

    def spy_link(self: Path, target: Path) -> None:
        seen.append(f"link as {self.name}")
        link(self, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(Path, "replace", spy_replace)
    monkeypatch.setattr(Path, "hardlink_to", spy_link)
    return seen


def test_the_content_is_flushed_before_the_rename_and_the_folder_after(
    tmp_path: Path, calls: list[str]
) -> None:
    disk.write_file(tmp_path / "file", b"1")
    assert calls == ["flush ", "rename to file", f"flush {tmp_path.name}"]
    disk.write_file(tmp_path / "file", b"2")
    assert (tmp_path / "file").read_bytes() == b"2"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_is_created_once(tmp_path: Path, calls: list[str]) -> None:
    disk.create_file(tmp_path / "file", b"1")
    assert calls == ["flush ", "link as file", f"flush {tmp_path.name}"]
    with pytest.raises(FileExistsError):
        disk.create_file(tmp_path / "file", b"2")
    assert (tmp_path / "file").read_bytes() == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_is_created_once_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    disk.create_file(tmp_path / "file", b"1")
    with pytest.raises(FileExistsError):
        disk.create_file(tmp_path / "file", b"2")
    assert (tmp_path / "file").read_bytes() == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_folders_that_are_made_are_flushed_into_those_above(
    tmp_path: Path, calls: list[str]
) -> None:
    disk.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert sorted(calls) == ["flush a", f"flush {tmp_path.name}"]
    calls.clear()
    disk.make_folder(tmp_path / "a" / "b")
    assert calls == []


def test_only_one_thread_of_a_process_looks_at_a_lock_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds that look would let no other thread work."""
    lookers, taken, flock = set[int](), list[str](), fcntl.flock

    def spy(*arguments: Any) -> None:
        lookers.add(threading.get_ident())
        flock(*arguments)

    def take(path: Path) -> None:
        with disk.locked(path):
            taken.append(path.name)

    monkeypatch.setattr(fcntl, "flock", spy)
    path = tmp_path / "lock"
    with disk.locked(path):
        waiting = [threading.Thread(target=take, args=(path,)) for _ in range(50)]
        for thread in waiting:
            thread.start()
        time.sleep(0.3)  # time for 15 looks of each
        assert lookers == {threading.get_ident()} and not taken
        take(tmp_path / "other")
    for thread in waiting:
        thread.join()
    assert taken == ["other", *50 * ["lock"]]


def test_who_waits_for_a_lock_in_vain_is_told_so_and_holds_up_no_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "LOCK_S", 0.1)
    path = tmp_path / "lock"
    with path.open("ab") as others:  # as another process has it
        fcntl.flock(others, fcntl.LOCK_EX)
        with pytest.raises(Busy, match=r"locked by others for 0\.1 s"), disk.locked(path):
            pass
    with disk.locked(path), pytest.raises(Busy, match=r"others for 0\.1 s"), disk.locked(path):
        pass
    with disk.locked(path):
        pass
