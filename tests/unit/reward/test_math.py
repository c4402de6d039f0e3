"""`math`: which answer counts, what numbers are equal, and comparisons that never end."""

from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import pytest

from services.reward.grading import registry
from services.reward.grading.answers.comparing import VETOES, quick
from services.reward.grading.answers.final import marked_answer, stated_number, without_markdown
from services.reward.grading.answers.numbers import equal, number
from services.reward.grading.failures import GradingFailed
from services.reward.grading.registry import GraderTools
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire import Part, ScoreItem
from tests.support import reward_helpers
from tests.support.reward_helpers import Case, math_earned


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} or rather \boxed{\frac{3}{4}}.", r"\frac{3}{4}"),
        ("#### 5\n#### 1,200 dollars\n", "1,200 dollars"),
        (r"#### 5 and \boxed{6}", "6"),
        (r"\boxed {5}", "5"),
        (r"\fbox{5}", "5"),
        ("\\boxed\n{5}", "5"),
        (r"so $\boxed 7$.", "7"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{5} and so \boxed{}", "5"),
        (r"\boxed{1} and \boxed{-2}", "1, -2"),
        (r"\boxed{1}, \quad \boxed{-2}", "1, -2"),
        (r"\boxed{1} apples, so \boxed{2}", "2"),
        (r"\boxed{5}. Again, \boxed{5}", "5"),
        (r"\boxed{3}. The final answer is $4$. I hope it is correct.", "4"),
        (r"\boxed{3}. The final answer is in the box.", "3"),
        (r"\boxed{never closed", None),
        ("The answer is 5.", None),
        ("", None),
    ],
)
def test_the_last_marked_answer_counts(text: str, answer: str | None) -> None:
    found = marked_answer(text)
    assert (found and found[0]) == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,200", 1200),
        ("70 000", 70000),
        (r"70{,}000", 70000),
        (r"70 {, }000", 70000),
        (r"70,\! 000", 70000),
        ("70000€", 70000),
        ("75 pct", 75),
        (r"\frac3{4}", Fraction(3, 4)),
        (r"2\,000", 2000),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("$18", 18),
        (r"$\$5$", 5),
        ("€ 4.50", Fraction(9, 2)),
        ("18 eggs per day.", 18),
        (r"18\text{ m/s}", 18),
        ("25 °C", 25),
        ("3/4", Fraction(3, 4)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        ("1 1/2", Fraction(3, 2)),
        ("−5", -5),
        ("1.6e-19", Fraction(16, 10**20)),
        ("1e3", 1000),
        (r"1.6 \times 10^{-19} \text{ C}", Fraction(16, 10**20)),
        ("3.0×10^8 m/s", 300_000_000),
        (r"0.1\overline{6}", Fraction(1, 6)),
        ("x = 5", None),
        ("3 i", None),
        ("6 a", None),
        ("5 squared", None),
        ("**42**", 42),
        (".5", Fraction(1, 2)),
        ("150 percent", 150),
        ("5x", None),
        ("5 or 6", None),
        ("3 dozen", 36),
        ("1.5 million dollars", 1_500_000),
        (r"18\text{k}", 18_000),
        ("18k", 18_000),
        ("18K", 18_000),
        (r"300\text{ K}", 300),
        ("5km", 5),
        (r"5\text{ m}^2", 5),
        ("5 m²", 5),
        ("5!", None),
        ("5 x^2", None),
        ("5M", None),
        ("2 and a half", None),
        ("1,23", None),
        ("x > 5", None),
        ("1/0", None),
        ("3:30", None),
        ("9" * 5000, None),
        ("nan", None),
        ("", None),
    ],
)
def test_a_plain_number_is_read_exactly_and_nothing_else_is_one(
    text: str, value: int | Fraction | None
) -> None:
    read = number(text)
    assert (read.value if read else None) == value


