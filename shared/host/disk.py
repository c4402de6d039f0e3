"""Files that are complete or absent, also after a power cut: written aside, flushed, renamed, and
the folder flushed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import secrets
import shlex
import stat
import subprocess
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from shared.errors import Busy, Failed

Data = bytes | memoryview

LOCK_S = 10.0
"""Seconds to wait for a lock. Its holder may be copying a large file."""

LOOK_AT_LOCK_S = 0.02

NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS})
"""Errors of file systems without hard links, such as some network volumes."""


def write_file(path: Path, data: Data) -> None:
    """Writes the file. An existing file is replaced."""
    with _aside(path, data) as aside:
        aside.replace(path)
    flush(path.parent)


def create_file(path: Path, data: Data) -> None:
    """Writes the file; raises FileExistsError, and changes nothing, if it exists. Without hard
    links, the later of two writers at the same instant wins."""
    with _aside(path, data) as aside:
        try:
            path.hardlink_to(aside)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
            aside.replace(path)
    flush(path.parent)


def make_folder(path: Path) -> None:
    """Makes the folder and its missing parents."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        flush(folder.parent)


def own_folder(path: Path) -> None:
    """Makes the folder, for this user only. Raises Failed if another user may have made it: a link,
    or another user's folder, in a folder that others may write into."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if path.parent.stat().st_mode & 0o022:
            # /tmp and /dev/shm let no user replace another user's entry
            _make_own(path)


def _make_own(path: Path) -> None:
    """Removes other users' write permission on the folder. Raises Failed for another user's
    folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise _not_own(path) from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise _not_own(path)
        if found.st_mode & 0o022:
            os.fchmod(descriptor, found.st_mode & 0o755)
    finally:
        os.close(descriptor)


def _not_own(path: Path) -> Failed:
    found = path.lstat()
    what = "a folder" if stat.S_ISDIR(found.st_mode) else "no folder"
    if stat.S_ISLNK(found.st_mode):
        what = f"a link to {str(path.readlink())!r}"
    return Failed(
        f"{str(path)!r} is {what} and belongs to {user_name(found.st_uid)}; expected a folder of "
        f"{user_name(os.geteuid())}: others could read and change what is put there; remove it"
    )


def user_name(uid: int) -> str:
    """Returns the user's name for messages."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name!r}"
    except KeyError:
        return f"the user with the id {uid}"


def flush(path: Path) -> None:
    """Waits until a file's content, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _aside(path: Path, data: Data) -> Generator[Path]:
    """Yields a hidden file beside `path` that holds the data on disk; it is removed at the end."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with aside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield aside
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Locks this path against all threads and processes. Raises Busy."""
    until = time.monotonic() + LOCK_S
    with _first_in_process(path, until) as is_first:
        while is_first:
            with path.open("ab") as lock:
                if _is_locked(lock) and _is_at(path, lock):
                    yield
                    return
            if time.monotonic() >= until:
                break
            time.sleep(LOOK_AT_LOCK_S)
    raise Busy(
        f"{str(path)!r} has been locked by others for {LOCK_S:g} s; try again, and if it stays "
        "locked, look for an orchestrator that hangs"
    )


@dataclass
class _ThreadLock:
    lock: threading.Lock = field(default_factory=threading.Lock)
    num_users: int = 0


_thread_locks: dict[Path, _ThreadLock] = {}
_thread_locks_guard = threading.Lock()


@contextlib.contextmanager
def _first_in_process(path: Path, until: float) -> Generator[bool]:
    """Yields whether this is the only thread of the process here, by `until` (time.monotonic). Only
    one thread polls the file's lock: hundreds that poll 50 times a second would block all other
    threads."""
    with _thread_locks_guard:
        ours = _thread_locks.setdefault(path, _ThreadLock())
        ours.num_users += 1
    is_first = ours.lock.acquire(timeout=max(until - time.monotonic(), 0.0))
    try:
        yield is_first
    finally:
        if is_first:
            ours.lock.release()
        with _thread_locks_guard:
            ours.num_users -= 1
            if not ours.num_users:
                del _thread_locks[path]


def _is_locked(file: IO[bytes]) -> bool:
    """Tries to lock the file until it is closed; returns whether that succeeded."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Returns whether the path still names that file: the lock's previous holder may have removed
    it."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


DEADLINE_S = 300.0


def run_for_volume(command: str | None, purpose: str) -> None:
    """Runs the command, if there is one. Raises Failed with what it printed if it fails."""
    if command is None:
        return
    try:
        ended = subprocess.run(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DEADLINE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(f"{purpose}: {command!r} did not finish: {error}") from error
    if ended.returncode:
        why = (ended.stderr or ended.stdout).strip()[-500:]
        raise Failed(f"{purpose}: {command!r} ended with exit code {ended.returncode}: {why}")
