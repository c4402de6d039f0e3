"""200 right programs (`tests/support/right_programs.py`) earn 1, however they are tested."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from itertools import groupby

import pytest
import pytest_asyncio

from services.reward.grading import registry
from services.reward.grading.calling import Caller, VerdictCache
from services.reward.grading.registry import GraderTools
from shared.job import RewardSpec
from shared.wire import Part, ScoreItem
from tests.support import contest_programs
from tests.support.reward_helpers import running_tools
from tests.support.right_programs import COMPLETIONS, FENCES, READS, WAYS, WHOLE, rows

pytestmark = pytest.mark.slow

STYLES = ("asserts", "loop", "check", "pytest", "calls", "stdio")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tools() -> AsyncGenerator[GraderTools]:
    async with running_tools(4) as made:
        yield made


def test_there_are_200_programs_in_ten_ways_each() -> None:
    assert len(COMPLETIONS) == len(WHOLE) == 200
    assert len({*COMPLETIONS.values()} | {*WHOLE.values()}) == 400
    assert len(WAYS) == len(READS) == len(FENCES) == 10


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("style", STYLES)
async def test_200_right_programs_earn_1(style: str, tools: GraderTools) -> None:
    params = {"entry_point": "entry"} if style == "check" else {}
    # A host that is shared may take its time.
    spec = RewardSpec(grader="code_tests", params={**params, "timeout_s": 300, "idle_s": 100})
    caller = Caller(registry.bind(spec, tools), VerdictCache(0))
    items: list[ScoreItem] = []
    names: list[str] = []
    completions = WHOLE if style == "stdio" else COMPLETIONS
    for task, of_task in groupby(completions.items(), key=lambda one: one[0].partition(",")[0]):
        row = rows(task)[style]
        for name, completion in of_task:
            names.append(name)
            items.append(ScoreItem(prompt=task, completion=completion, row=row))
    parts: dict[int, Part] = {}
    await caller.grade(items, parts.__setitem__)
    missed = {
        names[at]: (part.verdict, part.detail) for at, part in parts.items() if part.value != 1
    }
    assert missed == {} and len(parts) == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_contest_templates_and_what_their_functions_return_earn_1(tools: GraderTools) -> None:
    spec = RewardSpec(grader="code_tests", params={"timeout_s": 300, "idle_s": 100})
    caller = Caller(registry.bind(spec, tools), VerdictCache(0))
    programs = {
        name: (code, [{"input": given, "output": wanted}])
        for name, (code, given, wanted) in contest_programs.WHOLE.items()
    } | contest_programs.FUNCTIONS
    items = [
        ScoreItem(prompt="p", completion=f"```python\n{code}\n```", row={"tests": tests})
        for code, tests in programs.values()
    ]
    parts: dict[int, Part] = {}
    await caller.grade(items, parts.__setitem__)
    names = [*programs]
    missed = {names[at]: part for at, part in parts.items() if part.value != 1}
    assert missed == {} and len(parts) == len(programs) >= 100
