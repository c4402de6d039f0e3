"""MBPP's reference solutions, which others wrote, by MBPP's own tests: each earns 1, and on the
next problem's tests 0."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from services.reward.grading import registry
from services.reward.grading.calling import Caller
from services.reward.grading.registry import GraderTools
from shared.job import RewardSpec
from shared.wire import Part, ScoreItem

MBPP = Path(__file__).parents[4] / "shared" / "data" / "external" / "mbpp.jsonl"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MBPP.is_file(), reason="../shared/data/external has no mbpp.jsonl"),
]

SPEC = RewardSpec(
    grader="code_tests",
    params={"tests": "test_list", "setup": "test_setup_code", "timeout_s": 300, "cpu_s": 30},
)


def rows() -> list[dict[str, Any]]:
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


async def test_each_reference_solution_of_mbpp_passes_its_tests(tools: GraderTools) -> None:
    every = rows()
    parts = await graded(tools, {row["task_id"]: row["code"] for row in every}, every)
    assert {task: part.detail for task, part in parts.items() if part.value != 1.0} == {}


async def test_no_solution_of_another_problem_of_mbpp_passes(tools: GraderTools) -> None:
    every = rows()
    others = {row["task_id"]: other["code"] for row, other in itertools.pairwise(every)}
    parts = await graded(tools, others, [row for row in every[:-1] if row["task_id"] % 10 == 0])
    assert {task for task, part in parts.items() if part.value != 0.0} == set()
    assert len(parts) == 97
