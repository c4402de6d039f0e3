"""`math` on suites that others wrote: the cases of Math-Verify's own tests (Apache-2.0), and
answers of MATH-500 (MIT) in other notations. The data is beside the repository, where there is
any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.reward.grading import registry
from shared.job import RewardSpec
from shared.wire import Execution, ScoreItem
from tests.support.reward_helpers import ScriptedSandbox, tools_of

DATA = Path(__file__).parents[3] / ".." / "shared" / "data" / "external"

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
async def test_math_agrees_with_a_suite_but_for_what_is_listed(suite: str, least: float) -> None:
    file = DATA / f"{suite}.jsonl"
    if not file.exists():
        pytest.skip(f"{suite}.jsonl is not beside the repository")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    tools = tools_of(ScriptedSandbox(Execution(verdict="ok")))
    math = registry.bind(RewardSpec(grader="math"), tools)
    others: list[tuple[str, str]] = []
    for row in rows:
        item = ScoreItem(prompt="", completion=row["completion"], row={"answer": row["answer"]})
        (part,) = await math.grade([item])
        others += [(row["answer"], row["completion"])] if part.value != row["value"] else []
    await tools.limited.close()
    assert [one for one in others if one not in DISAGREEMENTS[suite]] == []
    assert 1 - len(others) / len(rows) >= least


CASES: dict[str, list[tuple[str, str, float]]] = {
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
async def test_all_of_a_kind_is_graded_rightly(kind: str) -> None:
    tools = tools_of(ScriptedSandbox(Execution(verdict="ok")))
    math = registry.bind(RewardSpec(grader="math"), tools)
    earned: list[tuple[str, str, float]] = []
    for completion, answer, _ in CASES[kind]:
        item = ScoreItem(prompt="", completion=completion, row={"answer": answer})
        (part,) = await math.grade([item])
        assert part.value is not None
        earned.append((completion, answer, part.value))
    await tools.limited.close()
    assert earned == CASES[kind]
