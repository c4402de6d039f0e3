"""The real sandbox: values, limits, and a slot that is killed. After each program nothing is left
behind, and the next program in the same slot is right. The attacks: `test_attacks.py`."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from services.reward.sandbox.local import LocalSandbox, is_long
from services.reward.sandbox.slots import STOP_DEADLINE_S, Slot
from services.reward.sandbox.verdicts import ProgramExit
from shared.wire import ExecuteRequest, Execution
from tests.support.reward_helpers import is_alive, kill, processes_of, started

SLOTS = 1

PROCESSES_PER_SLOT = 3
"""The process that stays outside and waits, pid 1 inside, and the child that waits for the next
program."""


async def run(
    sandbox: LocalSandbox, code: str = "", expression: str | None = None, **limits: Any
) -> Execution:
    return await sandbox.execute(ExecuteRequest(code=code, expression=expression, **limits))


async def nothing_is_left(sandbox: LocalSandbox) -> None:
    await until_processes_are(PROCESSES_PER_SLOT)
    after = await run(sandbox, "import os", "[6 * 7, os.listdir('/tmp')]")
    assert (after.verdict, after.value) == ("ok", [42, []])


VISIBLY_RUNNING = """
import os, time
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
time.sleep({seconds})
"""
"""Runs as one process more than a slot has when it is idle."""


def visibly_running(
    sandbox: LocalSandbox, seconds: float, **limits: Any
) -> asyncio.Task[Execution]:
    """Starts a visible program that has its own limits at once: it is run once and not twice."""
    context = contextvars.copy_context()
    context.run(is_long.set, True)
    program = run(sandbox, VISIBLY_RUNNING.format(seconds=seconds), "7", **limits)
    return asyncio.create_task(program, context=context)


async def until_processes_are(count: int) -> None:
    async with asyncio.timeout(90):
        while len(processes_of(os.getpid())) != count:
            await asyncio.sleep(0.05)


async def test_a_program_gives_its_value_and_its_output(sandbox: LocalSandbox) -> None:
    ended = await run(
        sandbox,
        "print(input())\nx = y + 1",
        "[x, 'a', 1.5, None, True, {'k': (1,)}]",
        inputs={"y": 2},
        stdin="hi\n",
    )
    assert ended.verdict == "ok"
    assert ended.value == [3, "a", 1.5, None, True, {"k": [1]}]
    assert ended.stdout == "hi\n"


@pytest.mark.parametrize(
    ("code", "expression", "verdict", "last_line"),
    [
        ("1/0", None, "runtime_error", "ZeroDivisionError: division by zero"),
        ("x = (", None, "runtime_error", "SyntaxError: '(' was never closed"),
        ("", "3 +", "runtime_error", "SyntaxError: invalid syntax"),
        ("", "1, 2; 3", "runtime_error", "SyntaxError: invalid syntax"),
        (
            "",
            "{1, 2}",
            "runtime_error",
            "TypeError: the value is of type 'set', which is not plain data",
        ),
        (
            "",
            "1e999",
            "runtime_error",
            "ValueError: the value is inf, which is not a finite number",
        ),
        (
            "x = []; x.append(x)",
            "x",
            "runtime_error",
            "ValueError: the value is nested deeper than 32, or contains itself",
        ),
        ("raise Exception('a' * (1 << 30))", None, "memory_limit", "MemoryError"),
    ],
)
async def test_a_program_that_fails_says_why(
    sandbox: LocalSandbox, code: str, expression: str | None, verdict: str, last_line: str
) -> None:
    ended = await run(sandbox, code, expression)
    assert (ended.verdict, ended.value) == (verdict, None)
    assert ended.stderr.splitlines()[-1] == last_line
    await nothing_is_left(sandbox)


READ_ALL_MEMORY = """
import ctypes, os, re, sys
# Written so that the mark itself is nowhere in memory.
mark = re.compile(b"SECRET[_](OF|VALUE|INPUT|STDIN)")
frames, frame = [], sys._getframe()
while frame:
    frames.append(repr(frame.f_locals).encode()); frame = frame.f_back
found = [repr(match[0]) for text in frames if (match := mark.search(text))]
del frames[:-4]

reading, writing = os.pipe()
libc = ctypes.CDLL(None)
libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
looked = 0
def readable(address):  # the kernel refuses to copy what is not mapped
    return libc.write(writing, address, 4096) == 4096 and os.read(reading, 4096)

def around(address, step):  # from a live object as far as the mapping goes
    global looked
    while page := readable(address):
        looked += 4096
        if match := mark.search(page): found.append(repr(match[0]))
        address += step

things = [object(), bytearray(1 << 12), sys.modules, [0] * 4000, os.environ, ctypes]
for thing in (*things, type("T", (), {})):
    page = id(thing) & ~4095
    around(page, 4096); around(page - 4096, -4096)
