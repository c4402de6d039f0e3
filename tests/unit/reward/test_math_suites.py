"""`math` on many answers: of suites that others wrote (the cases of Math-Verify's own tests,
Apache-2.0, and answers of MATH-500, MIT, in other notations; their data is beside the repository,
where there is any), of the 1,319 test rows of GSM8K, and of pairs that are right or wrong by
construction (tests/data/answer_pairs.jsonl): a completion (`given`), a row's answer (`wanted`), and
whether it is `right`. The answers of these are laid out as in GSM8K, MATH, AIME and sets of science
questions; what is wrong differs in a sign, a digit, a unit, a name, an order or a bracket, says
more than the answer, or says nothing."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from services.reward.grading.registry import GraderTools
from tests.support.reward_helpers import Case, math_earned

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data"
EXTERNAL = ROOT.parent / "shared" / "data" / "external"


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


EXPRESSION = "policy: a row that is a plain number wants one, worked out"
FALSE = "policy: an equation that does not hold is no answer (7 = 11)"
ROUNDED = "policy: a decimal of fewer than 6 digits is no rounding of 1/3 or 8/3"
RIGHT = "the case is wrong: it wants 0 for an equal answer"
SIGN = "the case is wrong: it wants 1 for 1 + 1/e where the row has 1 - 1/e"

DISAGREEMENTS: dict[str, dict[tuple[str, str], str]] = {
    "math_verify": {
        ("$10$", "Answer \\( (9+1) \\)"): EXPRESSION,
        ("$1$", "$\\frac3{3} $"): EXPRESSION,
        ("$x = 11$", "$x = 5+5+1 = 7 =11$"): FALSE,
        (
            "$(\\begin{pmatrix}\\frac{1}{3}\\\\ \\frac{1}{5} \\end{pmatrix})$",
            "$\\begin{pmatrix}0.33\\\\0.2 \\end{pmatrix}$",
        ): ROUNDED,
        ("$(\\frac{3}{5},\\frac{8}{3}]$", "$(0.6,2.6667]$"): ROUNDED,
        ("$9$", "Answer $ \n 9 \n $"): RIGHT,
        # With another option of math-verify the suite has the same two texts as right.
        ("$x \\in [-2,7]$", "$-2 \\\\le x \\\\le 7$"): RIGHT,
        ("$1 - \\frac{1}{\\mathrm{e}}$", "$1 + \\frac{1}{\\mathrm{e}}$"): SIGN,
    },
    "math500_variants": {("90^\\circ", "\\boxed{90}"): RIGHT},
}
"""The row's answer, the completion, and why `math` says otherwise."""


@pytest.mark.parametrize(
    ("suite", "least"),
    [("math_verify", 0.95), pytest.param("math500_variants", 0.999, marks=pytest.mark.slow)],
)
async def test_math_agrees_with_a_suite_but_for_what_is_listed(
    scripted_tools: GraderTools, suite: str, least: float
) -> None:
    file = EXTERNAL / f"{suite}.jsonl"
    if not file.exists():
        pytest.skip(f"{suite}.jsonl is not beside the repository")
    cases: list[Case] = [(row["completion"], row["answer"], row["value"]) for row in read(file)]
    found = await math_earned(scripted_tools, cases)
    others = [
        (answer, completion)
        for (completion, answer, value), case in zip(found, cases, strict=True)
        if value != case[2]
    ]
    assert [one for one in others if one not in DISAGREEMENTS[suite]] == []
    assert 1 - len(others) / len(cases) >= least


