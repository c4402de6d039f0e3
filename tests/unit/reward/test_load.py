"""The sandbox under load and over time: each verdict right with hostile neighbours, nothing that
grows, kills in the middle, and no program that chooses that its reward is missing: whatever a
generated one does to itself, its end is its own."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import textwrap
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from services.reward.sandbox.host import Groups
from services.reward.sandbox.local import LocalSandbox
from shared.errors import Failed
from shared.wire import ExecuteRequest, Part
from tests.support.program_family import program
from tests.support.reward_helpers import grade, processes_of, running_sandbox

pytestmark = pytest.mark.slow

NUM_SLOTS = 8
NUM_IN_BATCH, NUM_KILLS = 64, 3

HOSTILE: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("while True: pass", {"cpu_s": 0.1}, ("time_limit",)),
    ("import time; time.sleep(60)", {"timeout_s": 0.3}, ("time_limit",)),
    ("x = bytearray(8 << 30)", {"memory_mib": 64}, ("memory_limit",)),
    ("while True: print('x' * 100_000)", {}, ("output_limit",)),
    (
        "import os\nwhile True: os.fork()",
        {"timeout_s": 1, "cpu_s": 0.5},
        ("runtime_error", "time_limit"),
    ),
    ("import os\nfor pid in (0, -1, 1): os.kill(pid, 9)", {}, ("ok", "runtime_error")),
    ("import os; os._exit(0)", {}, ("runtime_error",)),
    ("import ctypes; ctypes.string_at(0)", {}, ("runtime_error",)),
    ("import os\nos.write(3, b'x' * 300_000)", {}, ("runtime_error",)),
    (
        "import subprocess\nsubprocess.Popen(['/bin/sleep', '60'], start_new_session=True)\nimport "
        "os; os._exit(3)",
        {},
        ("runtime_error",),
    ),
    ("open('/tmp/left', 'w').write('x' * (1 << 20))\nraise SystemExit(1)", {}, ("runtime_error",)),
    (
        "import os\nfor fd in range(64):\n try: os.close(fd)\n except OSError: pass",
        {},
        ("runtime_error",),
    ),
]


@dataclass(frozen=True)
class Standing:
    """What must not grow with the number of jobs."""

    processes: int
    descriptors: int
    slot_descriptors: int
    slot_bytes: int


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncGenerator[LocalSandbox]:
    async with running_sandbox(NUM_SLOTS) as sandbox:
        yield sandbox
    assert [
        folder
        for parent in set(Groups.find().parents.values())
        for folder in parent.glob(f"hone-slot-{os.getpid()}-*")
    ] == []


async def standing(num_slots: int) -> Standing:
    """Waits until every slot has forked its next child."""
    async with asyncio.timeout(90):
        while len(processes_of(os.getpid())) != 3 * num_slots:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
    pids = processes_of(os.getpid())
    sizes = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return Standing(
        processes=len(pids),
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        slot_descriptors=sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids),
        slot_bytes=sum(sizes) * os.sysconf("SC_PAGESIZE"),
    )


@pytest.mark.parametrize("num_jobs", [160, pytest.param(2000, marks=pytest.mark.soak)])
async def test_a_tenth_hostile_and_every_verdict_is_right_and_nothing_is_left(
    sandbox: LocalSandbox, num_jobs: int
) -> None:
    before = await standing(NUM_SLOTS)
    rng = random.Random(0)
    places = asyncio.Semaphore(NUM_SLOTS)

    async def good(number: int) -> bool:
        async with places:
            code = (
                "import os\nfound = os.listdir('/tmp')\n"
                f"open('/tmp/mine', 'w').write('{number}')\nprint({number})"
            )
            ended = await sandbox.execute(
                ExecuteRequest(
                    code=code, expression=f"[found, {number} ** 2, open('/tmp/mine').read()]"
                )
            )
            return (ended.verdict, ended.value, ended.stdout) == (
                "ok",
                [[], number**2, str(number)],
                f"{number}\n",
            )

    async def hostile() -> bool:
        async with places:
            code, limits, verdicts = rng.choice(HOSTILE)
            ended = await sandbox.execute(ExecuteRequest(code=code, expression="15", **limits))
            return ended.verdict in verdicts and (ended.verdict == "ok" or ended.value is None)

    right = await asyncio.gather(
        *(hostile() if number % 10 == 5 else good(number) for number in range(num_jobs))
    )
    assert [number for number, is_right in enumerate(right) if not is_right] == []
    after = await standing(NUM_SLOTS)
    assert (after.processes, after.descriptors, after.slot_descriptors) == (
        before.processes, before.descriptors, before.slot_descriptors,
    )  # fmt: skip
    assert after.slot_bytes < before.slot_bytes + NUM_SLOTS * (2 << 20)


@pytest.mark.parametrize("num_rounds", [8, pytest.param(125, marks=pytest.mark.soak)])
async def test_a_slot_does_not_grow_and_gives_the_same_result_each_time(
    sandbox: LocalSandbox, num_rounds: int
) -> None:
    code = (
        "import hashlib, random, time\n"
        "values = [random.random() for _ in range(10)] + sorted({'b', 'a', 'c'}) + "
        "[hash('x')]"
    )
    request = ExecuteRequest(code=code, expression="values")

    async def digest() -> str:
        return hashlib.sha256(
            json.dumps((await sandbox.execute(request)).value).encode()
        ).hexdigest()

    first = {await digest() for _ in range(NUM_SLOTS * 3)}
    before = await standing(NUM_SLOTS)
    digests = set(first)
    for _ in range(num_rounds):
        digests |= set(await asyncio.gather(*(digest() for _ in range(NUM_SLOTS))))
    after = await standing(NUM_SLOTS)
    assert len(digests) == 1
    assert after.slot_descriptors == before.slot_descriptors
    assert after.slot_bytes < before.slot_bytes + NUM_SLOTS * (1 << 20)


def _slot(pid: int) -> str:
    """Returns the namespace of users that tells a slot's processes; "" once it has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/user").readlink())
    except OSError:
        return ""