libc.sbrk.restype = ctypes.c_void_p
around((libc.sbrk(0) or 0) - 4096 & ~4095, -4096)
"""


async def test_frames_and_memory_hold_no_other_job(sandbox: LocalSandbox) -> None:
    told = "print('SECRET_OF_ANOTHER_JOB', input())"
    for _ in range(3):
        await run(
            sandbox,
            told,
            "['SECRET_VALUE', other]",
            inputs={"other": "SECRET_INPUT"},
            stdin="SECRET_STDIN\n",
        )
    ended = await run(sandbox, READ_ALL_MEMORY, "[len(frames) > 3, looked > 5_000_000, found]")
    assert (ended.verdict, ended.value) == ("ok", [True, True, []])


async def test_the_environment_and_the_stack_hold_no_secret(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HONE_TEST_MARKER", "marker-of-the-service")
    code = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.getauxval.restype = ctypes.c_ulong
start = libc.getauxval(31) - 2000
stack = ctypes.string_at(start, 2000)
"""
    seen = "[b'marker-of' in stack, b'PYTHONHASHSEED' in stack, sorted(os.environ)]"
    async with started(LocalSandbox(isolated=True, num_slots=1)) as other:
        ended = await run(other, code, seen)
    assert ended.value == [
        False,
        True,
        ["HOME", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH"],
    ]


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)"])
async def test_a_program_that_does_not_end_is_stopped_at_its_time_limit(
    sandbox: LocalSandbox, code: str
) -> None:
    ended = await run(sandbox, code, timeout_s=0.15)
    assert ended.verdict == "time_limit"
    assert 0.15 <= ended.wall_s < 3.0
    await nothing_is_left(sandbox)


async def test_exactly_as_much_output_as_is_kept_is_fine(sandbox: LocalSandbox) -> None:
    assert (await run(sandbox, "print('x' * 65535)")).verdict == "ok"
    assert (await run(sandbox, "print('x' * 65536)")).verdict == "output_limit"


async def test_what_it_sees_of_the_host_is_mounted_read_only_without_set_uid(
    sandbox: LocalSandbox,
) -> None:
    expression = (
        "[os.statvfs(path).f_flag & 3 for path in ('/', '/usr', '/etc/passwd', "
        "'/dev/null', os.__file__)]"
    )
    assert (await run(sandbox, "import os", expression)).value == [3] * 5


async def test_each_slot_has_namespaces_of_its_own(sandbox: LocalSandbox) -> None:
    await until_processes_are(PROCESSES_PER_SLOT)
    _, inside, _ = processes_of(os.getpid())
    for kind in ("user", "pid", "mnt", "net", "ipc", "uts"):
        assert (
            Path(f"/proc/{inside}/ns/{kind}").readlink() != Path(f"/proc/self/ns/{kind}").readlink()
        ), kind


async def test_what_is_inside_dies_with_the_process_outside(sandbox: LocalSandbox) -> None:
    outside = processes_of(os.getpid())[0]
    os.kill(outside, signal.SIGKILL)
    await until_processes_are(0)
    assert (await run(sandbox, "", "6 * 7")).value == 42


async def test_unsafe_ends_what_a_program_leaves_running_and_removes_its_folder() -> None:
    killed = await asyncio.create_subprocess_exec("true")
    await killed.wait()
    of_a_killed_service = Path(f"/tmp/hone-unsafe-{killed.pid}-x")
    of_a_killed_service.mkdir()
    async with started(LocalSandbox(isolated=False, num_slots=1)) as unsafe:
        assert not of_a_killed_service.exists()
        code = "import os, subprocess; sleeping = subprocess.Popen(['/bin/sleep', '60'])"
        ended = await run(unsafe, code, "[sleeping.pid, os.getcwd()]")
    assert ended.verdict == "ok"
    assert not is_alive(ended.value[0])
    assert not Path(ended.value[1]).exists()


async def test_without_isolation_a_program_that_kills_its_slot_has_failed() -> None:
    async with started(LocalSandbox(isolated=False, num_slots=1)) as unsafe:
        ended = await run(unsafe, "import os; os.kill(os.getppid(), 9)")
        after = await run(unsafe, "", "6 * 7")
    assert (ended.verdict, after.value) == ("runtime_error", 42)


async def test_unsafe_slots_that_are_just_forking_end_at_once() -> None:
    unsafe = LocalSandbox(isolated=False, num_slots=8)
    await unsafe.start()
    await unsafe.run([ExecuteRequest(expression=f"{number}") for number in range(8)])
    start = time.monotonic()
    await unsafe.close()
    assert time.monotonic() - start < STOP_DEADLINE_S, "none had to be killed"
    assert list(Path("/tmp").glob(f"hone-unsafe-{os.getpid()}-*")) == []


async def test_the_same_program_gives_the_same_result_in_every_process(
    sandbox: LocalSandbox,
) -> None:
    request = ExecuteRequest(
        code="import random", expression="[random.random(), hash('x'), list({'a', 'b', 'c'})]"
    )
    first = (await sandbox.execute(request)).value
    async with started(LocalSandbox(isolated=True, num_slots=1)) as other:
        assert (await other.execute(request)).value == first


async def test_a_killed_slot_is_started_again_and_the_next_job_is_right(
    sandbox: LocalSandbox,
) -> None:
    kill(os.getpid())
    assert (await run(sandbox, "", "6 * 7")).value == 42
    await nothing_is_left(sandbox)


