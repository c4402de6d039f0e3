"""No program chooses that its reward is missing: whatever a generated program does to itself, its
end is its own."""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest

from services.reward.sandbox.local import LocalSandbox
from shared.wire import ExecuteRequest
from tests.support.program_family import program
from tests.support.reward_helpers import processes_of

LIMITS = {"cpu_s": 0.1, "timeout_s": 0.5, "memory_mib": 64}


async def endings(programs: list[str]) -> Counter[str]:
    """Returns how often each verdict came, after showing that none is the sandbox's fault and that
    the slots still are right."""
    sandbox = LocalSandbox(isolated=True, num_slots=8)
    await sandbox.start()
    assert sandbox.problem() is None
    try:
        requests = [ExecuteRequest(code=code, expression="15", **LIMITS) for code in programs]
        ended = await sandbox.run(requests)
        by_code = dict(zip(programs, ended, strict=True))
        missing = {code: end for code, end in by_code.items() if end.verdict == "sandbox_error"}
        assert missing == {}
        after = [ExecuteRequest(expression=f"{number} + 1") for number in range(8)]
        assert [end.value for end in await sandbox.run(after)] == list(range(1, 9))
    finally:
        await sandbox.close()
    assert processes_of(os.getpid()) == []
    return Counter(end.verdict for end in ended)


async def test_no_program_of_a_family_chooses_that_it_is_missing() -> None:
    verdicts = await endings([program(Random(f"fast {number}")) for number in range(150)])
    assert set(verdicts) >= {"ok", "runtime_error", "time_limit", "memory_limit"}


@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))
async def test_no_program_of_a_large_family_chooses_that_it_is_missing(part: int) -> None:
    await endings([program(Random(f"{part} {number}")) for number in range(1000)])
