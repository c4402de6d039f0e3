"""No program chooses that its reward is missing: whatever a generated program does to itself, its
end is its own."""

from __future__ import annotations

import asyncio
import textwrap
from collections import Counter
from random import Random

import pytest

from services.reward.sandbox.local import LocalSandbox
from shared.wire import ExecuteRequest, Part
from tests.support.program_family import program
from tests.support.reward_helpers import grade

SLOTS = 8

pytestmark = pytest.mark.slow

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