async def test_a_slot_killed_during_a_job_costs_a_retry_and_no_wrong_result(
    sandbox: LocalSandbox,
) -> None:
    running = visibly_running(sandbox, 1)
    await until_processes_are(PROCESSES_PER_SLOT + 1)
    kill(os.getpid())
    assert ((await running).verdict, (await running).value) == ("ok", 7)
    await nothing_is_left(sandbox)


async def test_a_program_killed_from_outside_is_run_again_and_its_slot_lives_on(
    sandbox: LocalSandbox,
) -> None:
    running = visibly_running(sandbox, 1)
    await until_processes_are(PROCESSES_PER_SLOT + 1)
    slot, program = processes_of(os.getpid())[1:3]
    os.kill(program, signal.SIGKILL)
    assert ((await running).verdict, (await running).value) == ("ok", 7)
    await nothing_is_left(sandbox)
    assert processes_of(os.getpid())[1] == slot


async def test_a_child_killed_while_it_waits_for_its_program_costs_a_retry(
    sandbox: LocalSandbox,
) -> None:
    await nothing_is_left(sandbox)
    await until_processes_are(PROCESSES_PER_SLOT)
    os.kill(processes_of(os.getpid())[2], signal.SIGKILL)
    assert (await run(sandbox, "", "6 * 7")).value == 42
    await nothing_is_left(sandbox)


async def test_a_program_that_sleeps_is_ended_long_before_its_limit_of_wall_time(
    sandbox: LocalSandbox,
) -> None:
    if "whole programs" not in sandbox.report()["limits"]:
        pytest.skip("needs a cgroup for each slot")
    sleeping = await run(sandbox, "import time; time.sleep(60)", idle_s=0.3, timeout_s=30)
    assert (sleeping.verdict, sleeping.wall_s < 10) == ("time_limit", True)
    assert "a program may idle for 0.3 s" in sleeping.stderr


async def test_the_limit_of_cpu_time_holds_whatever_the_wall_clock_says(
    sandbox: LocalSandbox,
) -> None:
    spinning = await run(sandbox, "while True: pass", cpu_s=0.3, timeout_s=30)
    assert spinning.verdict == "time_limit"
    assert 0.25 <= spinning.cpu_s < 0.6
    threads = (
        "import threading\n"
        "for _ in range(4): threading.Thread(target=lambda: [0 for _ in iter(int, "
        "1)]).start()"
    )
    assert 0.25 <= (await run(sandbox, threads, cpu_s=0.3, timeout_s=30)).cpu_s < 0.8
    sleeping = await run(sandbox, "import time; time.sleep(0.3)", cpu_s=0.2, timeout_s=30)
    assert sleeping.verdict == "ok"
    assert sleeping.wall_s >= 0.3 and sleeping.cpu_s < 0.2


async def test_no_clock_runs_while_a_program_waits_for_its_input(sandbox: LocalSandbox) -> None:
    """On a busy machine 100 MB take longer to hand over than the program may take in all."""
    ended = await run(
        sandbox,
        "import os",
        "os.fstat(0).st_size",
        stdin="x" * (100 << 20),
        timeout_s=0.5,
        idle_s=0.5,
    )
    assert (ended.verdict, ended.value) == ("ok", 100 << 20)


async def test_a_slot_killed_twice_is_a_sandbox_error(sandbox: LocalSandbox) -> None:
    running = visibly_running(sandbox, 5, timeout_s=10, idle_s=10)
    for _ in range(2):
        await until_processes_are(PROCESSES_PER_SLOT + 1)
        killed = set(processes_of(os.getpid()))
        kill(os.getpid())
        while killed & set(processes_of(os.getpid())):
            await asyncio.sleep(0.01)
    ended = await running
    assert ended.verdict == "sandbox_error"
    assert ended.stderr.startswith("the sandbox failed twice: its process was ended by SIG")
    assert (await run(sandbox, "", "6 * 7")).value == 42
    await nothing_is_left(sandbox)


async def test_a_program_that_could_not_begin_is_a_sandbox_error_and_not_a_wrong_answer(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = ProgramExit(
        began=False,
        exit=125,
        limit=None,
        wall_s=0.1,
        cpu_s=0.0,
        overflow=False,
        stdout="",
        stderr="capset(none): Operation not permitted",
        result="",
    )

    async def run_nothing(*_: Any) -> ProgramExit:
        return facts

    monkeypatch.setattr(Slot, "run", run_nothing)
    ended = await run(sandbox, "", "1")
    assert ended.verdict == "sandbox_error"
    assert ended.stderr == (
        "the sandbox failed twice: a program could not be started: capset(none): Operation not "
        "permitted"
    )


async def test_a_cancelled_job_is_killed_and_its_slot_is_free(sandbox: LocalSandbox) -> None:
    running = asyncio.create_task(run(sandbox, "while True: pass", timeout_s=30))
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await asyncio.wait_for(run(sandbox, "", "1 + 1"), 5)).value == 2
    await nothing_is_left(sandbox)
