"""Right programs earn 1: 200 (`tests/support/right_programs.py`) however they are tested, MBPP's
reference solutions, which others wrote, by MBPP's own tests and not by the next problem's, and
those beside hung ones of their group, which earn 0."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from services.reward.grading import registry
from services.reward.grading.calling import Caller
from services.reward.grading.registry import GraderTools
from services.reward.sandbox.host import Groups
from shared.job import RewardSpec
from shared.wire import Part, ScoreItem
from tests.support import contest_programs
from tests.support.hung_programs import HUNG
from tests.support.reward_helpers import running_tools
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


MBPP = Path(__file__).parents[4] / "shared" / "data" / "external" / "mbpp.jsonl"

with_mbpp = pytest.mark.skipif(
    not MBPP.is_file(), reason="../shared/data/external has no mbpp.jsonl"
)

SPEC = RewardSpec(
    grader="code_tests",
    params={"tests": "test_list", "setup": "test_setup_code", "timeout_s": 300, "cpu_s": 30},
)


def rows_of_mbpp() -> list[dict[str, Any]]:
    found = [json.loads(line) for line in MBPP.read_text().splitlines()]
    assert len(found) == 974
    return found


async def graded(tools: GraderTools, programs: dict[int, str], tests: list[Any]) -> dict[int, Part]:
    """Returns the parts by MBPP's numbers of the problems."""
    items = [
        ScoreItem(
            prompt=str(row["task_id"]),
            completion=programs[row["task_id"]],
            row={name: row[name] for name in ("test_list", "test_setup_code")},
        )
        for row in tests
    ]
    caller = Caller(registry.bind(SPEC, tools))
    parts = await caller.grade(items)
    return {row["task_id"]: part for row, part in zip(tests, parts, strict=True)}


@with_mbpp
async def test_each_reference_solution_of_mbpp_passes_its_tests(tools: GraderTools) -> None:
    every = rows_of_mbpp()
    parts = await graded(tools, {row["task_id"]: row["code"] for row in every}, every)
    assert {task: part.detail for task, part in parts.items() if part.value != 1.0} == {}


@with_mbpp
async def test_no_solution_of_another_problem_of_mbpp_passes(tools: GraderTools) -> None:
    every = rows_of_mbpp()
    others = {row["task_id"]: other["code"] for row, other in itertools.pairwise(every)}
    parts = await graded(tools, others, [row for row in every[:-1] if row["task_id"] % 10 == 0])
    assert {task for task, part in parts.items() if part.value != 0.0} == set()
    assert len(parts) == 97


LIMITS = {"cpu_s": 0.4, "idle_s": 2, "memory_mib": 64}
TESTS = {
    "asserts": "assert f(7) == 7\nassert f(8) == 8",
    "loop": "for x in range(3):\n    assert f(x) == x",
    "stdio": [{"input": "7\n", "output": "7\n"}],
}
RIGHT_ONES = {"asserts": "def f(x): return x", "loop": "f = lambda x: x", "stdio": "print(input())"}


async def hung_ones_cost_right_ones_nothing(
    style: str, hung: dict[str, str], tools: GraderTools
) -> None:
    # Without cgroups wall time is all that ends most of them.
    spec = RewardSpec(grader="code_tests", params={**LIMITS, "timeout_s": 8})
    caller = Caller(registry.bind(spec, tools))
    right = {f"right {number}": f"{RIGHT_ONES[style]}\n# {number}" for number in range(8)}
    programs = hung | right
    items = [
        ScoreItem(prompt="p", completion=program, row={"tests": TESTS[style]})
        for program in programs.values()
    ]
    parts = await caller.grade(items)
    wanted = {name: float(name in right) for name in programs}
    found = {name: parts[at].value for at, name in enumerate(programs)}
    assert found == wanted, [part for part in parts if not part.value]


@pytest.mark.parametrize("style", TESTS)
async def test_hung_programs_cost_right_ones_nothing(style: str, tools: GraderTools) -> None:
    """Each program hangs in one style of tests."""
    hung = {name: HUNG[name] for name in [*HUNG][[*TESTS].index(style) :: len(TESTS)]}
    await hung_ones_cost_right_ones_nothing(style, hung, tools)


@pytest.mark.soak
@pytest.mark.parametrize("cgroups", [True, False])
@pytest.mark.parametrize("style", TESTS)
async def test_every_hung_program_costs_right_ones_nothing(
    style: str, cgroups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cgroups:
        monkeypatch.setattr(Groups, "make", lambda *_: None)
    async with running_tools(3) as tools:
        await hung_ones_cost_right_ones_nothing(style, HUNG, tools)