@pytest.mark.parametrize("which", ["the warm parent", "the process outside", "a program"])
async def test_each_program_of_a_batch_runs_once_though_processes_are_killed(
    sandbox: LocalSandbox, which: str
) -> None:
    await standing(NUM_SLOTS)
    slots = sorted({_slot(pid) for pid in processes_of(os.getpid())} - {""})
    requests = [
        ExecuteRequest(code=f"import time; time.sleep(0.05)\nprint({n})", expression=f"{n} + 1")
        for n in range(NUM_IN_BATCH)
    ]
    batch = asyncio.create_task(sandbox.run(requests))
    position = {"the process outside": 0, "the warm parent": 1, "a program": 2}[which]
    for slot in slots[:NUM_KILLS]:  # each once: a program that is killed twice is given up
        await asyncio.sleep(0.08)
        pids: list[int] = []
        while len(pids) <= position and not batch.done():
            await asyncio.sleep(0)
            pids = [pid for pid in processes_of(os.getpid()) if _slot(pid) == slot]
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(pids[position], signal.SIGKILL)
    ended = await batch
    assert [(run.verdict, run.value, run.stdout) for run in ended] == [
        ("ok", n + 1, f"{n}\n") for n in range(NUM_IN_BATCH)
    ]
    await standing(NUM_SLOTS)


