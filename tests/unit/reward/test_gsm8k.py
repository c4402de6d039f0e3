"""The 1,319 test rows of GSM8K through `math`: the reference's answer earns 1 and a wrong one 0,
however it is written. Each form is tried on a quarter of the rows, and by `make soak` on all."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import AsyncGenerator, Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.reward.grading import registry
from services.reward.grading.registry import Grader
from shared.job import RewardSpec
from shared.wire import Execution, ScoreItem
from tests.support.reward_helpers import ScriptedSandbox, tools_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

FILE = Path(__file__).parents[2] / "data" / "gsm8k" / "test.jsonl.gz"
ROWS: list[dict[str, str]] = [
    json.loads(line) for line in gzip.decompress(FILE.read_bytes()).splitlines()
]

QUARTER = ROWS[::4]

FORMS: dict[str, Callable[[Fraction], str]] = {
    "hash": lambda n: f"So that is it.\n#### {n}",
    "hash with thousands separators": lambda n: f"#### {int(n):,}",
    "boxed": lambda n: f"Thus, the answer is $\\boxed{{{n}}}$.",
    "boxed with unit": lambda n: f"\\[\\boxed{{{n}\\text{{ eggs per day}}}}\\]",
    "boxed dollars": lambda n: f"\\boxed{{\\${int(n):,}}}",
    "boxed LaTeX thousands": lambda n: "\\boxed{" + f"{int(n):,}".replace(",", "{,}") + "}",
    "decimals": lambda n: f"\\boxed{{{n}.00}}",
    "fraction": lambda n: f"\\boxed{{\\frac{{{n}}}{{1}}}}",
    "equation": lambda n: f"#### {n - 3} + 3 = {n}",
    "sentence": lambda n: f"She has 3 and 4 left. The final answer is **{int(n):,}**.",
    "last number": lambda n: f"6 of 9 are left, so she pays **${n}** in total. I hope this helps!",
    "name": lambda n: f"#### x = {n}",
    "unit": lambda n: f"The sum is 5 and 7.\n#### {n} dollars",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def math() -> AsyncGenerator[Grader[Any]]:
    tools = tools_of(ScriptedSandbox(Execution(verdict="ok")))
    yield registry.bind(RewardSpec(grader="math"), tools)
    await tools.limited.close()


def answer_of(row: dict[str, str]) -> Fraction:
    return Fraction(row["answer"].rpartition("####")[2].strip().replace(",", ""))


async def values(
    math: Grader[Any], completions: list[str], rows: list[dict[str, str]] = ROWS
) -> list[float | None]:
    items = [
        ScoreItem(prompt="", completion=text, row=row)
        for text, row in zip(completions, rows, strict=True)
    ]
    return [part.value for part in await math.grade(items)]


async def test_the_data_is_whole() -> None:
    assert len(ROWS) == 1319
    assert all(answer_of(row).denominator == 1 for row in ROWS)


async def test_every_reference_solution_earns_one(math: Grader[Any]) -> None:
    assert await values(math, [row["answer"] for row in ROWS]) == [1.0] * 1319


WRONG: tuple[Callable[[Fraction], Fraction], ...] = (
    lambda n: n + 1,
    lambda n: -n - 1,
    lambda n: 10 * n + 3,
)


@pytest.mark.parametrize("shown", ["last line", "all lines", "all lines with annotations"])
async def test_a_solution_in_prose_earns_one_unless_it_ends_with_another_number(
    math: Grader[Any], shown: str
) -> None:
    """Such as "So they spend 2.75*4=$11 in the 4 hours". 1,270 do not."""
    solutions = [row["answer"].rpartition("####")[0].strip() for row in ROWS]
    if shown != "all lines with annotations":
        solutions = [re.sub(r"<<.*?>>", "", solution) for solution in solutions]
    if shown == "last line":
        solutions = [solution.splitlines()[-1] for solution in solutions]
    rewards = await values(math, solutions)
    assert rewards.count(1.0) >= 1265


@pytest.mark.parametrize("form", FORMS)
async def test_every_right_answer_earns_one_in_this_form(math: Grader[Any], form: str) -> None:
    texts = [FORMS[form](answer_of(row)) for row in QUARTER]
    assert await values(math, texts, QUARTER) == [1.0] * 330


@pytest.mark.parametrize("form", FORMS)
async def test_every_wrong_answer_earns_zero_in_this_form(math: Grader[Any], form: str) -> None:
    """One of the wrong answers for each row, in turn."""
    wrong = itertools.cycle(WRONG)
    texts = [FORMS[form](next(wrong)(answer_of(row))) for row in QUARTER]
    assert await values(math, texts, QUARTER) == [0.0] * 330


@pytest.mark.soak
@pytest.mark.parametrize("form", FORMS)
async def test_all_right_and_wrong_answers_earn_what_they_should(
    math: Grader[Any], form: str
) -> None:
    assert await values(math, [FORMS[form](answer_of(row)) for row in ROWS]) == [1.0] * 1319
    for wrong in WRONG:
        texts = [FORMS[form](wrong(answer_of(row))) for row in ROWS]
        assert await values(math, texts) == [0.0] * 1319


UNSOLVED: dict[str, Callable[[Fraction], str]] = {
    "an expression": lambda n: f"#### {n - 3} + 3",
    "a division": lambda n: f"\\boxed{{\\frac{{{3 * n}}}{{3}}}}",
    "a sum in a sentence": lambda n: f"The final answer is {n - 3} + 3.",
    "numbers in a row": lambda n: f"{n - 2} {n - 1} {n}",
}


@pytest.mark.parametrize("form", UNSOLVED)
async def test_an_answer_that_is_not_worked_out_earns_zero(math: Grader[Any], form: str) -> None:
    texts = [UNSOLVED[form](answer_of(row)) for row in QUARTER]
    earned = await values(math, texts, QUARTER)
    assert earned == [0.0] * 330
