"""Takes a process into its own user, pid, mount, network, IPC and UTS namespaces with a read-only
root. Standard library only.

The order matters, and each step says why. There is no /proc on purpose, because a container cannot
mount one whose parts are masked, and no overlay.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any, NoReturn

from services.reward.sandbox.inside import kernel

TMP_OPTIONS = "mode=1777,size=64m,nr_inodes=4096"
_TMP_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOATIME
_NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWPID
)


@dataclass(frozen=True)
class Inside:
    """Files of the outside that a slot keeps open: its size, and how soon the kernel ends it when
    memory runs short."""

    statm: int
    oom_score: int


def enter(config: dict[str, Any]) -> Inside:
    """Returns in a forked child that is pid 1 of its own pid namespace.

    The caller's process stays outside, waits for the child, and ends as it ends. `config` has `uid`
    (the user to be outside; None: the same one), `binds` and `links` (paths to show, and where),
    `service_pid`, `control_fd`.
    """
    kernel.die_with_parent()
    if os.getppid() != config["service_pid"]:
        os._exit(0)  # the service died before the call above took effect
    with contextlib.suppress(OSError):
        # Short of memory, the host ends programs before services.
        _write("/proc/self/oom_score_adj", "500")
    _unshare_mapped(config["uid"])
    # While still allowed to see them.
    sources = [(os.open(source, os.O_PATH), target) for source, target in config["binds"].items()]
    if config["uid"] is not None:
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    kernel.die_with_parent()  # again: the change of user cleared it
    child = os.fork()
    if child:
        os.close(config["control_fd"])
        _end_as(child)
    kernel.die_with_parent()
    os.setsid()  # a pid namespace does not keep kill(0) from the parent's process group
    kernel.set_host_name("sandbox")
    inside = _own_files()
    _make_root(sources, config["links"])
    kernel.forbid_new_privileges()
    return inside


def _own_files() -> Inside:
    with kernel.own_proc_files():
        return Inside(
            os.open("/proc/self/statm", os.O_RDONLY), os.open("/proc/self/oom_score_adj", os.O_RDWR)
        )


def _end_as(child: int) -> NoReturn:
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _unshare_mapped(uid: int | None) -> None:
    """Enters the namespaces as uid 0 there, which is `uid` outside, or the same user where that is
    None or not permitted.

    Root maps to an unused uid, so that the slot owns nothing of root's, and the kernel's limit on
    processes holds, which does not apply to root.
    """
    names = "user, mount, network, IPC, UTS and pid namespaces"
    own_uid, own_gid = os.geteuid(), os.getegid()
    if uid is None:
        kernel.unshare(_NAMESPACES, names)
        _write_map("self", own_uid, own_gid)
        return
    with contextlib.suppress(PermissionError):
        os.setgroups([])
    unshared_r, unshared_w = os.pipe()
    me = os.getpid()
    helper = os.fork()  # writing such a map takes a process that stayed outside
    if not helper:
        os.close(unshared_w)  # so that the read ends when the other process dies
        if not os.read(unshared_r, 1):
            os._exit(1)
        try:
            _write(f"/proc/{me}/uid_map", f"0 {uid} 1")
            _write(f"/proc/{me}/gid_map", f"0 {uid} 1")
        except OSError:
            os._exit(1)
        os._exit(0)
    try:
        kernel.unshare(_NAMESPACES, names)
    finally:
        os.write(unshared_w, b"x")
        os.close(unshared_w)
        os.close(unshared_r)
        _, status = os.waitpid(helper, 0)
    if status:
        raise OSError(
            f"writing /proc/{me}/uid_map for uid {uid}: not permitted; give the service CAP_SETUID "
            "or start it as a user"
        )


def _write_map(process: str, uid: int, gid: int) -> None:
    _write(f"/proc/{process}/setgroups", "deny")
    _write(f"/proc/{process}/uid_map", f"0 {uid} 1")
    _write(f"/proc/{process}/gid_map", f"0 {gid} 1")


def _make_root(sources: list[tuple[int, str]], links: dict[str, str]) -> None:
    """Pivots into a small tmpfs that shows `sources` read-only at their paths, an empty /tmp, and
    nothing else. Shared memory and semaphores (multiprocessing has them) are files in /tmp too."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    os.chdir("/tmp")
    for fd, path in sources:
        _show(fd, path, f".{path}")
        os.close(fd)
    for path, target in links.items():
        os.symlink(target, f".{path}")
    for folder in ("tmp", "proc", "etc", "dev"):
        os.makedirs(folder, exist_ok=True)
    os.symlink("/tmp", "dev/shm")
    _write("etc/passwd", "sandbox:x:0:0:sandbox:/tmp:/bin/sh\n")
    _write("etc/group", "sandbox:x:0:\n")
    kernel.pivot_root_here()
    kernel.make_read_only("/", recursive=False)
    kernel.mount("tmpfs", "/tmp", "tmpfs", _TMP_FLAGS, TMP_OPTIONS)


def _show(fd: int, path: str, target: str) -> None:
    source = f"/proc/self/fd/{fd}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _write(target, "")
    kernel.mount(source, target, "", kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only(target, devices=path.startswith("/dev/"))


class Tmp:
    """The slot's /tmp, which each program finds empty, and its working directory."""

    def __init__(self) -> None:
        self._untouched: tuple[object, ...] | None = None

    def renew(self) -> None:
        """Replaces /tmp by an empty one, unless nothing that a program could see of it has changed.
        Nothing may run that still uses the old one."""
        if self._looks() != self._untouched:
            os.chdir("/")
            kernel.unmount("/tmp")
            kernel.mount("tmpfs", "/tmp", "tmpfs", _TMP_FLAGS, TMP_OPTIONS)
            self._untouched = self._looks()
        os.chdir("/tmp")

    def remove(self) -> None:
        """It goes with the slot's mounts."""

    def _looks(self) -> tuple[object, ...]:
        """Returns the folder's own attributes, times included, and how much of it is free
        (attributes beyond these, seccomp refuses to set)."""
        folder, room = os.stat("/tmp"), os.statvfs("/tmp")
        times = (folder.st_atime_ns, folder.st_mtime_ns, folder.st_ctime_ns)
        return folder.st_mode, folder.st_size, folder.st_nlink, times, room.f_bfree, room.f_ffree


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