CASES: dict[str, list[Case]] = {
    "markdown around an unmarked answer": [
        ("The total is **73**.", "73", 1),
        ("The total is **73.**", "73", 1),
        ("**The total is 73.**", "73", 1),
        ("**Answer:** 73", "73", 1),
        ("The total is *73*.", "73", 1),
        ("The total is __73__.", "73", 1),
        ("The total is `73`.", "73", 1),
        ("### Final Answer\n\n**73**", "73", 1),
        ("> 73", "73", 1),
        ("The total is <b>73</b>.", "73", 1),
        ("It costs \\$73.00 in total.", "73", 1),
        ("The cost is **\\$73**.", "73", 1),
        ("The total is **74**.", "73", 0),
    ],
    "a power or an index before a bracket": [
        (r"\boxed{\sin^2(x)}", r"1-\cos^2(x)", 1),
        (r"\boxed{\cos^{2}(30^\circ) + x}", r"x + \frac{3}{4}", 1),
        (r"\boxed{\sec^2\left(y\right)}", r"1+\tan^2 y", 1),
        (r"\boxed{\log_{10}(x)}", r"\frac{\ln x}{\ln 10}", 1),
        (r"\boxed{\log_2(8) x}", "3x", 1),
        (r"\boxed{\log_2(8) x}", "4x", 0),
        (r"\boxed{(2)(3)x}", "6x", 1),
        (r"\boxed{(2)(3)x}", "5x", 0),
    ],
    "several boxes": [
        (r"\boxed{1} and \boxed{-2}", "1, -2", 1),
        (r"\boxed{1} and \boxed{-2}", "-2", 0),
        (r"$x$ is \boxed{3} and $y$ is \boxed{4}", "(3, 4)", 1),
        (r"$x$ is \boxed{4} and $y$ is \boxed{3}", "(3, 4)", 0),
        (r"\boxed{5} and so \boxed{}", "5", 1),
        (r"\boxed{7}", r"so it is $\boxed 7$", 1),
    ],
    "relations and chains": [
        (r"\boxed{x = 5 + 5 + 1 = 11}", "x = 11", 1),
        (r"\boxed{x \approx 11}", "11", 1),
        (r"\boxed{-x > -1}", "x < 1", 1),
        (r"\boxed{-x > 1}", "x < 1", 0),
        (r"\boxed{x \in [-2, 7]}", r"-2 \le x \le 7", 1),
        (r"\boxed{x \in [-2, 7)}", r"-2 \le x \le 7", 0),
        (r"\boxed{(3,4),(1,2)}", "(1,2),(3,4)", 1),
        (r"\boxed{(4,3),(1,2)}", "(1,2),(3,4)", 0),
        (r"\boxed{2\mathrm{e}}", "2e", 1),
        (r"\boxed{\heartsuit{3}}", r"\heartsuit{3}", 1),
        (r"\boxed{8 apples + 9 apples = 17 apples}", "17", 1),
        (r"\boxed{8 apples + 9 apples = 18 apples}", "18", 0),
        ("So x=5.", "5", 1),
    ],
    "what a sentence states": [
        ("84 is larger than 74.", "84", 1),
        ("84 is larger than 74.", "74", 0),
        ("84 is larger, 74 is larger.", "84", 0),
        ("84 is the larger number and 74 is the larger number.", "84", 0),
        ("84 is larger than 74, and 74 is smaller than 84.", "84", 1),
        ("84 > 74", "84", 1),
        ("84 > 74", "74", 0),
        ("Kylar needs to pay $64 for 16 glasses.", "64", 1),
        ("Kylar needs to pay $64 for 16 glasses.", "16", 0),
        ("The total is 17.\nCheck: 17 - 9 = 8", "17", 1),
        ("The total is 17.\nCheck: 17 - 9 = 8", "8", 0),
        ("La réponse est 1 234,5", "1234.5", 1),
        ("<answer>C</answer>", "C", 1),
        ("<answer>B</answer>, though C is close", "C", 0),
        ("The correct option is C.", "C", 1),
    ],
    "an operation without its result": [
        ("To find the difference, we can subtract 78 from 84.", "84", 0),
        ("To find the difference, we can compare 85 with 30.", "30", 0),
        ("We multiply the 3 boxes by 17.", "17", 0),
        ("The answer is found by subtracting 78 from 84.", "84", 0),
        ("Subtract 8 from 25 to get 17.", "17", 1),
        ("Add 3 to it to get 17.", "17", 1),
        ("Adding 8 to 9 gives 17.", "17", 1),
        ("We subtract 8 from 25, which leaves 17.", "17", 1),
        ("Comparing 84 to 78, 84 is larger.", "84", 1),
        ("The answer is 17, as we add 8 to 9.", "17", 1),
        ("Divide 34 by 2 = 17.", "17", 1),
    ],
    "what math-verify forgives": [
        (r"\boxed{3 \cdot 10^{-20} x}", r"4 \cdot 10^{-20} x", 0),
        (r"\boxed{\sqrt{2}+10^{-18}}", r"\sqrt 2", 0),
        (r"\boxed{1.414}", r"\sqrt 2", 0),
        (r"\boxed{1.41421356}", r"\sqrt 2", 1),
        (r"\boxed{x1}", "x", 0),
        (r"\boxed{\phantom{5}}", "5", 0),
        (r"\boxed{y + 5'}", "y + 5", 0),
        (r"\boxed{\sqrt{2} \text{ m}}", r"\sqrt{2} \text{ km}", 0),
        (r"\boxed{1000\sqrt{2} \text{ m}}", r"\sqrt{2} \text{ km}", 1),
        (r"\boxed{x^2 = 4}", "x = 2", 0),
        (r"\boxed{2, 2, 3}", "2, 3", 0),
        (r"\boxed{(7, 2]}", r"\emptyset", 0),
        (r"\boxed{6/8}", "3/4", 0),
    ],
}


