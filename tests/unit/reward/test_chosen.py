"""A completion that makes its grader fail has nothing to gain by it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from services.reward.grading import registry
from services.reward.grading.calling import Caller, with_failures_graded
from services.reward.grading.failures import GradingFailed
from services.reward.grading.registry import Grader, GraderTools
from shared.job import RewardSpec
from shared.wire import Part, ScoreItem


def check(reference: str) -> dict[str, Any]:
    return {
        "type": "string_check",
        "name": "x",
        "input": "{{ sample.output_text }}",
        "reference": reference,
        "operation": "like",
    }


async def graded(grader: Grader[Any], *completions: str, rows: tuple[int, ...] = ()) -> list[Part]:
    items = [
        ScoreItem(prompt="", completion=text, row={"n": rows[position] if rows else 0})
        for position, text in enumerate(completions)
    ]
    return await Caller(grader).grade(items)


def formula(tools: GraderTools, source: str, weight: float = 1.0) -> Grader[Any]:
    params = {"graders": {"a": check("a"), "b": check("b")}, "calculate_output": source}
    return registry.bind(RewardSpec(grader="multi", params=params, weight=weight), tools)


@pytest.mark.parametrize(
    ("source", "weight", "completions", "values"),
    [
        ("1 / a", 1.0, ("a", "x", "a"), [1.0, 0.0, 1.0]),
        ("log(a) - 3 * b", 1.0, ("a", "ab", "x"), [0.0, -3.0, -3.0]),
        ("log(a) - 3 * b", -1.0, ("ab", "ab", "x"), [-3.0, -3.0, 0.0]),
        ("1 / a", -1.0, ("a", "x"), [1.0, 1.0]),
        ("1 / a", 1.0, ("x", "y"), [None, None]),
        ("1 / a", 1.0, ("x",), [None]),
    ],
)
async def test_what_fails_alone_gets_the_least_of_its_row(
    scripted_tools: GraderTools,
    source: str,
    weight: float,
    completions: tuple[str, ...],
    values: list[float | None],
) -> None:
    parts = await graded(formula(scripted_tools, source, weight), *completions)
    assert [part.value for part in parts] == values


async def test_another_row_says_nothing_of_the_grader(scripted_tools: GraderTools) -> None:
    divided = formula(scripted_tools, "1 / a")
    parts = await graded(divided, "a", "x", "a", "x", rows=(1, 1, 2, 3))
    assert [part.value for part in parts] == [1.0, 0.0, 1.0, None]
    assert parts[1].errors == ("formula_parse_error",)
    assert "the grader fails on this text, not on others of its row" in parts[1].detail


@pytest.mark.parametrize(
    ("raised", "value"),
    [
        (GradingFailed("no", "model_grader_server_error"), None),
        (GradingFailed("no", "other_error"), None),
        (GradingFailed("no", "model_grader_parse_error"), 0.0),
        (GradingFailed("no", "model_grader_refusal_error"), 0.0),
        (IndexError("a bug"), 0.0),
        (OSError("no space left"), None),
        (MemoryError(), None),
    ],
)
async def test_failures_of_a_host_stay_missing_and_those_of_a_text_earn_the_least(
    scripted_tools: GraderTools, raised: Exception, value: float | None
) -> None:
    class Raising(Grader[registry.Params]):
        name = "raising"
        items_per_call = 1

        async def grade(self, items: Any) -> list[Part]:
            if items[0].completion == "x":
                raise raised
            return [Part(value=1.0)]

    grader = Raising(RewardSpec(grader="multi"), registry.Params(), scripted_tools)
    assert [part.value for part in await graded(grader, "a", "x")] == [1.0, value]


async def test_a_value_beyond_all_bounds_is_no_way_out(scripted_tools: GraderTools) -> None:
    parts = await graded(formula(scripted_tools, "1 - 1e31 * b"), "a", "b")
    assert [part.value for part in parts] == [1.0, 0.0]
    assert "the value is -1e+31; expected one from -1e+30 to 1e+30" in parts[1].detail


async def test_an_answer_of_nothing_but_separators_is_a_wrong_one(
    scripted_tools: GraderTools,
) -> None:
    grader = registry.bind(RewardSpec(grader="math"), scripted_tools)
    texts = (r"\boxed{,\text{or},}", r"\boxed{; ;\;}", r"\boxed{{,;~}}", r"\boxed{(, ; ~)}")
    items = [ScoreItem(prompt="", completion=text, row={"answer": "5, 6"}) for text in texts]
    assert [part.value for part in await Caller(grader).grade(items)] == [0.0] * len(items)


def test_many_failures_of_long_rows_stall_no_one(scripted_tools: GraderTools) -> None:
    math = registry.bind(RewardSpec(grader="math"), scripted_tools)
    row = {"answer": "5" * 3000, "tests": ["a" * 50] * 50}
    item = ScoreItem(prompt="p" * 2000, completion="x", row=row).model_dump_json()
    items = [ScoreItem.model_validate_json(item) for _ in range(2048)]
    failed = Part(value=None, verdict="error", errors=("python_grader_runtime_error",))
    parts = [failed if position % 2 else Part(value=1.0) for position in range(len(items))]
    start = time.process_time()
    graded = with_failures_graded(math, items, parts)
    assert time.process_time() - start < 4  # 15 s where each is compared with each
    assert [part.value for part in graded] == [1.0, 0.0] * 1024
