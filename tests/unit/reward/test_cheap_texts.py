"""What each grader gives to texts that solve nothing, and to honest answers beside them.

The cheapest text is the prompt, nothing at all, all options, several answers, or a form without an
answer. Where a grader pays for one, it is by its meaning, and its docstring (docs/graders.md) says
so: those are in `BY_MEANING`. Judges are in `test_judge.py`, forged results of programs in
`test_code_tests_forgery.py`."""

from __future__ import annotations

from typing import Any

import pytest

from services.reward.grading import registry
from services.reward.grading.failures import GradingFailed
from services.reward.grading.registry import GraderTools
from shared.job import RewardSpec
from tests.support.reward_helpers import grade

Earned = dict[str, float]

OUTPUT, ANSWER = "{{ sample.output_text }}", "{{ item.answer }}"


def two_texts(**params: Any) -> dict[str, Any]:
    return {"input": OUTPUT, "reference": ANSWER, **params}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Earned]] = {
    "math, a number": (
        "math",
        {},
        {"answer": "17"},
        {
            # the question, and expressions that are left as they are
            "8 + 9": 0,
            "8+9=": 0,
            "What is 8 + 9?": 0,
            "The sum of 8 and 9 is 8 + 9.": 0,
            "The answer is 8 + 9.": 0,
            r"\boxed{8+9}": 0,
            "#### 8+9": 0,
            r"\boxed{x = 8 + 9}": 0,
            r"\boxed{8 + 9 = 9 + 8}": 0,
            r"\boxed{34/2}": 0,
            r"The answer is $\frac{34}{2}$.": 0,
            r"\boxed{\sqrt{289}}": 0,
            # nothing
            "": 0,
            "?": 0,
            r"\boxed{}": 0,
            r"\boxed{x}": 0,
            "x = x": 0,
            # several
            "17 or 18": 0,
            "16, 17, 18": 0,
            " ".join(map(str, range(1, 18))): 0,
            "1, 2, 3, ..., 17": 0,
            "The answer is 17 or 18.": 0,
            "12 is the smaller of 17.": 0,
            "12 is smaller than 17.": 0,
            "17 is the larger number, 17.": 1,
            "12 + 5 is the same as 17": 1,
            "It is between 1 and 17.": 0,
            r"\boxed{16, 17}": 0,
            r"\boxed{17} \boxed{18}": 0,
            "17. 18.": 0,
            # honest
            "17": 1,
            "17.": 1,
            "**17**": 1,
            "*17*": 1,
            "__17__": 1,
            "_17_": 1,
            "`17`": 1,
            "# 17": 1,
            "seventeen": 1,
            "The sum is 17.": 1,
            "So the answer is **17**.": 1,
            "### Answer\n\n17": 1,
            "8 + 9 = 17": 1,
            "17 = 8 + 9": 1,
            "x = 17": 1,
            r"\boxed{17}": 1,
            r"\boxed{8 + 9 = 17}": 1,
            "#### 17": 1,
            "8 and 9 make 17 dollars in total. I hope this helps!": 1,
            # equations in prose, in one line
            "So she needs to give 8 + 9 = 17 cups of feed.": 1,
            "He runs 8*1+9 = 17 meters per week": 1,
            "10 - 2 = 8 eggs. 8 + 9 = 17 dollars.": 1,
            "It takes 2/2=1 bolt. The total amount of fabric is 16+1=17 bolts of fabric": 1,
            "So she makes 17 eggs * $1/egg = $17 per day.": 1,
            "17. This is because 8 + 9 = 17.": 1,
            "Total = 8 + 9 = 17 apples": 1,
            "So she needs to give 8 + 9 cups of feed.": 0,
            "Total = 8 + 9 apples": 0,
            "9 + 9 = 17": 0,
            # tags, GSM8K's annotations, arrows
            "<think>8 + 9</think>\n<answer>17</answer>": 1,
            "<answer>8 + 9</answer>": 0,
            "<answer>16 or 17</answer>": 0,
            "Tom has 8+9=<<8+9=17>>17 apples": 1,
            "Tom has 8+9=<<8+9=17>>": 0,
            "8 + 9 -> 17": 1,
            "8 + 9 => 8 + 9": 0,
        },
    ),
    "math, a fraction": (
        "math",
        {},
        {"answer": r"\frac{3}{4}"},
        {
            r"\boxed{\frac{6}{8}}": 0,
            "1/2 + 1/4": 0,
            "0.5 or 0.75": 0,
            r"\boxed{\frac{3}{4}}": 1,
            "3/4": 1,
            "0.75": 1,
            "The probability is 75%.": 1,
        },
    ),
    "math, a choice": (
        "math",
        {},
        {"answer": "C"},
        {
            "A B C D": 0,
            "ABCD": 0,
            r"\boxed{A, B, C, D}": 0,
            "The answer is A, B, C or D.": 0,
            "The answer is C or D.": 0,
            "Which one? (A) 1 (B) 2 (C) 3 (D) 4": 0,
            "": 0,
            "(C)": 1,
            "The answer is C.": 1,
        },
    ),
    "math, yes or no": (
        "math",
        {},
        {"answer": "yes"},
        {
            "yes and no": 0,
            "No. Yes.": 0,
            "The answer is yes or no.": 0,
            "Yes.": 1,
            "The answer is yes.": 1,
        },
    ),
    "math, a time": ("math", {}, {"answer": "11:30"}, {"11:30": 1, "11:45": 0, "11:30 11:45": 0}),
    "math, a formula that nothing marks": (
        "math",
        {},
        {"answer": r"2\sqrt{3}"},
        {r"2\sqrt{3}": 1, r"**2\sqrt{3}**": 1, r"3\sqrt{3}": 0, r"2\sqrt{3} or 1": 0},
    ),
    "math, a formula": (
        "math",
        {},
        {"answer": r"\frac{\sqrt{3}}{2}"},
        {
            r"What is $\sin 60^\circ$?": 0,
            r"\boxed{\frac{1}{2}, \frac{\sqrt{3}}{2}}": 0,
            r"\boxed{\frac{\sqrt{3}}{2}}": 1,
        },
    ),
    "exact_match": (
        "exact_match",
        {},
        {"answer": "Paris"},
        {"": 0, "Paris or London": 0, "Paris Paris": 0, "The capital of France?": 0, "Paris": 1},
    ),
    "string_check eq": (
        "string_check",
        two_texts(operation="eq"),
        {"answer": "B"},
        {"": 0, "A B C D": 0, "B B": 0, "B": 1},
    ),
    "regex with a column": (
        "regex",
        {"pattern": r"answer: (\w+)", "group": 1, "column": "answer"},
        {"answer": "B"},
        {
            "": 0,
            r"answer: (\w+)": 0,
            "answer: A answer: B answer: C": 0,
            "A B C D": 0,
            "answer: A or B": 0,
            "I think that answer: B": 1,
        },
    ),
    "text_similarity": (
        "text_similarity",
        two_texts(evaluation_metric="rouge_l", pass_threshold=0.9),
        {"answer": "the cat sat on the mat"},
        {
            "": 0,
            "the the the the the the": 0,
            "mat the on sat cat the": 0,
            "where did the cat sit? on the mat, the chair, the bed": 0,
            "The cat sat on the mat.": 1,
        },
    ),
    "python_value with numbers": (
        "python_value",
        {"numbers": "numbers"},
        {"target": 17, "numbers": [8, 9]},
        {"": 0, "17": 0, "8, 9": 0, "8": 0, "8+9+0": 0, "89": 0, "17+8-8": 0, "8 + 9": 1},
    ),
    "think_format": ("think_format", {}, {}, {"": 0, "<think></think>": 0, "<think>a</think>b": 1}),
    "length": ("length", {"min": 2, "max": 9}, {}, {"": 0, "a" * 10: 0, "an answer": 1}),
}