@pytest.mark.parametrize("kind", CASES)
async def test_all_of_a_kind_is_graded_rightly(scripted_tools: GraderTools, kind: str) -> None:
    assert await math_earned(scripted_tools, CASES[kind]) == CASES[kind]


PAIRS = read(DATA / "answer_pairs.jsonl")
REPORTED = read(DATA / "answer_kinds.jsonl")
"""Kinds of verdicts that readers of `math` reported as wrong, with wrong answers beside them."""


def test_there_are_20_pairs_of_each_of_111_kinds_right_and_wrong_ones() -> None:
    kinds = Counter(pair["kind"] for pair in PAIRS)
    assert (len(kinds), set(kinds.values())) == (111, {20})
    assert all(
        {one["right"] for one in PAIRS if one["kind"] == kind} == {True, False} for kind in kinds
    )


PAGE = ROOT / "docs" / "final-answers.md"


def pairs_of_page() -> list[tuple[str, str, bool]]:
    """The pairs of the page's table "Which answers are equal": each answer with the row beside it,
    or with every row where their numbers differ."""
    table = PAGE.read_text("utf-8").partition("## Which answers are equal")[2].partition("\n## ")[0]
    pairs: list[tuple[str, str, bool]] = []
    for line in table.splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        if len(cells) == 6 and "`" in cells[1]:
            given, wanted = (re.findall(r"`([^`]+)`", cell) for cell in cells[1:3])
            wanted = [one.replace("\\|", "|") for one in wanted]
            each = zip(given, wanted, strict=True) if len(given) == len(wanted) else None
            for one, row in each or itertools.product(given, wanted):
                pairs.append((one, row, cells[3].strip() == "1"))
    return pairs


MARKED_ONLY = {r"3, \text{ where } n > 0", "x = 3 for n ≥ 1", "5 i"}
"""Answers that are read as the table says where they are marked, and otherwise as sentences."""


@pytest.mark.parametrize("form", [r"\boxed{%s}", "%s"])
async def test_the_page_is_true_of_answers_in_a_box_and_alone(
    scripted_tools: GraderTools, form: str
) -> None:
    pairs = pairs_of_page()
    assert len(pairs) > 100
    cases: list[Case] = [
        (form.replace("%s", given), wanted, float(right))
        for given, wanted, right in pairs
        if form != "%s" or given not in MARKED_ONLY
    ]
    assert await math_earned(scripted_tools, cases) == cases


async def check(tools: GraderTools, tried: list[dict[str, Any]]) -> None:
    cases: list[Case] = [(one["given"], one["wanted"], float(one["right"])) for one in tried]
    assert await math_earned(tools, cases) == cases


async def test_no_pair_of_any_kind_is_graded_wrongly(scripted_tools: GraderTools) -> None:
    """Four right and four wrong pairs of each kind."""
    kinds: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for pair in PAIRS:
        kinds.setdefault((pair["kind"], pair["right"]), []).append(pair)
    some = [pair for pairs_of_kind in kinds.values() for pair in pairs_of_kind[:4]]
    await check(scripted_tools, some)


@pytest.mark.soak
async def test_no_pair_is_graded_wrongly(scripted_tools: GraderTools) -> None:
    await check(scripted_tools, PAIRS)


@pytest.mark.parametrize("kind", dict.fromkeys(pair["kind"] for pair in REPORTED))
async def test_no_pair_of_a_reported_kind_is_graded_wrongly(
    scripted_tools: GraderTools, kind: str
) -> None:
    await check(scripted_tools, [pair for pair in REPORTED if pair["kind"] == kind])


