"""Texts of all kinds against the grader of code: none earns 1 or chooses to be missing, and none
holds up the service."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator

import pytest

from services.reward.graders.code_tests import candidate
from services.reward.graders.code_tests.tests import read
from services.reward.grading import registry
from services.reward.grading.calling import Caller
from services.reward.grading.failures import GradingFailed
from services.reward.grading.programs import program_of, programs_in
from services.reward.grading.registry import GraderTools
from shared.job import RewardSpec
from shared.wire import ScoreItem
from tests.support.texts import HUGE_CHARS, texts

SLOTS = 4

MAX_STALL_S = 0.5
"""Of CPU time of the loop's thread between two of its turns: of a busy machine it has no more."""

ROWS = (
    {"tests": "assert f(7) == 91823645\nassert f(8) != f(7)"},
    {"tests": "for x in (7, 8):\n    assert f(x) == 91823645 + x"},
    {"tests": [{"input": "7\n", "output": "91823645"}]},
    {"tests": {"fn_name": "f", "inputs": [[7]], "outputs": [91823645]}},
)
HOSTILE = {
    "a power": (
        "assert 2 ** f(7) == 8",
        "from fractions import Fraction\nf = lambda x: Fraction(10**10)",
    ),
    "a number": ("assert str(f(7)) == 'a'", "f = lambda x: 7 ** 200000"),
    "many parts": (
        "assert sorted(f(7)) == f(7)[::-1]",
        "f = lambda x: [[i] for i in range(15000)]",
    ),
    "deep": (
        "assert f(7) == [[]]",
        "def f(x):\n    a = []\n    for _ in range(46): a = [a]\n    return a",
    ),
    "its own result": (
        "assert f(7) == 1",
        "import os, json\ntext = json.dumps({'end': 'ok', 'value': [[]] * 60000})\n"
        "os.pwrite(3, text.encode(), 0)\nos._exit(0)",
    ),
    "a great decimal": (
        "assert int(f(7) ** 900) == 1",
        "from decimal import Decimal\nf = lambda x: Decimal('1E1000')",
    ),
    "a long number": ("assert int(str(f(7)) * 5) == 1", "f = lambda x: 7**230000"),
    "fences": ("assert f(7) == 1", "```\n" * (HUGE_CHARS // 4)),
    "fences after a thought": ("assert f(7) == 1", "</think>\n" + "```\n" * (HUGE_CHARS // 4)),
    "fences of python": ("assert f(7) == 1", "```python\n" * (HUGE_CHARS // 10)),
}


def caller_of(tools: GraderTools, **params: float) -> Caller:
    spec = RewardSpec(grader="code_tests", params={"cpu_s": 0.5, **params})
    return Caller(registry.bind(spec, tools))


@contextlib.asynccontextmanager
async def loop_watched() -> AsyncGenerator[list[float]]:
    """Yields a list that will have the longest stall of this loop, in seconds of CPU time."""
    stalls = [0.0]

    async def watch() -> None:
        while True:
            before_s = time.thread_time()
            await asyncio.sleep(0)  # one turn of all others
            stalls[0] = max(stalls[0], time.thread_time() - before_s)
            await asyncio.sleep(0.001)

    watching = asyncio.create_task(watch())
    try:
        yield stalls
    finally:
        watching.cancel()


def test_5000_texts_are_read_and_none_takes_long() -> None:
    tests = [read(row["tests"], None, None, "", "") for row in ROWS]
    longest_s = 0.0
    for number, text in enumerate(texts(5000)):
        start_s = time.thread_time()
        programs = programs_in(text)
        program = program_of(text, tests[number % len(tests)].fit)
        longest_s = max(longest_s, time.thread_time() - start_s)
        assert program in programs and programs
    assert longest_s < 2.0  # of processor time; what grows with the square takes minutes


async def no_text_earns(tools: GraderTools, count: int, seed: int) -> Counter[str]:
    items = [
        ScoreItem(prompt=str(number // 16), completion=text, row=ROWS[number % len(ROWS)])
        for number, text in enumerate(texts(count, seed))
    ]
    async with loop_watched() as stalls:
        parts = await caller_of(tools).grade(items)
    wrong = {at: part for at, part in enumerate(parts) if part.value != 0.0}
    assert wrong == {} and len(parts) == count
    assert stalls[0] < MAX_STALL_S
    return Counter(part.verdict for part in parts)


async def test_no_text_earns_anything_or_stalls_the_loop(tools: GraderTools) -> None:
    verdicts = await no_text_earns(tools, 200, seed=1)
    assert {*verdicts} <= {"runtime_error", "wrong", "time_limit", "memory_limit", "output_limit"}


@pytest.mark.soak
async def test_none_of_20_000_texts_earns_anything_or_stalls_the_loop(tools: GraderTools) -> None:
    for seed in range(20):
        await no_text_earns(tools, 1000, seed)


@pytest.mark.parametrize("name", HOSTILE)
async def test_16_hostile_programs_leave_the_loop_to_4_honest_ones(
    name: str, tools: GraderTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidate, "JUDGING_CPU_S", 0.5)  # all 16 of some take all they may
    tests, program = HOSTILE[name]
    row = {"tests": "assert f(7) == 8"}
    hostile = [
        ScoreItem(prompt="", completion=f"{program}\n# {at}", row={"tests": tests})
        for at in range(16)
    ]
    honest = [
        ScoreItem(prompt="", completion=f"def f(x): return x + 1\n# {at}", row=row)
        for at in range(4)
    ]
    async with loop_watched() as stalls:
        parts = await caller_of(tools).grade([*hostile, *honest])
    assert [part.value for part in parts] == [0.0] * 16 + [1.0] * 4, parts
    assert stalls[0] < MAX_STALL_S


CHAINED = "\n".join([f"assert ''{'.lower()' * 120} == f(1)"] * 6)


@pytest.mark.parametrize(
    "row",
    [
        {"tests": CHAINED},
        {"tests": ["assert f(1) == 1"] * 30, "setup": "x = 1\n" * 8000},
    ],
)
async def test_no_row_stalls_the_loop(row: dict[str, object], tools: GraderTools) -> None:
    spec = RewardSpec(grader="code_tests", params={"setup": "setup"})
    grader = registry.bind(spec, tools)
    async with loop_watched() as stalls:
        await asyncio.sleep(0.01)  # the watch begins
        with contextlib.suppress(GradingFailed):
            await grader.check_row({"setup": "", **row})
        await asyncio.sleep(0.01)  # and sees the last turn
    assert stalls[0] < MAX_STALL_S
