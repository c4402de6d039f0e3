"""Facts about an ended job -> its verdict, and the filter of system calls, both without running anything."""

from __future__ import annotations

import ast
import re
import signal
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from services.reward.sandbox import inside, verdicts
from services.reward.sandbox.inside import seccomp
from shared.wire import ExecuteRequest

ENDED = {
    "exit": 0,
    "timed_out": False,
    "wall_s": 0.1,
    "cpu_s": 0.1,
    "stdout": "",
    "stderr": "",
    "overflow": False,
    "result": '{"end": "ok", "value": 5}',
}


@pytest.mark.parametrize(
    ("facts", "verdict", "value"),
    [
        ({}, "ok", 5),
        ({"timed_out": True, "exit": -signal.SIGKILL}, "time_limit", None),
        ({"overflow": True}, "output_limit", None),
        ({"exit": -signal.SIGKILL, "cpu_s": 0.5}, "memory_limit", None),
        ({"exit": -signal.SIGKILL, "cpu_s": 5.0}, "time_limit", None),
        ({"exit": -signal.SIGSEGV}, "runtime_error", None),
        ({"result": ""}, "runtime_error", None),
        ({"result": "", "exit": 1}, "runtime_error", None),
        ({"result": "garbage"}, "runtime_error", None),
        ({"result": '{"end": "ok", "value": NaN}'}, "runtime_error", None),
        ({"result": '{"value": 5}'}, "runtime_error", None),
        ({"result": "[5]"}, "runtime_error", None),
        ({"result": '{"end": "ok", "value": ' + "[" * 100_000}, "runtime_error", None),
        ({"result": '{"end": "ok", "value": ' + "[" * 100 + "]" * 100 + "}"}, "runtime_error", None),
        ({"result": '{"end": "ok", "value": "\\ud800"}'}, "runtime_error", None),
        ({"result": '{"end": "ok", "value": ' + "1" * 5000 + "}"}, "runtime_error", None),
        ({"result": '{"end": "memory", "trace": "MemoryError"}'}, "memory_limit", None),
        ({"result": '{"end": "error", "trace": "E"}'}, "runtime_error", None),
    ],
)
def test_how_a_job_ended_is_its_verdict(facts: dict[str, Any], verdict: str, value: Any) -> None:
    ended = verdicts.execution(ENDED | facts, ExecuteRequest(expression="x", timeout_s=4))
    assert (ended.verdict, ended.value) == (verdict, value)


def test_a_program_without_an_expression_may_leave_by_any_door() -> None:
    assert verdicts.execution(ENDED | {"result": ""}, ExecuteRequest(code="x")).verdict == "ok"
    assert verdicts.execution(ENDED | {"result": "", "exit": 3}, ExecuteRequest(code="x")).verdict == "runtime_error"


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
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            position += if_true if holds else if_false


def header_numbers(machine: str) -> dict[str, int]:
    header = Path("/usr/include") / {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}[machine]
    if not header.exists():
        pytest.skip(f"no {header} to compare with")
    text = header.read_text().replace("__NR3264_fstatat", "__NR_newfstatat").replace("__NR3264_", "__NR_")
    return {name: int(number) for name, number in re.findall(r"#define\s+__NR_(\w+)\s+(\d+)\b", text)}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_allows_its_table_and_nothing_else(machine: str) -> None:
    program, arch = seccomp.build(machine), ARCHITECTURES[machine]
    known = header_numbers(machine)
    allowed = {number for number in known.values() if answer(program, arch, number) == ALLOW}
    assert allowed - {known["clone"]} == set(seccomp.numbers(machine).values()) | {known["ioctl"]}
    assert {name: known[name] for name in seccomp.numbers(machine)} == seccomp.numbers(machine)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_reads_the_arguments_that_matter(machine: str) -> None:
    program, arch, number = seccomp.build(machine), ARCHITECTURES[machine], header_numbers(machine)
    assert answer(program, arch, number["clone"], 0x11) == ALLOW
    assert answer(program, arch, number["clone"], 0x10000011) == EPERM
    assert answer(program, arch, number["clone3"]) == ENOSYS
    assert answer(program, arch, number["ioctl"], 0, 0x5401) == ALLOW
    assert answer(program, arch, number["ioctl"], 0, 0x5412) == EPERM
    assert answer(program, arch, number["ioctl"], 0, 0x5412 | 1 << 32) == EPERM
    assert answer(program, arch, number["prctl"], 15) == ALLOW
    assert answer(program, arch, number["prctl"], 22) == EPERM
    assert answer(program, arch, number["socket"]) == EPERM
    assert answer(program, arch, 0x40000000) == EPERM
    assert answer(program, 0x40000003, number["read"]) == KILL


def test_a_machine_without_a_table_is_named() -> None:
    with pytest.raises(OSError, match="no table of system calls for 'ppc64le'"):
        seccomp.build("ppc64le")


def test_what_runs_inside_imports_the_standard_library_only() -> None:
    for file in Path(inside.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                ours = name.startswith("services.reward.sandbox.inside")
                assert ours or name.partition(".")[0] in sys.stdlib_module_names, f"{file.name} imports {name}"
