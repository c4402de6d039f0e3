"""The system calls a program in the sandbox may make: an allow-list, as a seccomp filter. Standard
library only.

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

import errno
import os
import struct

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
