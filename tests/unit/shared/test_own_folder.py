"""A folder that only this user may read and change, where others could have made one first."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.errors import Failed
from shared.host.disk import own_folder
from shared.host.processes import free_port

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
