"""Takes a process into its own user, pid, mount, network, IPC and UTS namespaces with a read-only
root. Standard library only.

The order matters, and each step says why. There is no /proc on purpose, because a container cannot
mount one whose parts are masked, and no overlay.

The system calls that a program in the sandbox may make are an allow-list, as a seccomp filter.
Everything else answers EPERM: no namespaces, mounts, tracing, keys, BPF, io_uring, shared memory of
System V, no `memfd_create` (memory that no limit counts), and no `socket`, not even for a loopback
of its own: graded programs have no use for one, and the network is the largest part of the kernel.
A `socketpair` of Unix streams is fine (asyncio needs it): one of datagrams could be sent from to
any socket in the file system. No options of sockets, which take filters of packets. No file locks,
which would be seen by a program in another slot on the files that both are shown; so sqlite3 works
in memory only. Nothing that tells or changes which pages of a file the host has in its cache
(`fadvise64`, `mincore`, `cachestat`, `readahead`, two kinds of `madvise`, and `preadv2` and
`pwritev2` with any flag: RWF_NOWAIT tells), and no pipes of another size than all have. `clone3`
answers ENOSYS, so that libc falls back to `clone`, whose flags the filter can read. `ioctl` without
the two that type into a terminal; `prctl` for thread names only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
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
class SlotFiles:
    """Files of the outside that a slot keeps open: its size, and how soon the kernel ends it when
    memory runs short."""

    statm: int
    oom_score: int


def enter(config: dict[str, Any]) -> SlotFiles:
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


def _own_files() -> SlotFiles:
    with kernel.own_proc_files():
        return SlotFiles(
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


_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}
_CLONE, _CLONE3, _IOCTL, _PRCTL, _FCNTL, _SOCKETPAIR, _MADVISE, _PREADV2, _PWRITEV2 = (
    (56, 220),
    (435, 435),
    (16, 29),
    (157, 167),
    (72, 25),
    (53, 199),
    (28, 233),
    (327, 286),
    (328, 287),
)
"""System calls whose arguments matter: their numbers on x86_64 and on aarch64."""

_ALLOWED = """
read 0 63, write 1 64, open 2 -1, close 3 57, stat 4 -1, fstat 5 80, lstat 6 -1, poll 7 -1,
lseek 8 62, mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134,
rt_sigprocmask 14 135, rt_sigreturn 15 139, pread64 17 67, pwrite64 18 68, readv 19 65,
writev 20 66, access 21 -1, pipe 22 -1, select 23 -1, sched_yield 24 124, mremap 25 216,
msync 26 227, dup 32 23, dup2 33 -1, pause 34 -1, nanosleep 35 101,
getitimer 36 102, alarm 37 -1, setitimer 38 103, getpid 39 172, sendfile 40 71, sendto 44 206,
recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, shutdown 48 210, getsockname 51 204,
getpeername 52 205, getsockopt 55 209, fork 57 -1, vfork 58 -1, execve 59 221,
exit 60 93, wait4 61 260, kill 62 129, uname 63 160, fsync 74 82, fdatasync 75 83, truncate 76 45,
ftruncate 77 46, getdents 78 -1, getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -1,
mkdir 83 -1, rmdir 84 -1, creat 85 -1, link 86 -1, unlink 87 -1, symlink 88 -1, readlink 89 -1,
chmod 90 -1, fchmod 91 52, umask 95 166, gettimeofday 96 169, getrlimit 97 163, getrusage 98 165,
sysinfo 99 179, times 100 153, getuid 102 174, getgid 104 176, geteuid 107 175, getegid 108 177,
setpgid 109 154, getppid 110 173, getpgrp 111 -1, setsid 112 157, getresuid 118 148,
getresgid 120 150, getpgid 121 155, getsid 124 156, getgroups 115 158, capget 125 90,
rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigqueueinfo 129 138, rt_sigsuspend 130 133,
sigaltstack 131 132, utime 132 -1, statfs 137 43, fstatfs 138 44, getpriority 140 141,
sched_getparam 143 121, sched_getscheduler 145 120, sched_get_priority_max 146 125,
sched_get_priority_min 147 126, arch_prctl 158 -1, setrlimit 160 164, gettid 186 178, time 201 -1,
tkill 200 130, futex 202 98, sched_setaffinity 203 122, sched_getaffinity 204 123,
epoll_create 213 -1, epoll_ctl 233 21, epoll_wait 232 -1, getdents64 217 61,
set_tid_address 218 96, restart_syscall 219 128, timer_create 222 107,
timer_settime 223 110, timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111,
clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94,
tgkill 234 131, utimes 235 -1, waitid 247 95, openat 257 56, mkdirat 258 34, futimesat 261 -1,
newfstatat 262 79, unlinkat 263 35, renameat 264 38, linkat 265 37, symlinkat 266 36,
readlinkat 267 78, fchmodat 268 53, faccessat 269 48, pselect6 270 72, ppoll 271 73,
set_robust_list 273 99, get_robust_list 274 100, sync_file_range 277 84, utimensat 280 88,
epoll_pwait 281 22, signalfd 282 -1, timerfd_create 283 85, eventfd 284 -1, fallocate 285 47,
timerfd_settime 286 86, timerfd_gettime 287 87, signalfd4 289 74, eventfd2 290 19,
epoll_create1 291 20, dup3 292 24, pipe2 293 59, preadv 295 69, pwritev 296 70, prlimit64 302 261,
getcpu 309 168, renameat2 316 276, getrandom 318 278, execveat 322 281, membarrier 324 283,
copy_file_range 326 285, statx 332 291, rseq 334 293,
pidfd_send_signal 424 424, pidfd_open 434 434, close_range 436 436, openat2 437 437,
faccessat2 439 439, epoll_pwait2 441 441
"""
"""Name, its number on x86_64, its number on aarch64 (-1: it has none)."""

_CLONE_NAMESPACES = 0x7E020080
"""CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET,TIME}."""
_TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX."""
_THREAD_NAME = (15, 16)
"""PR_SET_NAME and PR_GET_NAME."""
_LOCKS = (5, 6, 7, 36, 37, 38, 1024, 1026)
"""F_GETLK, F_SETLK, F_SETLKW, the same three of F_OFD_*, F_SETLEASE, F_NOTIFY."""
_PIPE_SIZE = 1031
"""F_SETPIPE_SZ: the kernel bounds the pipes of a user, and all slots may have the same user."""
_AF_UNIX = 1
_NOT_A_STREAM = 0xE
"""Bits of the types of sockets other than SOCK_STREAM."""
_CACHE_ADVICE = (20, 21)
"""MADV_COLD and MADV_PAGEOUT."""

