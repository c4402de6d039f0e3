"""docker/seccomp-reward.json: under it, and with what Docker leaves a container of capabilities,
the sandbox builds itself and passes its self-test. There is no Docker here: the test loads the very
profile into the kernel, as runc would."""

from __future__ import annotations

import json
import os
import platform
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.reward.sandbox.inside import isolation

ROOT = Path(__file__).parents[3]
PROFILE: dict[str, Any] = json.loads((ROOT / "docker" / "seccomp-reward.json").read_text())
HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
BUILDING = {"unshare", "mount", "umount2", "pivot_root", "mount_setattr", "sethostname"}
ALLOW, EPERM, KILL = 0x7FFF0000, 0x00050001, 0x80000000

SERVICE = """
import asyncio, json, os, sys
sys.path[:0] = [{root!r}, *{paths!r}]
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
class Fprog(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_char_p)]
def must(result):
    if result: raise OSError(ctypes.get_errno(), "setting up")
kept = {kept!r}
for capability in range(41):
    if capability not in kept: must(libc.prctl(24, capability, 0, 0, 0))
bits = sum(1 << capability for capability in kept)
if os.geteuid() == 0:
    low, high = bits & 0xFFFFFFFF, bits >> 32
    version = (ctypes.c_uint32 * 2)(0x20080522, 0)
    must(libc.capset(version, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)))
must(libc.prctl(38, 1, 0, 0, 0))
program = bytes.fromhex({program!r})
must(libc.prctl(22, 2, ctypes.byref(Fprog(len(program) // 8, program)), 0, 0))

from services.reward.sandbox.local import LocalSandbox
from shared.wire import ExecuteRequest

async def main():
    sandbox = LocalSandbox(isolated=True, num_slots=2)
    await sandbox.start()
    echo = "subprocess.run(['/bin/echo', 'x']).returncode"
    requests = [ExecuteRequest(code="import os; os.kill(0, 9)", expression="6 * 7"),
                ExecuteRequest(code="import subprocess", expression=echo)]
    ended = await sandbox.run(requests) if not sandbox.problem() else []
    verdicts = [[e.verdict, e.value] for e in ended]
    print(json.dumps([sandbox.problem(), sandbox.report()["probes"], verdicts]))
    calls = [(321, 0, 0, 0), (250, 0, 0), (101, 0, 0, 0)]
    print(json.dumps([libc.syscall(*call) for call in calls]))
    await sandbox.close()

asyncio.run(main())
"""

DOCKERS_CAPABILITIES = [0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31]
"""Chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service, net_raw,
sys_chroot, mknod, audit_write, setfcap."""


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def filter_of(profile: dict[str, Any]) -> bytes:
    """Returns a profile as BPF for x86_64: rules in order, the first that fits answers. Knows the
    one comparison in use."""
    numbers = {
        name: int(number)
        for name, number in re.findall(r"#define\s+__NR_(\w+)\s+(\d+)\b", HEADER.read_text())
    }
    program = [
        instruction(0x20, 4),
        instruction(0x15, 0xC000003E, 1, 0),
        instruction(0x06, KILL),
        instruction(0x20, 0),
    ]
    for rule in profile["syscalls"]:
        answer = instruction(
            0x06, ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else 0x00050000 | rule["errnoRet"]
        )
        for name in set(rule["names"]) & set(numbers):
            body = [answer]
            for argument in rule.get("args", []):
                assert argument["op"] == "SCMP_CMP_MASKED_EQ" and argument["valueTwo"] == 0
                body = [
                    instruction(0x20, 16 + 8 * argument["index"]),
                    instruction(0x45, argument["value"], 0, 1),
                    instruction(0x06, EPERM),
                    answer,
                ]
            program += [instruction(0x15, numbers[name], 0, len(body)), *body]
    return b"".join([*program, instruction(0x06, 0x00050000 | profile["defaultErrnoRet"])])


def run(python: str, script: str, **user: Any) -> subprocess.CompletedProcess[str]:
    command = [python, "-B", "-c", script]
    return subprocess.run(
        command, cwd="/", env={}, capture_output=True, text=True, timeout=120, check=False, **user
    )


