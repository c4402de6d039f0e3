"""Right programs beside hung ones of their group: the right ones earn 1, the others 0, and no one's
reward is missing."""

from __future__ import annotations

import pytest

from services.reward.grading import registry
from services.reward.grading.calling import Caller
from services.reward.grading.registry import GraderTools
from services.reward.sandbox.host import Groups
from shared.job import RewardSpec
from shared.wire import ScoreItem
from tests.support.hung_programs import HUNG
from tests.support.reward_helpers import running_tools

SLOTS = 3

pytestmark = pytest.mark.slow

LIMITS = {"cpu_s": 0.4, "idle_s": 2, "memory_mib": 64}
TESTS = {
    "asserts": "assert f(7) == 7\nassert f(8) == 8",
    "loop": "for x in range(3):\n    assert f(x) == x",
    "stdio": [{"input": "7\n", "output": "7\n"}],
}
RIGHT = {"asserts": "def f(x): return x", "loop": "f = lambda x: x", "stdio": "print(input())"}


async def hung_ones_cost_right_ones_nothing(
    style: str, hung: dict[str, str], tools: GraderTools
) -> None:
    # Without cgroups wall time is all that ends most of them.
    spec = RewardSpec(grader="code_tests", params={**LIMITS, "timeout_s": 8})
    caller = Caller(registry.bind(spec, tools))
    right = {f"right {number}": f"{RIGHT[style]}\n# {number}" for number in range(8)}
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