@pytest.mark.parametrize(
    ("given", "wanted", "same"),
    [
        ("75%", "0.75", True),
        ("75%", "75", True),
        ("0.75", "75%", True),
        ("7.5%", "0.75", False),
        ("0.333333", "1/3", True),
        ("0.3333", "1/3", False),
        ("1000000007", "1000000008", False),
        ("18.0000001", "18", False),
        ("0.0", "1/13983816", False),
        ("0.0", "1.6e-19", False),
        ("1.60e-19", "1.6e-19", True),
        ("1.61e-19", "1.6e-19", False),
        ("0.666667", "2/3", True),
        ("0.666666", "2/3", True),
        ("0.66667", "2/3", False),
        ("7.15112e-8", "1/13983816", True),
        ("7.15114e-8", "1/13983816", False),
        ("5 m", "5 km", False),
        ("5m", "5km", False),
        ("5000 m", "5 km", True),
        ("5", "5 km", True),
        ("5 km", "5", True),
        (r"5\text{ m}^2", r"5\text{ km}^2", False),
        ("2 square meters", "20000 cm^2", True),
        ("2 square meters", "2 m", False),
        ("36 km/h", "10 m/s", True),
        ("36 km per hour", "36 m/s", False),
        ("60 mph", "60 km/h", False),
        ("90 minutes", "1.5 hours", True),
        ("25 °C", "25 °F", False),
        ("5 cents", "5 dollars", False),
        ("18 eggs", "18 apples", False),
        ("18 eggs", "18 eggs per day", True),
        ("18 egg", "18 eggs", True),
        ("$5", "5 dollars", True),
        ("$5", "€5", False),
        ("1 N", "1 kg m/s^2", True),
        ("5m", "5", False),
        ("5 m", "5", True),
        (r"18\text{k}", "18", False),
        ("3 dozen", "36", True),
        ("3 dozen", "3", False),
        ("2 years", "24 months", True),
    ],
)
def test_numbers_are_equal_exactly_or_to_six_digits(given: str, wanted: str, same: bool) -> None:
    ours, theirs = number(given), number(wanted)
    assert ours and theirs and equal(ours, theirs) is same


@pytest.mark.parametrize(
    ("given", "wanted", "same"),
    [
        ("5 each", "5", True),
        (r"5 \text{ (per person)}", "5", True),
        ("5 (in dollars)", "5 dollars", True),
        ("5 apples (in total)", "5 apples", True),
        ("5 dollars (each)", "5 euros", False),
        ("5 (pens)", "5 apples", False),
        ("5 (million)", "5", False),
        ("5 (squared)", "5", False),
        ("5 (or more)", "5", False),
        ("5 (x)", "5", False),
        # a choice with a dot is answered by its letter
        ("C", "C. Paris", True),
        ("(C)", "C. 12", True),
        ("Paris", "C. Paris", True),
        ("B", "C. Paris", False),
        ("B. Rome", "C. Paris", False),
        ("E. coli", "E. coli", True),
        ("E", "E. coli", False),
    ],
)
def test_words_in_brackets_and_letters_of_choices_are_compared_as_meant(
    given: str, wanted: str, same: bool
) -> None:
    outcome = quick(given, wanted)
    assert outcome is not None and outcome[0] is same