async def test_programs_that_use_much_and_mean_no_harm_run(sandbox: LocalSandbox) -> None:
    programs: dict[str, tuple[str, str, Any]] = {
        "recursion": (
            "import sys, threading\nsys.setrecursionlimit(10 ** 6)\nf = lambda n: n and 1 + f(n - "
            "1)",
            "f(20_000)",
            20_000,
        ),
        "threads": (
            "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(4)",
            "sum(pool.map(lambda n: n * n, range(100)))",
            328350,
        ),
        "processes": (
            "import os\nr, w = os.pipe()\nif os.fork() == 0: os.write(w, b'child'); "
            "os._exit(0)\nos.wait()",
            "os.read(r, 9).decode()",
            "child",
        ),
        "much memory": (
            "x = bytearray(300 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1",
            "len(x) >> 20",
            300,
        ),
        "many files": (
            "for i in range(3000): open(f'/tmp/{i}', 'w').close()\nimport os",
            "len(os.listdir('/tmp'))",
            3000,
        ),
        "database": (
            "import sqlite3\nd = sqlite3.connect(':memory:')\nd.execute('create table t (x)')",
            "d.execute('select 1 + 1').fetchone()[0]",
            2,
        ),
        "queues": (
            "import asyncio\nasync def main():\n q = asyncio.Queue()\n await q.put(3)\n return "
            "await q.get()",
            "asyncio.run(main())",
            3,
        ),
    }
    for name, (code, expression, value) in programs.items():
        ended = await sandbox.execute(ExecuteRequest(code=code, expression=expression))
        assert (ended.verdict, ended.value) == ("ok", value), (name, ended)
    stdin = "line\n" * 10_000_000
    ended = await sandbox.execute(
        ExecuteRequest(code="import sys", expression="len(sys.stdin.buffer.read())", stdin=stdin)
    )
    assert (ended.verdict, ended.value) == ("ok", 50_000_000), ended


async def test_closing_with_programs_running_ends_them_and_starts_nothing_again(
    sandbox: LocalSandbox,
) -> None:
    await standing(NUM_SLOTS)
    before = processes_of(os.getpid())
    closed = LocalSandbox(isolated=True, num_slots=2)
    await closed.start()
    jobs = [
        asyncio.create_task(closed.execute(ExecuteRequest(code="import time; time.sleep(60)")))
        for _ in range(4)
    ]
    await asyncio.sleep(0.1)
    await closed.close()
    ended = await asyncio.gather(*jobs, return_exceptions=True)
    assert [type(end) for end in ended] == [Failed] * 4, ended
    assert processes_of(os.getpid()) == before


LIMITS = {"cpu_s": 0.1, "timeout_s": 0.5, "memory_mib": 64}
LOOP = "def check(candidate):\n    for x in range(3):\n        assert candidate(x) == x + 2\n"


async def endings(sandbox: LocalSandbox, programs: list[str]) -> Counter[str]:
    """Returns how often each verdict came, after showing that none is the sandbox's fault and that
    the slots still are right."""
    requests = [ExecuteRequest(code=code, expression="15", **LIMITS) for code in programs]
    ended = dict(zip(programs, await sandbox.run(requests), strict=True))
    assert {code: end for code, end in ended.items() if end.verdict == "sandbox_error"} == {}
    after = [ExecuteRequest(expression=f"{number} + 1") for number in range(8)]
    assert [end.value for end in await sandbox.run(after)] == list(range(1, 9))
    return Counter(end.verdict for end in ended.values())


async def test_no_program_of_a_family_chooses_that_it_is_missing(sandbox: LocalSandbox) -> None:
    programs = [program(Random(f"fast {number}")) for number in range(60)]
    verdicts = await endings(sandbox, programs)
    assert verdicts["runtime_error"] and verdicts["time_limit"]


async def test_no_program_of_a_family_leaves_a_grader_without_a_value(
    sandbox: LocalSandbox,
) -> None:
    async def graded(code: str, grader: str, row: dict[str, object], **params: object) -> Part:
        return await grade(sandbox, code, row, grader, **LIMITS | params)

    looped = {"style": "check", "entry_point": "name"}
    work = []
    for number in range(8):
        code = program(Random(f"graded {number}"))
        inside = f"def f(x):\n{textwrap.indent(code, '    ')}\n    return x + 2\n"
        for tested in (f"{code}\ndef f(x): return x + 2", inside):
            work.append(graded(tested, "code_tests", {"tests": ["assert f(1) == 3"]}))
            work.append(graded(tested, "code_tests", {"tests": LOOP, "name": "f"}, **looped))
        work.append(graded(f"{code}\n15", "python_value", {"target": 15}))
    parts = await asyncio.gather(*work)
    assert [part for part in parts if part.value is None] == []


@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))
async def test_no_program_of_a_large_family_chooses_that_it_is_missing(
    sandbox: LocalSandbox, part: int
) -> None:
    await endings(sandbox, [program(Random(f"{part} {number}")) for number in range(1000)])