_ANY_FLAG = 0xFFFFFFFF

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NR, _OFFSET_ARCH, _OFFSET_ARG0, _OFFSET_ARG1, _OFFSET_ARG2 = 0, 4, 16, 24, 32
_OFFSET_ARG5 = 56
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_X32_BIT = 0x40000000


def build(machine: str | None = None) -> bytes:
    """Returns the filter as BPF instructions for `machine` (this one). Raises OSError where there
    is no table for it."""
    machine = machine or os.uname().machine
    if machine not in _COLUMN:
        raise OSError(
            errno.ENOSYS,
            f"seccomp: no table of system calls for {machine!r}; there is one for x86_64 and "
            "aarch64",
        )
    column = _COLUMN[machine]
    deny = _instruction(_RETURN, _ERRNO | errno.EPERM)
    allow = _instruction(_RETURN, _ALLOW)
    stream_of_unix = [
        _instruction(_JUMP_EQUAL, _AF_UNIX, 1, 0),
        deny,
        _instruction(_LOAD, _OFFSET_ARG1),
        _instruction(_JUMP_ANY_BIT, _NOT_A_STREAM, 0, 1),
        deny,
        allow,
    ]
    no_flags = [_instruction(_JUMP_ANY_BIT, _ANY_FLAG, 0, 1), deny, allow]
    program = [
        _instruction(_LOAD, _OFFSET_ARCH),
        _instruction(_JUMP_EQUAL, _AUDIT_ARCH[machine], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _OFFSET_NR),
        _instruction(_JUMP_AT_LEAST, _X32_BIT, 0, 1),
        deny,
        _instruction(_JUMP_EQUAL, _CLONE3[column], 0, 1),
        _instruction(_RETURN, _ERRNO | errno.ENOSYS),
        *_when(
            _CLONE[column],
            _OFFSET_ARG0,
            [_instruction(_JUMP_ANY_BIT, _CLONE_NAMESPACES, 0, 1), deny, allow],
        ),
        *_when(_IOCTL[column], _OFFSET_ARG1, [*_if_equal(_TERMINAL_INPUT, deny), allow]),
        *_when(_PRCTL[column], _OFFSET_ARG0, [*_if_equal(_THREAD_NAME, allow), deny]),
        *_when(_FCNTL[column], _OFFSET_ARG1, [*_if_equal((*_LOCKS, _PIPE_SIZE), deny), allow]),
        *_when(_MADVISE[column], _OFFSET_ARG2, [*_if_equal(_CACHE_ADVICE, deny), allow]),
        *_when(_PREADV2[column], _OFFSET_ARG5, no_flags),
        *_when(_PWRITEV2[column], _OFFSET_ARG5, no_flags),
        *_when(_SOCKETPAIR[column], _OFFSET_ARG0, stream_of_unix),
        *_tree(_steps(set(numbers(machine).values()), allow, deny)),
    ]
    return b"".join(program)


def numbers(machine: str) -> dict[str, int]:
    """Returns the number of each allowed call on `machine`."""
    rows = [cell.split() for cell in _ALLOWED.replace("\n", " ").split(",")]
    found = {name: int((x86_64, aarch64)[_COLUMN[machine]]) for name, x86_64, aarch64 in rows}
    return {name: number for name, number in found.items() if number >= 0}


def _steps(allowed: set[int], allow: bytes, deny: bytes) -> list[tuple[int, bytes]]:
    """Returns what each system call is answered, as (first number, answer up to the next first
    number)."""
    steps: list[tuple[int, bytes]] = []
    for number in range(max(allowed) + 2):
        answer = allow if number in allowed else deny
        if not steps or steps[-1][1] != answer:
            steps.append((number, answer))
    return steps


def _tree(steps: list[tuple[int, bytes]]) -> list[bytes]:
    """Returns a binary search over `steps`. The kernel walks a new filter once for each system call
    there is, so that a list to go through from its beginning would cost every child a tenth of a
    millisecond."""
    if len(steps) == 1:
        return [steps[0][1]]
    middle = len(steps) // 2
    below, above = _tree(steps[:middle]), _tree(steps[middle:])
    return [_instruction(_JUMP_AT_LEAST, steps[middle][0], len(below), 0), *below, *above]


def _when(number: int, offset: int, body: list[bytes]) -> list[bytes]:
    """Returns instructions that, for system call `number`, load the low half of an argument and go
    through `body`, which ends in a return."""
    return [_instruction(_JUMP_EQUAL, number, 0, len(body) + 1), _instruction(_LOAD, offset), *body]


def _if_equal(values: tuple[int, ...], then: bytes) -> list[bytes]:
    return [part for value in values for part in (_instruction(_JUMP_EQUAL, value, 0, 1), then)]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