@pytest.mark.parametrize(
    "part",
    [
        "(",
        "[1,",
        "{(",
        "\\{",
        "x=",
        "\\pm",
        "1:",
        " a",
        ") a",
        "\\text{a}",
        "1,",
        "&",
        "and ",
        "\\boxed{",
        "#",
        "####\n",
        "\\text{",
        "1,111",
        "9",
        "1 ",
        " ",
        "$",
        "{",
        "\\frac{1}{",
        "*a",
        "(1 ",
        "1 and ",
        "answer 1 ",
        "the answer is 1. ",
        "1 = ",
        "-",
    ],
)
def test_a_completion_made_to_be_slow_to_read_is_not(part: str) -> None:
    start = time.process_time()
    number(part * 20_000)
    found = marked_answer(part * 20_000)
    number(found[0] if found else "")
    number(part * 60)
    stated_number(part * 20_000)
    without_markdown(part * 20_000)
    quick(part * (2000 // len(part)), "x + 1")
    closed = "".join({"(": ")", "[": "]", "{": "}"}.get(one, "") for one in part)
    quick(part * 600 + closed * 600, "x + 1")
    assert time.process_time() - start < 2


async def grade(tools: GraderTools, completion: str, answer: Any, **params: Any) -> Part:
    return await reward_helpers.grade(tools, completion, {"answer": answer}, "math", **params)


async def test_formulas_are_compared_by_what_they_mean(scripted_tools: GraderTools) -> None:
    cases: list[Case] = [
        (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+2", 0.0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        (r"\boxed{(1, 2]}", "(1,2]", 1.0),
        (r"\boxed{(1, 2)}", "(1,2]", 0.0),
        (r"\boxed{6.283185307}", r"2\pi", 1.0),
        (r"\boxed{120}", "5!", 1.0),
        (r"\boxed{5!}", "120", 0.0),
        (r"\boxed{5!}", "5", 0.0),
        (r"\boxed{12 \cdot 34}", "408", 0.0),
        (r"\boxed{12 \cdot 34 = 408}", "408", 1.0),
        (r"\boxed{408 = 12 \cdot 34}", "408", 1.0),
        (r"\boxed{12 \cdot 35 = 408}", "408", 0.0),
        (r"\boxed{12 \cdot 34 = 34 \cdot 12}", "408", 0.0),
        (r"\boxed{x = 12 \cdot 34}", "408", 0.0),
        (r"\boxed{x = 12 \cdot 34 = 408}", "x = 408", 1.0),
        (r"\boxed{\frac{816}{2}}", "408", 0.0),
        (r"\boxed{\frac{6}{8}}", "0.75", 0.0),
        (r"\boxed{\frac{6}{8}}", "6/8", 1.0),
        (r"\boxed{\frac{3}{4}}", "6/8", 1.0),
        (r"\boxed{\frac34}", "75\\%", 1.0),
        (r"\boxed{1.5/2}", "0.75", 0.0),
        (r"\boxed{(C) 408}", "408", 1.0),
        (r"\boxed{2^3 \cdot 3}", r"3 \cdot 2^3", 1.0),
        ("#### **408**", "408", 1.0),
        ("#### The answer is 408.", "408", 1.0),
        ("#### The answer is 12 * 34.", "408", 0.0),
        (r"\boxed{5 \text{ m}}", r"5 \text{ km}", 0.0),
        (r"\boxed{18\text{k}}", "18", 0.0),
        (r"\boxed{3 \text{ dozen}}", "37", 0.0),
        (r"We get $x = 7$. The final answer is $7$.", "7", 1.0),
        (r"\boxed{\text{Tuesday}}", r"\text{Tuesday}", 1.0),
        (r"\boxed{}", "7", 0.0),
        (r"\boxed{\frac{}{}}}{{", "7", 0.0),
        ("no answer at all", "7", 0.0),
        ("", "7", 0.0),
        ("\0\ud7ff \\boxed{\\", "7", 0.0),
        (r"\boxed{ABCD}", "DBCA", 0.0),
        (r"\boxed{\text{(C)}}", "C", 1.0),
        (r"\boxed{2ba}", "2ab", 1.0),
        (r"\boxed{ba}", "ab", 0.0),
        (r"\boxed{0.0}", "e^{-20}", 0.0),
        (r"\boxed{0.0}", r"\frac{1}{13983816}", 0.0),
        (r"\boxed{y=3}", "x=3", 0.0),
        (r"\boxed{3}", "x=3", 1.0),
        (r"\boxed{x=3}", "3", 1.0),
        (r"\boxed{4=3}", "3", 0.0),
        (r"\boxed{1+2=3}", "3", 1.0),
        (r"\boxed{3,3}", "3", 0.0),
        (r"\boxed{11:30}", "11/30", 0.0),
        (r"\boxed{0=0}", "x=x+1", 0.0),
        (r"\boxed{3x=9}", "x=3", 0.0),
        (r"\boxed{(2)(3)}", "5", 0.0),
        (r"\boxed{x > 1 and y < 2}", "(1, 2)", 0.0),
        (r"\boxed{1 < x < 2}", "x > 1 and y < 2", 0.0),
        (r"\boxed{y < 2, 1 < x}", "x > 1 and y < 2", 1.0),
        (r"\boxed{x < 1 or y > 2}", r"(-\infty, 1) \cup (2, \infty)", 0.0),
        (r"\boxed{x \in [1, 2], 3 \le y \le 4}", r"1 \le x \le 2, 3 \le y \le 4", 1.0),
        (r"\boxed{y = x = 2x}", "y = 2x", 0.0),
        (r"\boxed{y = f(x) = 2x}", "y = 2x", 1.0),
        (r"\boxed{(y, x) = (1, 2)}", "(1, 2)", 0.0),
        (r"\boxed{(y, x) = (2, 1)}", "(x, y) = (1, 2)", 1.0),
        (r"\boxed{(m, b) = (1, 2)}", "(1, 2)", 1.0),
        ("The answer is 1.6e-19.", "1.6e-19", 1.0),
        ("It comes to 1e3", "1000", 1.0),
        ("It is 5 squared", "5", 0.0),
        ("Answer: B", "(B)", 1.0),
        # constants agree relative to their size
        (r"\boxed{e^{-501}}", "e^{-500}", 0.0),
        (r"\boxed{2e^{-500}}", "e^{-500}", 0.0),
        (r"\boxed{\frac{1}{e^{500}}}", "e^{-500}", 1.0),
        (r"\boxed{1.584963}", r"\log_2 3", 1.0),
        (r"\boxed{14.2067}", r"\frac{\ln 2}{\ln 1.05}", 1.0),
        (r"\boxed{14.21}", r"\frac{\ln 2}{\ln 1.05}", 0.0),
        (r"\boxed{\sqrt2+\sqrt3}", r"\sqrt{5+2\sqrt6}", 1.0),
        (r"\boxed{2i}", r"\sqrt{-4}", 1.0),
    ]
    assert await math_earned(scripted_tools, cases) == cases


@pytest.mark.slow
async def test_a_comparison_that_never_ends_is_ended_and_the_next_is_right(
    scripted_tools: GraderTools,
) -> None:
    start = time.monotonic()
    part = await grade(scripted_tools, r"\boxed{9^{9^{9^{9}}} + x}", "x + 1", cpu_s=0.7)
    assert (part.value, part.verdict in ("time_limit", "memory_limit")) == (0.0, True), part
    assert time.monotonic() - start < 60
    assert (await grade(scripted_tools, r"\boxed{\sqrt{4}}", r"\sqrt{2}^2")).value == 1.0


async def test_the_column_may_hold_a_number_or_a_whole_solution_and_nothing_else(
    scripted_tools: GraderTools,
) -> None:
    cases: list[Case] = [
        ("#### 18", 18, 1.0),
        ("#### 0.5", 0.5, 1.0),
        ("#### 18", "So it is.\n#### 18", 1.0),
        ("#### 18", r"So it is \boxed{18}.", 1.0),
    ]
    assert await math_earned(scripted_tools, cases) == cases
    math = registry.bind(RewardSpec(grader="math"), scripted_tools)
    for answer in (None, ["18"], "", True):
        with pytest.raises(GradingFailed, match="expected a number or text"):
            await grade(scripted_tools, "#### 18", answer)
    with pytest.raises(GradingFailed, match="is '4=3', which no answer can equal"):
        await math.check_row({"answer": "4=3"})
    with pytest.raises(GradingFailed, match="an answer of 20000 characters; expected at most 4000"):
        await math.check_row({"answer": "a" * 19_999 + "$"})


async def test_a_verdict_says_what_was_read_and_by_which_rule_it_is_right(
    scripted_tools: GraderTools,
) -> None:
    cases = [
        (
            r"\boxed{5 squared}",
            "25 x",
            "read '5 squared' (boxed), wanted '25 x': a part that math-verify drops or guesses, "
            "'squared'",
        ),
        (
            r"\boxed{5 squared}",
            "25",
            "read '5 squared' (boxed), wanted '25': an expression that is not worked out, where "
            "the row's answer is, '5 squared'",
        ),
        (
            "The sum is 8 + 9.",
            "17",
            "read 'The sum is 8 + 9.' (unmarked), wanted '17': it states no plain number",
        ),
        (r"So \boxed{17.0}", "17", "read '17.0' (boxed), wanted '17': equal as numbers"),
        ("#### 17", "17", "read '17' (after ####), wanted '17': equal as text"),
        ("It is 18.", "17", "read '18' (unmarked), wanted '17': not equal as numbers"),
        (r"\boxed{a+b}", "b+a", "read 'a+b' (boxed), wanted 'b+a': equal by math-verify"),
        (r"\boxed{a+b}", "(b, a)", "read 'a+b' (boxed), wanted '(b, a)': not equal by math-verify"),
    ]
    parts = [await grade(scripted_tools, text, row) for text, row, _ in cases]
    assert [part.detail for part in parts] == [said for _, _, said in cases]
    assert [part.verdict for part in parts] == [
        "ok" if ": equal" in said else "wrong" for _, _, said in cases
    ]


VETOED = {
    "unevaluated": (r"\boxed{8 + 9}", "17"),
    "words": (r"\boxed{ba}", "ab"),
    "notation": (r"\boxed{3:12}", "12:03"),
    "unread": (r"\boxed{x + \phantom{5}}", "x + 5"),
    "unit": (r"\boxed{\sqrt{2} \text{ kg}}", r"\sqrt{2} \text{ km}"),
    "value": (r"\boxed{0.0}", "e^{-20}"),
    "brackets": (r"\boxed{[1, 2]}", "(1, 2)"),
    "false": (r"\boxed{12 \cdot 35 = 408}", "408"),
    "unsolved": (r"\boxed{3x = 9}", "x = 3"),
    "always": (r"\boxed{0 = 0}", "x = x + 1"),
    "backwards": (r"\boxed{(7, 2]}", r"\emptyset"),
}


async def test_each_veto_is_named_where_it_refuses_an_answer(scripted_tools: GraderTools) -> None:
    said = {name: (await grade(scripted_tools, *case)).detail for name, case in VETOED.items()}
    assert [name for name in VETOES if f": {VETOES[name]}" not in said.get(name, "")] == []


async def test_expressions_count_where_the_job_says_so(scripted_tools: GraderTools) -> None:
    cases: list[Case] = [
        (r"\boxed{12 \cdot 34}", "408", 1.0),
        (r"\boxed{2\pi}", "6.283185307", 1.0),
        (r"\boxed{5!}", "120", 1.0),
        (r"\boxed{\frac{816}{2}}", "408", 1.0),
        (r"\boxed{12 \cdot 35}", "408", 0.0),
        ("The answer is $12 \\cdot 34$.", "408", 1.0),
        ("The answer is 408.", "408", 1.0),
        ("The sum is **1,408**.", "1408", 1.0),
        ("The answer is 409.", "408", 0.0),
    ]
    assert await math_earned(scripted_tools, cases, expressions=True) == cases


async def test_a_key_that_math_does_not_have_is_refused_with_those_it_has(
    scripted_tools: GraderTools,
) -> None:
    with pytest.raises(BadRequest, match=r"expression'.*expressions"):
        registry.bind(RewardSpec(grader="math", params={"expression": True}), scripted_tools)


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("The sum is 17.", "17"),
        ("It costs 5 dollars", "5 dollars"),
        ("The answer is $1,200.", "$1,200"),
        ("So the answer is **73**.", "73"),
        ("**_17_**", "17"),
        ("## Answer\n\n`17`", "17"),
        ("1. Add 8 and 9.\n2. The result is 17.", "17"),
        ("```\n17\n```\nHope this helps!", "17"),
        ("The sum of 8 and 9 is seventeen.", "seventeen"),
        ("The answer is 17, because 8 + 9 = 17 and 8 < 9.", "17"),
        ("The answer is 17. Check: 17 - 9 = 8.", "17"),
        ("The answer is 8 + 9 = 17", "17"),
        ("17 = 8 + 9", "17"),
        ("17 = 34/2", "17"),
        ("So 8 + 9 is 16. Wait, it is 17.", "17"),
        ("The sum is 17 (8 + 9 = 17).", "17"),
        ("She has 17 apples and 3 friends, so 17 in total", "17"),
        ("The answer is minus 5.", "-5"),
        (r"Hence $x = \frac{3}{4}$.", r"\frac{3}{4}"),
        ("He ran 5 km from here.", "5 km"),
        ("It takes 2 hours 30 minutes", "2 hours 30 minutes"),
        ("It's 1.5 million dollars.", "1.5 million dollars"),
        ("The total is 1,000.99$ now", "1,000.99 dollars"),
        ("Before, Erin had 32-14= 18 points", "18"),
        ("She paid $9 - $8 = $1 more than Becky.", "$1"),
        ("It is $1500/month * 12 months/year = $18,000/year", "18,000"),
        ("17 more than five", None),
        ("17 point five", None),
        ("The sum is 8 + 9.", None),
        ("8 + 9 =", None),
        ("8 + 9 = ?", None),
        ("What is 8 + 17?", None),
        ("The sum of 8 and 9", None),
        ("20 minus 3", None),
        (r"The answer is $\sqrt{289}$.", None),
        ("17 or 18", None),
        ("1 2 3 4 ... 17", None),
        ("1, 2, 3, ..., 17", None),
        ("between 3 and 17", None),
        ("at least 17", None),
        ("It is not 17.", None),
        ("17 squared", None),
        ("17 and a half", None),
        ("17x", None),
        ("The ratio is 3:17", None),
        ("2B17", None),
        ("no number", None),
        ("answer\ufeffx = 17", "17"),
        ("", None),
    ],
)
def test_an_unmarked_text_states_one_number_or_none(text: str, stated: str | None) -> None:
    assert stated_number(text) == stated


async def test_strict_takes_marked_answers_only(scripted_tools: GraderTools) -> None:
    cases: list[Case] = [("18", 18, 0.0), ("#### 18", 18, 1.0)]
    assert await math_earned(scripted_tools, cases, strict=True) == cases


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("84 is the larger", 0),
        ("To find it, we look at 84", 0),
        ("The answer is 84", 0),  # or 841
        ("#### 84", 0),
        ("#### 84\n", 1),
        ("The answer is 84.", 1),
        ("So it is **84.**", 1),
        (r"\boxed{84} since it is", 1),
        ("84", 1),
    ],
)
async def test_a_sentence_that_the_limit_of_tokens_cuts_off_states_nothing(
    scripted_tools: GraderTools, completion: str, value: float
) -> None:
    bound = registry.bind(RewardSpec(grader="math"), scripted_tools)
    cut = ScoreItem(prompt="", completion=completion, row={"answer": 84}, finish_reason="length")
    (part,) = await bound.grade([cut])
    assert part.value == value
    if not value:
        assert part.detail.endswith("wanted '84': it is cut off within a sentence")
        (whole,) = await bound.grade([cut.model_copy(update={"finish_reason": "stop"})])
        assert whole.value == 1