BY_MEANING: dict[str, tuple[str, dict[str, Any], dict[str, Any], Earned]] = {
    "math asked to count expressions": (
        "math",
        {"expressions": True},
        {"answer": "17"},
        {"8 + 9": 1, r"\boxed{8 + 9}": 1, "17": 1, "18": 0},
    ),
    "math, any notation of a number and of a formula": (
        "math",
        {},
        {"answer": "36"},
        {"3 dozen": 1, "3.6e1": 1, "3600%": 1},
    ),
    "math, any form of a formula": (
        "math",
        {},
        {"answer": "x^2 + 2x + 1"},
        {r"\boxed{(x+1)^2}": 1},
    ),
    "string_check like": (
        "string_check",
        two_texts(operation="like"),
        {"answer": "B"},
        {"A B C D": 1, "": 0},
    ),
    "string_check ne": (
        "string_check",
        two_texts(operation="ne"),
        {"answer": "B"},
        {"": 1, "B": 0},
    ),
    "regex without a column": ("regex", {"pattern": r"\bB\b"}, {}, {"A B C D": 1, "": 0}),
    "rouge_1 has no order": (
        "text_similarity",
        two_texts(evaluation_metric="rouge_1"),
        {"answer": "the cat sat on the mat"},
        {"mat the on sat cat the": 1, "": 0},
    ),
    "length without min": ("length", {"max": 9}, {}, {"": 1}),
    "think_format": ("think_format", {}, {}, {"<think></think>a": 1}),
}