def service_under(profile: dict[str, Any], kept: list[int]) -> str:
    paths = [path for path in sys.path if path.endswith("site-packages")]
    program = filter_of(profile).hex()
    return SERVICE.format(root=str(ROOT), paths=paths, kept=kept, program=program)


ALLOWED = {
    name
    for rule in PROFILE["syscalls"]
    if rule["action"] == "SCMP_ACT_ALLOW"
    for name in rule["names"]
}


def test_the_profile_allows_what_the_sandbox_allows_and_what_builds_it() -> None:
    assert (
        set(isolation.numbers("x86_64")) | set(isolation.numbers("aarch64")) | BUILDING | {"clone"}
        <= ALLOWED
    )
    assert set(PROFILE["syscalls"][3]["names"]) >= BUILDING and len(
        PROFILE["syscalls"][3]["names"]
    ) == len(BUILDING)


def test_the_profile_refuses_what_no_part_of_the_service_needs() -> None:
    dangerous = """
    bpf perf_event_open keyctl add_key request_key userfaultfd io_uring_setup io_uring_enter
    init_module finit_module delete_module kexec_load kexec_file_load ptrace process_vm_readv
    process_vm_writev open_by_handle_at fanotify_init reboot swapon swapoff acct syslog
    settimeofday clock_settime iopl ioperm quotactl personality modify_ldt kcmp pidfd_getfd
    move_pages mbind shmget msgget semget mq_open fsopen fsmount open_tree move_mount
    vhangup nfsservctl lookup_dcookie uselib clone3 umount setns
    """
    assert PROFILE["defaultAction"] == "SCMP_ACT_ERRNO"
    assert ALLOWED & set(dangerous.split()) == set()


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not HEADER.exists(),
    reason="needs x86_64 and the kernel's headers",
)
@pytest.mark.parametrize(
    "capabilities", [DOCKERS_CAPABILITIES, []], ids=["docker's capabilities", "none"]
)
def test_the_sandbox_builds_itself_under_the_profile(capabilities: list[int]) -> None:
    if os.geteuid() != 0 and capabilities:
        pytest.skip("only root has capabilities to keep")
    as_root = os.geteuid() == 0 and bool(capabilities)
    python = sys.executable if as_root or os.geteuid() != 0 else "/usr/bin/python3.11"
    if not Path(python).exists() or not all(
        folder.stat().st_mode & 0o001 for folder in (ROOT, *ROOT.parents)
    ):
        pytest.skip("needs an interpreter and a checkout that an ordinary user can reach")
    script = service_under(PROFILE, capabilities)
    user = (
        {} if as_root or os.geteuid() != 0 else {"user": 65534, "group": 65534, "extra_groups": []}
    )
    if user:  # the bounding set is root's to empty; an ordinary user has nothing in the others
        script = script.replace("if capability not in kept: must", "if False: must")
    ended = run(python, script, **user)
    assert ended.returncode == 0, ended.stderr
    problem, probes, results = json.loads(ended.stdout.splitlines()[-2])
    assert problem is None
    assert set(probes.values()) == {"passed"}
    assert results == [["ok", 42], ["ok", 0]]
    assert json.loads(ended.stdout.splitlines()[-1]) == [-1, -1, -1]


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not HEADER.exists(),
    reason="needs x86_64 and the kernel's headers",
)
def test_without_what_builds_namespaces_the_host_is_refused_by_the_name_of_the_call() -> None:
    narrow = PROFILE | {"syscalls": PROFILE["syscalls"][:3]}
    kept = DOCKERS_CAPABILITIES if os.geteuid() == 0 else list(range(41))
    ended = run(sys.executable, service_under(narrow, kept))
    problem, _, _ = json.loads(ended.stdout.splitlines()[-2])
    assert (
        "unshare(user, mount, network, IPC, UTS and pid namespaces): Operation not permitted"
        in problem
    )
    assert "seccomp profile" in problem
