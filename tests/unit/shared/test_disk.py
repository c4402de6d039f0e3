"""Files that survive a power cut: what is flushed, and in which order."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

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
