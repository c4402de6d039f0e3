"""`multi` and its formula, with values by hand."""

from __future__ import annotations

from typing import Any

import pytest

from services.reward.graders.multi import FormulaError, parse
from services.reward.grading import registry
from services.reward.grading.failures import GradingFailed
from services.reward.grading.registry import GraderTools
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire import Execution, ScoreItem
from tests.support.reward_helpers import ScriptedSandbox, tools_of


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("a", 2.0),
        ("0.8 * a + 0.2 * b", 2.2),
        ("-a ** 2 + +b", -1.0),
        ("(a + b) / 2", 2.5),
        ("min(a, b, 1) + max(a, b)", 4.0),
        ("abs(a - b) + floor(2.7) + ceil(2.1)", 6.0),
        ("sqrt(a * 8) + exp(0) + log(1)", 5.0),
    ],
)
def test_a_formula_is_arithmetic_over_names(source: str, value: float) -> None:
    assert parse(source).value({"a": 2.0, "b": 3.0}) == pytest.approx(value)


@pytest.mark.parametrize(
    "source",
    [
        "",
        "a +",
        "a.b",
        "a[0]",
        "'x'",
        "True",
        "a and b",
        "a < b",
        "lambda: 1",
        "[a]",
        "open('x')",
        "__import__('os')",
        "min(*a)",
        "max(a, key=b)",
        "a; b",
        "a if b else 1",
        "(a := 1)",
        "f'{a}'",
        "a % b",
        "a // b",
        "1" * 2000,
        "(" * 300 + ")" * 300,
        "1j",
    ],
)
def test_anything_else_is_no_formula(source: str) -> None:
    with pytest.raises(FormulaError):
        parse(source)


@pytest.mark.parametrize(
    "source",
    [
        "1 / a",
        "log(a)",
        "sqrt(a - 1)",
        "10 ** 1000 ** (a + 1)",
        "(a - 1) ** 0.5",
        "min()",
        "min(1)",
    ],
)
def test_a_formula_without_a_finite_value_says_so(source: str) -> None:
    with pytest.raises(FormulaError):
        parse(source).value({"a": 0.0})


def string_check(reference: str) -> dict[str, Any]:
    return {
        "type": "string_check",
        "name": "x",
        "input": "{{ sample.output_text }}",
        "reference": reference,
        "operation": "eq",
    }


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"graders": {"a": string_check("x")}, "calculate_output": "a + c"},
            "calculate_output names 'c'; its graders are a",
        ),
        (
            {"graders": {"a": string_check("x")}, "calculate_output": "a.b"},
            "'a.b' is not allowed in a formula",
        ),
        (
            {"graders": {"a": {"type": "multi"}}, "calculate_output": "a"},
            "grader 'a' has type 'multi'; expected one of label_model",
        ),
        (
            {"graders": {"a": string_check("x") | {"operatoin": 1}}, "calculate_output": "a"},
            "unknown key 'operatoin'",
        ),
        (
            {"graders": {"a": string_check("{{ item.y }}")}, "calculate_output": "a"},
            "no column 'y'",
        ),
    ],
)
async def test_a_multi_that_cannot_work_is_refused(
    scripted_tools: GraderTools, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        await registry.bind(RewardSpec(grader="multi", params=params), scripted_tools).check(["x"])
    assert message in caught.value.detail


async def test_a_failing_part_or_formula_is_missing_under_its_name() -> None:
    python = {"type": "python", "name": "p", "source": "def grade(sample, item): ..."}
    failing = tools_of(ScriptedSandbox(Execution(verdict="runtime_error", stderr="boom")))
    item = ScoreItem(prompt="", completion="x")
    cases = [
        ({"a": string_check("x"), "p": python}, "a + p", "python_grader_runtime_error"),
        ({"a": string_check("y")}, "1 / a", "formula_parse_error"),
    ]
    for graders, formula, error in cases:
        spec = RewardSpec(grader="multi", params={"graders": graders, "calculate_output": formula})
        with pytest.raises(GradingFailed) as caught:
            await registry.bind(spec, failing).grade([item])
        assert caught.value.errors == (error,)
