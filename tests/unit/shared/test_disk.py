"""Files that survive a power cut: what is flushed, and in which order. A folder that only this user
may read and change, where others could have made one first. And the command of a volume."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.errors import Busy, Failed
from shared.host import disk
from shared.host.disk import own_folder, run_for_volume
from shared.host.processes import free_port


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


NOBODY = 65534


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder like /dev/shm: all may write into it, and none remove another's."""
    folder = tmp_path / "shm"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def rights(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_it_is_made_for_this_user_only(shared: Path) -> None:
    own_folder(shared / "mine")
    own_folder(shared / "mine")
    assert rights(shared / "mine") == 0o700


def test_a_link_in_its_place_is_refused_and_not_followed(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (shared / "mine").symlink_to(tmp_path / "target")
    with pytest.raises(Failed, match=r"shm/mine' is a link to '.*/target' and belongs to user "):
        own_folder(shared / "mine")
    assert rights(tmp_path / "target") != 0o700


def test_a_file_in_its_place_is_refused(shared: Path) -> None:
    (shared / "mine").touch()
    with pytest.raises(Failed, match="is no folder and belongs to"):
        own_folder(shared / "mine")


def test_others_may_no_longer_write_into_it(shared: Path) -> None:
    (shared / "mine").mkdir()
    (shared / "mine").chmod(0o777)
    own_folder(shared / "mine")
    assert rights(shared / "mine") == 0o755


def test_where_others_cannot_make_it_a_link_is_the_operators(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "target").mkdir()
    (tmp_path / "mine").symlink_to(tmp_path / "target")
    own_folder(tmp_path / "mine")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_another_users_folder_is_refused(shared: Path, mode: int) -> None:
    for folder in (shared, *shared.parents[:4]):  # up to the one of all tests
        folder.chmod(folder.stat().st_mode | 0o005)
    (shared / "roots").mkdir()
    (shared / "roots").chmod(mode)
    said = as_nobody(lambda: own_folder(shared / "roots"))
    assert said.startswith(f"{str(shared / 'roots')!r} is a folder and belongs to user 'root'; ")
    assert as_nobody(lambda: own_folder(shared / "nobodys")) == ""
    with pytest.raises(Failed, match="expected a folder of user 'root': others could read"):
        own_folder(shared / "nobodys")


def as_nobody(act: Callable[[], None]) -> str:
    """Returns the sentence that `act` fails with as another user; "" if it does not."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        try:
            act()
        except Failed as error:
            os.write(writing, error.detail.encode())
        except BaseException as error:  # the test is to see it, and the child to end
            os.write(writing, repr(error).encode())
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("service", ["trainer", "rollout"])
def test_a_service_does_not_start_where_another_has_laid_out_its_memory(
    shared: Path, service: str
) -> None:
    (shared / "hone-1").symlink_to("/etc")
    own = {"HONE_SHM_DIR": str(shared / "hone-1"), f"HONE_{service.upper()}_PORT": str(free_port())}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HONE_")}
    command = [sys.executable, "-m", f"services.{service}"]
    ended = subprocess.run(command, env=clean | own, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(f"{str(shared / 'hone-1')!r} is a link to ")


def test_the_command_is_run_and_none_is_none(tmp_path: Path) -> None:
    run_for_volume(None, "never")
    run_for_volume(f"touch '{tmp_path}/a b'", "touched")
    assert (tmp_path / "a b").exists()


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("sh -c 'echo busy >&2; exit 3'", "exit 3'\" ended with exit code 3: busy$"),
        ("/nowhere/sync", r"seen: '/nowhere/sync' did not finish: .*No such file"),
    ],
)
def test_a_command_that_fails_is_told_with_what_it_said(command: str, sentence: str) -> None:
    with pytest.raises(Failed, match=sentence):
        run_for_volume(command, "seen")