async def test_stated_formulas_count_and_unsolved_operations_do_not(
    scripted_tools: GraderTools,
) -> None:
    cases: list[Case] = [
        # formulas behind "the answer is"
        ("The answer is (3, 4).", "(3,4)", 1),
        ("The answer is 2x + 3.", "2x+3", 1),
        ("The answer is 1 and 2.", "1,2", 1),
        ("The answer is 3:45 PM.", "3:45 PM", 1),
        (r"\boxed{\frac{3}{-4}}", "-3/4", 1),
        (
            r"\boxed{\frac{-3 \pm \sqrt{17}}{4}}",
            r"\frac{-3+\sqrt{17}}{4}, \frac{-3-\sqrt{17}}{4}",
            1,
        ),
        (r"\boxed{x = \frac{1 \pm \sqrt5}{2}}", r"\frac{1-\sqrt5}{2}, \frac{1+\sqrt5}{2}", 1),
        (r"\boxed{\frac{1 + \sqrt5}{2}}", r"\frac{1 \pm \sqrt5}{2}", 0),
        (r"\boxed{\frac{2 \pm \sqrt5}{2}}", r"\frac{1 \pm \sqrt5}{2}", 0),
        # what the value is said to be
        (r"\boxed{\text{Area} = 12}", "12", 1),
        (r"\boxed{\text{Area} = 12\pi}", r"12\pi", 1),
        (r"\boxed{P(A \cap B) = \frac12}", r"\frac12", 1),
        (r"\boxed{f'(x) = 2x}", "2x", 1),
        (r"\boxed{f^{-1}(x) = 2x}", "2x", 1),
        (r"\boxed{\frac{dy}{dx} = 2x}", "2x", 1),
        (r"\boxed{\|v\| = 5}", "5", 1),
        (r"\boxed{\lim_{x \to 0} f(x) = 3}", "3", 1),
        (r"\boxed{\text{Area} = 8 + 9}", "17", 0),
        (r"\boxed{\text{Area} = 12}", "13", 0),
        (r"\boxed{\text{Area} =}", "12", 0),
        (r"\boxed{{\color{red}17}}", "17", 1),
        (r"\boxed{\textcolor{blue}{17}}", "17", 1),
        (r"\boxed{\underline{17}}", "17", 1),
        (r"\boxed{\large 17}", "17", 1),
        (r"\boxed{\approx 3.14}", "3.14", 1),
        (r"\boxed{0.333 \approx \frac13}", r"\frac13", 1),
        # a chain of roundings that leads from any number to any other
        (r"\boxed{1 \approx \frac32 \approx 2 \approx \frac52 \approx 3}", "3", 0),
        (r"\boxed{\frac13 \approx \frac12}", r"\frac12", 0),
        (r"\boxed{102\pi \approx 103\pi \approx 104\pi \approx 105\pi}", r"105\pi", 0),
        (r"\boxed{83 \approx 1000000}", "83", 0),
        (r"\boxed{9 \approx 0}", "9", 0),
        # each value beside the first one, with its sign
        (r"\boxed{17 \approx -17}", "17", 0),
        (r"\boxed{17 \approx -17}", "-17", 0),
        (r"\boxed{17 \approx \frac{35}{2} \approx 18}", "17", 0),
        (r"\boxed{0 \approx \frac12 \approx 1}", "1", 0),
        (r"\boxed{16 \approx \sqrt{288} \approx 17}", "17", 0),
        (r"\boxed{\frac{22}{7} \approx 3.143 \approx 3.14}", "3.14", 1),
        (r"\boxed{-\frac13 \approx -0.333}", r"-\frac13", 1),
        ("So the answer is 17=17, 18.", "17", 0),
        ("The answer is x=17,y=18.", "18", 0),
        ("So the answer is 17,000 = 8,000 + 9,000.", "17000", 1),
        # yes and no
        ("Yes, it does.", "yes", 1),
        ("**No**, it does not.", "no", 1),
        ("No, it does not.", "yes", 0),
        ("Yes, or no.", "yes", 0),
        ("There are no apples.", "no", 0),
        # choices
        ("**Answer: (B)**", "B", 1),
        ("**Answer:** B) Paris", "B", 1),
        ("The correct answer is **B. Paris**.", "B", 1),
        ("B) 12", "B", 1),
        ("**B. Paris**", "B", 1),
        ("Therefore, B is correct.", "B", 1),
        ("Option (B) is the correct answer.", "B", 1),
        ("So B is right, and A is correct.", "B", 0),
        (r"\boxed{C. D}", "C", 0),
        (r"\boxed{C) D, B, A}", "C", 0),
        ("The answer is C: no, D", "C", 0),
        # what the problem asks to carry out
        (r"$\frac{d}{dx} x^2$", "2x", 0),
        (r"\boxed{\int x dx}", "x^2/2", 0),
        (r"\boxed{\sum_{k=1}^{n} k}", r"\frac{n(n+1)}{2}", 0),
        (r"\boxed{\int x dx = x^2/2}", "x^2/2", 1),
        # words that make another number, and second answers
        (r"\boxed{17 quadrillion}", "17", 0),
        (r"\boxed{17 lakh}", "17", 0),
        (r"\boxed{17 eighteen}", "17", 0),
        ("The answer is 17 maybe 18.", "17", 0),
        ("17 else 18 else 19", "19", 0),
        ("17, unless it is 18", "17", 0),
        ("Otherwise it is 5. The answer is 17.", "17", 1),
        (r"\boxed{17 \text{ apples}}", "17", 1),
    ]
    assert await math_earned(scripted_tools, cases) == cases


@pytest.mark.parametrize("text", [r"\boxed{" * 2857, r"\fbox{" * 3300, "(" * 4000 + "1"])
def test_nested_brackets_take_no_time(text: str) -> None:
    start = time.process_time()
    assert marked_answer(text, is_several=True) is None
    stated_number(text)
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    "given", ["Fe3+→" * 24 + "?", "1+" * 2000, "17 or else " * 300, "a" * 20_000 + "$"]
)
def test_hostile_answers_take_no_time_on_the_event_loop(given: str) -> None:
    """Each repeat of the first one doubled its time: 1 s for 20."""
    start = time.process_time()
    quick(given, "Fe3+")
    stated_number(f"The answer is {given}")
    assert time.process_time() - start < 1.0
