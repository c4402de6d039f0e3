"""200 right programs (`tests/support/right_programs.py`) earn 1, however they are tested."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from services.reward.grading import registry
from services.reward.grading.calling import Caller
from services.reward.grading.registry import GraderTools
from shared.job import RewardSpec
from shared.wire import Part, ScoreItem
from tests.support import contest_programs
from tests.support.right_programs import COMPLETIONS, FENCES, READS, WAYS, WHOLE, rows

SLOTS = 4

pytestmark = pytest.mark.slow

STYLES = ("asserts", "loop", "check", "pytest", "calls", "stdio")


def test_there_are_200_programs_in_ten_ways_each() -> None:
    assert len(COMPLETIONS) == len(WHOLE) == 200
    assert len({*COMPLETIONS.values()} | {*WHOLE.values()}) == 400
    assert len(WAYS) == len(READS) == len(FENCES) == 10


async def missed(tools: GraderTools, items: dict[str, ScoreItem], **params: Any) -> dict[str, Part]:
    """Returns the parts of the programs that do not earn 1, by the programs' names."""
    # A host that is shared may take its time.
    spec = RewardSpec(grader="code_tests", params={**params, "timeout_s": 300, "idle_s": 100})
    caller = Caller(registry.bind(spec, tools))
    parts = await caller.grade([*items.values()])
    return {name: part for name, part in zip(items, parts, strict=True) if part.value != 1}


def programs(style: str, numbers: Iterable[int]) -> dict[str, ScoreItem]:
    """Returns the programs of these numbers with their task's tests in that style."""
    completions = WHOLE if style == "stdio" else COMPLETIONS
    items: dict[str, ScoreItem] = {}
    for name in ([*completions][number] for number in numbers):
        task = name.partition(",")[0]
        row = rows(task)[style]
        items[name] = ScoreItem(prompt=task, completion=completions[name], row=row)
    return items


def params_of(style: str) -> dict[str, str]:
    return {"entry_point": "entry"} if style == "check" else {}


async def test_200_right_programs_earn_1(tools: GraderTools) -> None:
    """Each in one style of tests: each way of writing a program meets each style."""
    for place, style in enumerate(STYLES):
        numbers = [number for number in range(200) if (number + number // 10) % 6 == place]
        assert await missed(tools, programs(style, numbers), **params_of(style)) == {}


@pytest.mark.soak
@pytest.mark.parametrize("style", STYLES)
async def test_200_right_programs_earn_1_in_each_style(style: str, tools: GraderTools) -> None:
    assert await missed(tools, programs(style, range(200)), **params_of(style)) == {}


async def test_contest_templates_and_what_their_functions_return_earn_1(tools: GraderTools) -> None:
    whole = {
        name: (code, [{"input": given, "output": wanted}])
        for name, (code, given, wanted) in contest_programs.WHOLE.items()
    }
    items = {
        name: ScoreItem(prompt="p", completion=f"```python\n{code}\n```", row={"tests": tests})
        for name, (code, tests) in {**whole, **contest_programs.FUNCTIONS}.items()
    }
    assert len(items) >= 100
    assert await missed(tools, items) == {}
