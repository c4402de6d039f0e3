"""Tries the primitives that the sandbox for model-written code needs of this host. A new process
tries them and ends, so nothing stays changed.

The reward service builds and tests the real sandbox at its start. This says beforehand which
primitive is missing.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 30.0
_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_PRIVATE, _NOSUID_NODEV = 1 << 18 | 16384, 6
_SYS_MOUNT_SETATTR, _AT_FDCWD = 442, -100
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_ALLOW_ALL = (0x7FFF0000 << 32 | 0x06).to_bytes(8, "little")
"""The shortest seccomp filter: one instruction, which returns "allowed"."""


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_char_p)]


def missing_primitive() -> str | None:
    """Returns the first call that this host refuses, with the reason ("unshare(...): Operation not
    permitted"), or None.

    A new process tries, because a process with several threads may not enter a user namespace.
    """
    tried = subprocess.run(
        [sys.executable, "-I", "-S", __file__],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return (tried.stdout + tried.stderr).strip() or None


def _first_refusal() -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.geteuid(), os.getegid()
    flags = ctypes.c_ulong
    read_only = (ctypes.c_uint64 * 4)(1, 0, 0, 0)
    calls = (
        (
            "unshare(user, mount, network, IPC, UTS and pid namespaces)",
            lambda: libc.unshare(_NAMESPACES),
        ),
        ("writing /proc/self/uid_map", lambda: _map(uid, gid)),
        ("mount(private)", lambda: libc.mount(b"none", b"/", None, flags(_PRIVATE), None)),
        (
            "mount(tmpfs)",
            lambda: libc.mount(b"tmpfs", b"/tmp", b"tmpfs", flags(_NOSUID_NODEV), b"size=1m"),
        ),
        (
            "mount_setattr(read-only; Linux 5.12 or newer)",
            lambda: libc.syscall(
                _SYS_MOUNT_SETATTR, _AT_FDCWD, b"/tmp", 0, ctypes.byref(read_only), flags(32)
            ),
        ),
        ("prctl(PR_SET_NO_NEW_PRIVS)", lambda: libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)),
        (
            "prctl(PR_SET_SECCOMP)",
            lambda: libc.prctl(
                _PR_SET_SECCOMP, _FILTER, ctypes.byref(_Filter(1, _ALLOW_ALL)), 0, 0
            ),
        ),
    )
    for name, call in calls:
        try:
            if call() == -1:
                return f"{name}: {os.strerror(ctypes.get_errno())}"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def _map(uid: int, gid: int) -> int:
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    return 0


if __name__ == "__main__":
    sys.stdout.write(_first_refusal())