ROWS: list[dict[str, str]] = [
    json.loads(line)
    for line in gzip.decompress((DATA / "gsm8k" / "test.jsonl.gz").read_bytes()).splitlines()
]
QUARTER = ROWS[::4]
"""Each form is tried on a quarter of the rows, and by `make soak` on all."""

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


def answer_of(row: dict[str, str]) -> Fraction:
    return Fraction(row["answer"].rpartition("####")[2].strip().replace(",", ""))


async def values(
    tools: GraderTools, completions: list[str], rows: list[dict[str, str]] = ROWS
) -> list[float | None]:
    cases = zip(completions, (row["answer"] for row in rows), itertools.repeat(None), strict=False)
    return [value for _, _, value in await math_earned(tools, cases)]


def test_the_data_is_whole() -> None:
    assert len(ROWS) == 1319
    assert all(answer_of(row).denominator == 1 for row in ROWS)


async def test_every_reference_solution_earns_one(scripted_tools: GraderTools) -> None:
    assert await values(scripted_tools, [row["answer"] for row in ROWS]) == [1.0] * 1319


WRONG: tuple[Callable[[Fraction], Fraction], ...] = (
    lambda n: n + 1,
    lambda n: -n - 1,
    lambda n: 10 * n + 3,
)


@pytest.mark.parametrize("shown", ["last line", "all lines", "all lines with annotations"])
async def test_a_solution_in_prose_earns_one_unless_it_ends_with_another_number(
    scripted_tools: GraderTools, shown: str
) -> None:
    """Such as "So they spend 2.75*4=$11 in the 4 hours". 1,270 do not."""
    solutions = [row["answer"].rpartition("####")[0].strip() for row in ROWS]
    if shown != "all lines with annotations":
        solutions = [re.sub(r"<<.*?>>", "", solution) for solution in solutions]
    if shown == "last line":
        solutions = [solution.splitlines()[-1] for solution in solutions]
    rewards = await values(scripted_tools, solutions)
    assert rewards.count(1.0) >= 1265


@pytest.mark.parametrize("form", FORMS)
async def test_every_right_answer_earns_one_in_this_form(
    scripted_tools: GraderTools, form: str
) -> None:
    texts = [FORMS[form](answer_of(row)) for row in QUARTER]
    assert await values(scripted_tools, texts, QUARTER) == [1.0] * 330


@pytest.mark.parametrize("form", FORMS)
async def test_every_wrong_answer_earns_zero_in_this_form(
    scripted_tools: GraderTools, form: str
) -> None:
    """One of the wrong answers for each row, in turn."""
    wrong = itertools.cycle(WRONG)
    texts = [FORMS[form](next(wrong)(answer_of(row))) for row in QUARTER]
    assert await values(scripted_tools, texts, QUARTER) == [0.0] * 330


@pytest.mark.soak
@pytest.mark.parametrize("form", FORMS)
async def test_all_right_and_wrong_answers_earn_what_they_should(
    scripted_tools: GraderTools, form: str
) -> None:
    assert (
        await values(scripted_tools, [FORMS[form](answer_of(row)) for row in ROWS]) == [1.0] * 1319
    )
    for wrong in WRONG:
        texts = [FORMS[form](wrong(answer_of(row))) for row in ROWS]
        assert await values(scripted_tools, texts) == [0.0] * 1319


UNSOLVED: dict[str, Callable[[Fraction], str]] = {
    "an expression": lambda n: f"#### {n - 3} + 3",
    "a division": lambda n: f"\\boxed{{\\frac{{{3 * n}}}{{3}}}}",
    "a sum in a sentence": lambda n: f"The final answer is {n - 3} + 3.",
    "numbers in a row": lambda n: f"{n - 2} {n - 1} {n}",
}


@pytest.mark.parametrize("form", UNSOLVED)
async def test_an_answer_that_is_not_worked_out_earns_zero(
    scripted_tools: GraderTools, form: str
) -> None:
    texts = [UNSOLVED[form](answer_of(row)) for row in QUARTER]
    earned = await values(scripted_tools, texts, QUARTER)
    assert earned == [0.0] * 330