@pytest.mark.parametrize("name", [*CASES, *(f"{name} (by meaning)" for name in BY_MEANING)])
async def test_a_text_that_solves_nothing_earns_what_it_should(
    scripted_tools: GraderTools, name: str
) -> None:
    meant = name.removesuffix(" (by meaning)")
    grader, params, row, wanted = CASES[name] if name in CASES else BY_MEANING[meant]
    earned = {
        text: (await grade(scripted_tools, text, row, grader, **params)).value for text in wanted
    }
    assert earned == wanted


@pytest.mark.parametrize(
    ("grader", "params"),
    [
        ("exact_match", {}),
        ("string_check", two_texts(operation="eq")),
        ("string_check", two_texts(operation="like")),
        ("regex", {"pattern": r"answer:(.*)", "group": 1, "column": "answer"}),
        ("text_similarity", two_texts(evaluation_metric="rouge_l")),
        ("math", {}),
    ],
)
async def test_a_row_without_an_answer_is_refused_and_never_graded(
    scripted_tools: GraderTools, grader: str, params: dict[str, Any]
) -> None:
    bound = registry.bind(RewardSpec(grader=grader, params=params), scripted_tools)
    with pytest.raises(GradingFailed):
        await bound.check_row({"answer": ""})
    with pytest.raises(GradingFailed):
        await grade(scripted_tools, "answer:", {"answer": ""}, grader, **params)


PROGRAMS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Earned]] = {
    "code_tests": (
        "code_tests",
        {},
        {"tests": "assert f(1) == 2\nassert f(5) == 6"},
        {
            "": 0,
            "assert f(1) == 2": 0,
            "def f(x): return 2": 0,
            "def f(x): pass": 0,
            "exit()": 0,
            "class A:\n def __eq__(self, o): return True\ndef f(x): return A()": 0,
            "def f(x): return x + 1": 1,
        },
    ),
    "code_tests, inputs and outputs": (
        "code_tests",
        {},
        {"tests": [{"input": "1 2", "output": "3"}, {"input": "5 5", "output": "10"}]},
        {"": 0, "print(3)": 0, "print(3, 10)": 0, "print(sum(map(int, input().split())))": 1},
    ),
    "python_value": (
        "python_value",
        {},
        {"target": 17},
        {"": 0, "print(17)": 0, "[16, 17]": 0, "8 + 9": 1, "17": 1},
    ),
}
"""In a sandbox. "8 + 9" is Python with that value."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_that_solves_nothing_earns_what_it_should(
    tools: GraderTools, name: str
) -> None:
    grader, params, row, wanted = PROGRAMS[name]
    earned = {text: (await grade(tools, text, row, grader, **params)).value for text in wanted}
    assert earned == wanted
