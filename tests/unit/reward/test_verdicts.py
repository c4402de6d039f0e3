"""Facts about an ended program -> its verdict, and the filter of system calls, both without running
anything."""

from __future__ import annotations

import ast
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shared
from services.reward import job_code
from services.reward.sandbox import inside, verdicts
from services.reward.sandbox.inside import child, isolation
from services.reward.sandbox.verdicts import DecodeError, ProgramExit, decode
from shared.wire import ExecuteRequest

ENDED: dict[str, Any] = {
    "exit": 0,
    "limit": None,
    "memory": "unknown",
    "peak_bytes": 1 << 30,
    "wall_s": 0.1,
    "cpu_s": 0.1,
    "stdout": "",
    "stderr": "",
    "overflow": False,
    "result": '{"end": "ok", "value": 5}',
}


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({}, "ok"),
        ({"limit": "wall", "exit": -signal.SIGKILL}, "time_limit"),
        ({"limit": "idle", "exit": -signal.SIGKILL}, "time_limit"),
        ({"overflow": True}, "ok"),
        ({"overflow": True, "result": '{"end": "error"}'}, "output_limit"),
        ({"overflow": True, "result": ""}, "output_limit"),
        ({"overflow": True, "exit": 1}, "output_limit"),
        ({"exit": -signal.SIGKILL, "cpu_s": 0.4}, "memory_limit"),
        ({"exit": -signal.SIGKILL, "cpu_s": 5.0, "memory": "own limit"}, "memory_limit"),
        ({"exit": -signal.SIGKILL, "memory": "enough"}, "runtime_error"),
        ({"exit": -signal.SIGKILL, "peak_bytes": 1 << 20}, "runtime_error"),
        ({"exit": -signal.SIGKILL, "cpu_s": 5.0}, "time_limit"),
        ({"limit": "cpu", "exit": -signal.SIGKILL, "cpu_s": 4.0}, "time_limit"),
        ({"exit": -signal.SIGXCPU, "cpu_s": 0.4}, "time_limit"),
        ({"exit": -40}, "runtime_error"),
        ({"exit": -signal.SIGSEGV}, "runtime_error"),
        ({"result": ""}, "runtime_error"),
        ({"result": "", "exit": 1}, "runtime_error"),
        ({"result": "garbage"}, "runtime_error"),
        ({"result": '{"end": "ok", "value": NaN}'}, "runtime_error"),
        ({"result": '{"end": "ok", "value": 1e999}'}, "runtime_error"),
        ({"result": '{"end": "ok", "value": {"a": [-1e999]}}'}, "runtime_error"),
        ({"result": '{"end": "ok", "value": [' + "[]," * 60_000 + "[]]}"}, "runtime_error"),
        ({"result": '{"value": 5}'}, "runtime_error"),
        ({"result": "[5]"}, "runtime_error"),
        ({"result": '{"end": "ok", "value": ' + "[" * 100_000}, "runtime_error"),
        ({"result": '{"end": "ok", "value": ' + "[" * 100 + "]" * 100 + "}"}, "runtime_error"),
        ({"result": '{"end": "ok", "value": "\\ud800"}'}, "runtime_error"),
        ({"result": '{"end": "ok", "value": ' + "1" * 5000 + "}"}, "runtime_error"),
        ({"result": '{"end": "memory", "trace": "MemoryError"}'}, "memory_limit"),
        ({"result": '{"end": "error", "trace": "E"}'}, "runtime_error"),
    ],
)
def test_how_a_job_ended_is_its_verdict(facts: dict[str, Any], verdict: str) -> None:
    ended = verdicts.execution(
        ProgramExit(**ENDED | facts), ExecuteRequest(expression="x", timeout_s=4)
    )
    assert (ended.verdict, ended.value) == (verdict, 5 if verdict == "ok" else None)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"[1e999]", "ValueError: inf is no finite number"),
        (b"-1e999", "ValueError: -inf is no finite number"),
        (b'{"a": NaN}', "ValueError: nan is no finite number"),
        (b"-Infinity", "ValueError: -inf is no finite number"),
        (b"[1,2,3,4,5]", "more than 4 values"),
        (b'["a,b,[,{","\\"[,,,,",{"a": {}}]', "more than 4 values"),
        (b"[" * 100_000, "more than 4 values"),
        (b"", "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_what_is_not_plain_data_is_not_decoded(text: bytes, fault: str) -> None:
    with pytest.raises(DecodeError, match=f"^{re.escape(fault)}$"):
        decode(text, max_items=4)


def test_a_text_of_quotes_is_gone_through_once() -> None:
    with pytest.raises(DecodeError):
        decode(b'"' + b'\\"' * 2_000_000 + b"," * 100, max_items=4)


def test_text_with_many_commas_is_few_values() -> None:
    assert decode(b'["a,b,[,{", "\\"[,,,,", {}]', max_items=4) == ["a,b,[,{", '"[,,,,', {}]
    nested = b"[" * 65 + b"]" * 65
    assert decode(nested, max_items=100) is not None
    with pytest.raises(DecodeError, match="nested deeper than 64"):
        decode(b"[" + nested + b"]", max_items=100)


def test_a_program_without_an_expression_may_leave_by_any_door() -> None:
    assert (
        verdicts.execution(ProgramExit(**ENDED | {"result": ""}), ExecuteRequest(code="x")).verdict
        == "ok"
    )
    assert (
        verdicts.execution(
            ProgramExit(**ENDED | {"result": "", "exit": 3}), ExecuteRequest(code="x")
        ).verdict
        == "runtime_error"
    )


ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def answer(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """Returns what the kernel would: an interpreter of the five BPF instructions in use."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *(list(arguments) + [0] * 6)[:6])
    accumulator = position = 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", program, 8 * position)
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x06:
            return value
        else:
            holds = {
                0x15: accumulator == value,
                0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }[code]
            position += if_true if holds else if_false


def header_numbers(machine: str) -> dict[str, int]:
    header = (
        Path("/usr/include")
        / {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}[machine]
    )
    if not header.exists():
        pytest.skip(f"no {header} to compare with")
    text = (
        header.read_text()
        .replace("__NR3264_fstatat", "__NR_newfstatat")
        .replace("__NR3264_", "__NR_")
    )
    return {
        name: int(number) for name, number in re.findall(r"#define\s+__NR_(\w+)\s+(\d+)\b", text)
    }


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_allows_its_table_and_nothing_else(machine: str) -> None:
    program, arch = isolation.build(machine), ARCHITECTURES[machine]
    known = header_numbers(machine)
    allowed = {number for number in known.values() if answer(program, arch, number) == ALLOW}
    by_argument = {
        known[name] for name in ("clone", "ioctl", "fcntl", "madvise", "preadv2", "pwritev2")
    }  # with all arguments 0; the next test has others
    assert allowed == set(isolation.numbers(machine).values()) | by_argument
    assert {name: known[name] for name in isolation.numbers(machine)} == isolation.numbers(machine)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_reads_the_arguments_that_matter(machine: str) -> None:
    program, arch, number = (
        isolation.build(machine),
        ARCHITECTURES[machine],
        header_numbers(machine),
    )
    assert answer(program, arch, number["clone"], 0x11) == ALLOW
    assert answer(program, arch, number["clone"], 0x10000011) == EPERM
    assert answer(program, arch, number["clone3"]) == ENOSYS
    assert answer(program, arch, number["ioctl"], 0, 0x5401) == ALLOW
    assert answer(program, arch, number["ioctl"], 0, 0x5412) == EPERM
    assert answer(program, arch, number["ioctl"], 0, 0x5412 | 1 << 32) == EPERM
    assert answer(program, arch, number["prctl"], 15) == ALLOW
    assert answer(program, arch, number["prctl"], 22) == EPERM
    assert answer(program, arch, number["socket"]) == EPERM
    for kind, told in ((1, ALLOW), (1 | 0x80800, ALLOW), (2, EPERM), (3, EPERM), (5, EPERM)):
        assert answer(program, arch, number["socketpair"], 1, kind) == told
    assert answer(program, arch, number["socketpair"], 30, 1) == EPERM
    for advice, told in ((4, ALLOW), (20, EPERM), (21, EPERM)):
        assert answer(program, arch, number["madvise"], 0, 0, advice) == told
    assert answer(program, arch, number["fcntl"], 0, 3) == ALLOW
    assert {
        answer(program, arch, number["fcntl"], 0, lock)
        for lock in (5, 6, 7, 36, 37, 38, 1024, 1026, 1031)
    } == {EPERM}
    for name in ("preadv2", "pwritev2"):
        assert answer(program, arch, number[name], 3, 0, 1, 0, 0, 0) == ALLOW
        for flags in (1, 8, 1 << 31):
            assert answer(program, arch, number[name], 3, 0, 1, 0, 0, flags) == EPERM
    assert answer(program, arch, number["flock"]) == EPERM
    assert answer(program, arch, 0x40000000) == EPERM
    assert answer(program, 0x40000003, number["read"]) == KILL


KILLED: dict[str, Any] = {"exit": -signal.SIGKILL, "result": "", "peak_bytes": 1 << 20}


@pytest.mark.parametrize(
    ("facts", "unexplained"),
    [
        (KILLED, True),
        (KILLED | {"cpu_s": 1.0}, True),  # it may have set itself a limit of one second
        (KILLED | {"limit": "wall"}, False),
        (KILLED | {"limit": "cpu"}, False),
        (KILLED | {"limit": "idle"}, False),
        (KILLED | {"peak_bytes": 400 << 20}, False),  # with no cgroup to ask, much memory is why
        (KILLED | {"peak_bytes": 400 << 20, "memory": "enough"}, True),
        (KILLED | {"memory": "own limit"}, False),
        (KILLED | {"exit": -signal.SIGSEGV}, False),
        ({}, False),
    ],
)
def test_a_kill_that_nothing_explains_is_told_apart(
    facts: dict[str, Any], unexplained: bool
) -> None:
    assert (
        verdicts.is_unexplained_kill(ProgramExit(**ENDED | facts), ExecuteRequest(expression="x"))
        is unexplained
    )


BEFORE = b"low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("before", "after", "short"),
    [
        (BEFORE, BEFORE.replace(b"oom 1\noom_kill 1", b"oom 2\noom_kill 2"), "own limit"),
        (BEFORE, BEFORE.replace(b"oom 1", b"oom 2"), "own limit"),
        (BEFORE, BEFORE.replace(b"oom_kill 1", b"oom_kill 2"), "host"),
        (BEFORE, BEFORE.replace(b"max 7", b"max 9"), "enough"),
        (b"oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",) * 2 + ("enough",),
        (b"under_oom 0\noom_kill 3\n", b"under_oom 0\noom_kill 4\n", "own limit"),
        (None, None, "unknown"),
    ],
)
def test_the_counts_of_a_cgroup_say_whose_memory_ran_out(
    before: bytes | None, after: bytes | None, short: str
) -> None:
    assert child.short_of_memory(before, after) == short


@pytest.mark.parametrize(
    ("facts", "ours"),
    [
        ({"began": False, "exit": 125, "stderr": "no room"}, "could not be started: no room"),
        (KILLED | {"memory": "host"}, "its host, or the service's cgroup, ran out of memory"),
        (KILLED, ""),
        (KILLED | {"memory": "own limit"}, ""),
        (KILLED | {"memory": "enough"}, ""),
        ({"exit": 137}, ""),
        ({"exit": 125, "result": ""}, ""),
    ],
)
def test_only_what_is_known_to_be_ours_is_no_fault_of_the_program(
    facts: dict[str, Any], ours: str
) -> None:
    request = ExecuteRequest(expression="x")
    for is_last in (False, True):
        fault = verdicts.infrastructure_fault(
            ProgramExit(**ENDED | facts), request, is_last=is_last
        )
        assert fault.endswith(ours) and bool(fault) == bool(ours)


@pytest.mark.parametrize(("used_mib", "is_own"), [(300, True), (20, False)])
def test_a_program_twice_killed_with_much_memory_has_done_it_itself(
    used_mib: int, is_own: bool
) -> None:
    facts = ProgramExit(**ENDED | KILLED | {"memory": "host", "peak_bytes": used_mib << 20})
    request = ExecuteRequest(expression="x", memory_mib=512)
    faults = [verdicts.infrastructure_fault(facts, request, is_last=last) for last in (False, True)]
    assert [bool(fault) for fault in faults] == [True, not is_own]
    assert (verdicts.execution(facts, request).verdict == "memory_limit") is is_own


def test_a_forged_reason_that_is_no_text_can_be_sent_on() -> None:
    ended = verdicts.execution(
        ProgramExit(**ENDED | {"result": '{"end": "error", "trace": "\\ud800"}'}),
        ExecuteRequest(expression="x"),
    )
    assert (ended.verdict, ended.stderr) == ("runtime_error", "?")


def test_a_machine_without_a_table_is_named() -> None:
    with pytest.raises(OSError, match="no table of system calls for 'ppc64le'"):
        isolation.build("ppc64le")


INSIDE = ("services.reward.sandbox.inside", "services.reward.job_code.inside_", "shared.rewards")
"""What runs in a sandbox, and what a user's own rewards are made of."""

OF_EXTRAS = {"inside_reasoning_gym.py": ("reasoning_gym", "pydantic", "sympy")}
"""What a grader's package brings, which is imported only where that grader runs."""


def test_what_runs_inside_imports_the_standard_library_only() -> None:
    files = [*Path(inside.__path__[0]).glob("*.py")]
    files += Path(job_code.__path__[0]).glob("inside_*.py")
    for file in (*files, Path(shared.__path__[0]) / "rewards.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                allowed = {*sys.stdlib_module_names, *OF_EXTRAS.get(file.name, ())}
                assert name.startswith(INSIDE) or name.partition(".")[0] in allowed, (
                    f"{file.name} imports {name}"
                )


@pytest.mark.parametrize("package", ["services.reward.job_code", "services.reward.sandbox"])
def test_a_package_above_what_runs_inside_imports_nothing(package: str) -> None:
    code = (
        f"import sys; before = set(sys.modules); import {package}; "
        "print(len(set(sys.modules) - before))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ended.stdout) == package.count(".") + 1


@pytest.mark.parametrize(
    ("wall_s", "used_s", "is_metered", "left"),
    [
        (0.0, 0.0, True, {"wall": 30.0, "cpu": 4.0, "idle": 3.0}),
        (3.0, 0.0, True, {"wall": 27.0, "cpu": 4.0, "idle": 0.0}),
        (3.0, 0.0, False, {"wall": 27.0, "cpu": 4.0}),
        (13.0, 0.5, True, {"wall": 17.0, "cpu": 3.5, "idle": 0.0}),
        (13.0, 1.0, True, {"wall": 17.0, "cpu": 3.0, "idle": 10.0}),  # a busy host gave it 8 %
    ],
)
def test_a_program_without_the_cpu_for_long_has_reached_a_limit_of_its_own(
    wall_s: float, used_s: float, is_metered: bool, left: dict[str, float]
) -> None:
    limits = child.Limits(timeout_s=30.0, cpu_s=4.0, idle_s=3.0)
    assert limits.left_s(wall_s, used_s, is_metered=is_metered) == left
