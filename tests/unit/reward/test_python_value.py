"""`python_value` without its sandbox: the Countdown rule, what counts as equal, and how an end
becomes a reward."""

from __future__ import annotations

import ast
import re
import time
from collections import Counter, OrderedDict, deque
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from services.reward.graders.python_value import breach
from services.reward.grading import expressions, registry
from services.reward.grading.calling import Caller
from services.reward.grading.codec import same
from services.reward.grading.failures import GradingFailed
from services.reward.grading.programs import program_of
from services.reward.grading.registry import GraderTools
from shared.job import RewardSpec
from shared.wire import Execution, Part, ScoreItem
from tests.support.reward_helpers import ScriptedSandbox, running_sandbox, scripted, tools_of


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("3*5", ""),
        ("( 5 * 3 )", ""),
        ("5//3", ""),
        ("-5 % +3", ""),
        ("3+5+3", "used [3, 3, 5], wanted [3, 5]"),
        ("15", "used [15], wanted [3, 5]"),
        ("3**5", "'**' is not allowed"),
        ("3\n+5", "'\\n' is not allowed"),
        ("3;5", "';' is not allowed"),
        ("3,5", "',' is not allowed"),
        ("15 # 3 5", "'#' is not allowed"),
        ("'3'*5", '"\'" is not allowed'),
        ("exit(3, 5)", "'e' is not allowed"),
        ("3_5", "'_' is not allowed"),
        ("3.5", "'.' is not allowed"),
        ("0x3+5", "'x' is not allowed"),
        ("٣*5", "'٣' is not allowed"),
        ("3*5" + " " * 1000, "1003 characters, at most 1000 are allowed"),
        ("", "used [], wanted [3, 5]"),
    ],
)
def test_the_countdown_rule_names_its_first_breach(expression: str, fault: str) -> None:
    assert breach(expression, [5, 3]) == fault


@pytest.mark.parametrize(
    ("expression", "target", "value"),
    [
        ("1/49*49", 1, 1.0),
        ("3/(1-1)", 1, 0.0),
        ("7//2", 3, 1.0),
        ("-7//2", -4, 1.0),
        ("-7 % 3", 2, 1.0),
        ("1/10", 0.1, 1.0),
        ("1/3", 0.3333333, 0.0),
        ("8/(3-8/3)", 24, 1.0),
        ("9007199254740993*1", 9007199254740992, 0.0),
        ("(" * 300 + "8" + ")" * 300, 8, 0.0),
        ("-" * 20 + "8", 8, 1.0),
        ("8(1)", 8, 0.0),
        ("1 2", 12, 0.0),
    ],
)
async def test_countdown_is_evaluated_in_fractions(
    expression: str, target: float, value: float
) -> None:
    numbers = [int(number) for number in re.findall(r"\d+", expression)]
    nothing = Execution(verdict="sandbox_error", stderr="it is asked for nothing")
    row = {"target": target, "nums": numbers}
    assert (await grade(nothing, row, expression, numbers="nums")).value == value


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("<answer>3 * 5</answer>", 1.0),
        ("3 * 5 = 15", 1.0),
        ("<answer>\n3 * 5 = 15\n</answer>", 1.0),
        ("I try 3 + 5.\n<answer>3*5=15.0</answer>", 1.0),
        ("<answer>3 + 5</answer>", 0.0),
        ("3 + 5 = 15", 0.0),
        ("3 * 5 = 16", 0.0),
        ("3 * 5 = 3 * 5", 0.0),
        ("15 = 15", 0.0),
        ("= 15", 0.0),
    ],
)
async def test_countdown_takes_an_answer_in_tags_and_the_target_behind_it(
    completion: str, value: float
) -> None:
    nothing = Execution(verdict="sandbox_error", stderr="it is asked for nothing")
    row = {"target": 15, "nums": [3, 5]}
    assert (await grade(nothing, row, completion, numbers="nums")).value == value


async def test_countdown_says_what_the_value_was() -> None:
    row = {"target": 5, "nums": [1, 3]}
    nothing = Execution(verdict="sandbox_error", stderr="it is asked for nothing")
    parts = [await grade(nothing, row, text, numbers="nums") for text in ("1/3", "1/(3%3)", "1 3")]
    parts[1] = await grade(nothing, row | {"nums": [1, 3, 3]}, "1/(3%3)", numbers="nums")
    assert [(part.verdict, part.detail) for part in parts] == [
        ("wrong", "evaluated to 1/3, wanted 5"),
        ("runtime_error", "ZeroDivisionError: Fraction(1, 0)"),
        ("runtime_error", "SyntaxError: invalid syntax"),
    ]


@pytest.mark.parametrize(
    ("value", "target", "tolerance", "equal"),
    [
        (15, 15, 0, True),
        (15.0, 15, 0, True),
        (True, 1, 0, False),
        (1, True, 0, False),
        (True, True, 0, True),
        ("15", 15, 0, False),
        (14.999, 15, 0, False),
        (14.999, 15, 0.01, True),
        (10**400, 1.0, 0.5, False),
        ([1, [2.0]], [1, [2]], 0, True),
        ([1], [True], 0, False),
        ([1], [1, 2], 0, False),
        ({"a": 1}, {"a": 1.0}, 0, True),
        ({"a": 1}, {"b": 1}, 0, False),
        (None, None, 0, True),
        (None, 0, 0, False),
        ((1,), [1], 0, False),
        ({1, 2}, frozenset({2, 1}), 0, True),
        ({True}, {1}, 0, False),
        ({(1, True)}, {(1, 1)}, 0, False),
        ({1: "a"}, {True: "a"}, 0, False),
        ([float("nan")], [float("nan")], 0, False),
        ("1", b"1", 0, False),
        (Fraction(1, 2), 0.5, 0, True),
        (Fraction(2), 2, 0, True),
        (Fraction(1), True, 0, False),
        (Decimal("1.10"), Decimal("1.1"), 0, True),
        (Decimal("1.1"), 1.1, 0, False),
        (deque([1]), deque([1]), 0, True),
        (deque([1]), deque([True]), 0, False),
        (deque([1]), [1], 0, False),
        (Counter(a=1, b=0), Counter(a=1), 0, True),
        (Counter(a=1, b=0), {"a": 1}, 0, False),
        (Counter(a=1), {"a": 1}, 0, True),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), 0, False),
        (OrderedDict(a=1, b=2), {"b": 2, "a": 1}, 0, True),
        (range(3), range(0, 3, 1), 0, True),
        (range(3), [0, 1, 2], 0, False),
        (datetime(2024, 1, 1), date(2024, 1, 1), 0, False),
    ],
)
def test_numbers_are_equal_by_value_and_all_else_by_type_too(
    value: Any, target: Any, tolerance: float, equal: bool
) -> None:
    assert same(value, target, tolerance) is equal and same(target, value, tolerance) is equal


def test_the_last_fenced_block_is_the_program() -> None:
    assert program_of("\n  1+2\n") == "  1+2"
    assert program_of("```python\n1+2\n```") == "1+2"
    assert program_of("[BEGIN]\nx = 2\nx\n[DONE]\n[BEGIN]\n3\n[DONE]") == "x = 2\nx"
    assert program_of("Like so:\n[BEGIN]\n```python\n1+2\n```\n[DONE]\nDone.") == "1+2"
    assert program_of("1+2\n[DONE]\nYou are a programmer.") == "1+2"
    assert program_of("First\n```\n1\n```\nthen\n```py\nx = 2\nx\n```\nDone.") == "x = 2\nx"


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```json\n{}\n```\nthen\n```python\nx\n```\nDone", "x"),
        ("```bash\npip install x\n```\nno more", "```bash\npip install x\n```\nno more"),
        ("```python\nx\n```\nIt prints\n```\n3\n```", "x"),
        ("```python\nx\n```\n```text\n3\n```", "x"),
        ("```python\ndraft\n```\n```python\nx\n```", "x"),
        ("```python3.11\nx\n```", "x"),
        ("```Python3\nx\n```", "x"),
        ("```ipython\nx\n```", "x"),
        ('```python title="x.py" linenos\nx\n```', "x"),
        ("```{.python}\nx\n```", "x"),
        ("~~~py\nx\n~~~", "x"),
        ("```pytb\nTraceback\n```\nx", "```pytb\nTraceback\n```\nx"),
        ("Text\n```python\nx\ny", "x\ny"),
        ("```python\ndraft\n```python\nx\n```", "x"),
        ("```python\nx\n```\nAgain:\n```python\n", "x"),
        ("Sure: ```python\nx```\nbye", "x"),
        ("```python\r\nx\r\ny\r\n```\r\n", "x\ny"),
        ("1. So\n    ```python\n    if x:\n        y\n    ```", "if x:\n    y"),
        ("````python\nx = '```'\n```\n````", "x = '```'\n```"),
        ('```python\n"""\n    ```\n    """\ny\n```', '"""\n    ```\n    """\ny'),
        ("Use ```x``` here.\n```\ny\n```", "y"),
        ("Use ```x``` here.", "Use ```x``` here."),
    ],
)
def test_fences_are_read_as_models_write_them(completion: str, program: str) -> None:
    assert program_of(completion) == program


DOCSTRING = 'def f(x):\n    """So:\n    ```python\n    f(1)\n    ```\n    """\n    return x'


@pytest.mark.parametrize("fence", ["```", "~~~", "````", "```\r", "  ```"])
@pytest.mark.parametrize(
    "after",
    [
        "",
        "\n\nIt adds `1` to x.",
        "\nUsage:\n```python\nprint(f(1))\n```\n",
        "\nIt prints:\n```\n3\n```\nDone.",
        "\nUsage:\n```python\nprint(f(1))",
    ],
)
@pytest.mark.parametrize(
    "before",
    ["", "python\n", "py\r\n", "# It adds 1.\n", "import math\n\n", "@cache\n", "N: int = 1\n"],
)
def test_a_closing_fence_ends_the_block_that_the_prompt_opened(
    fence: str, after: str, before: str
) -> None:
    code = "def f(x):\n    return x + 1"
    completion = f"{before}{code}\n{fence}{after}"
    own = "" if before.startswith("py") else before
    assert program_of(completion, lambda text: "def f" in text) == own + code


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("    return x + 1\n```\nIt adds 1.", "    return x + 1"),
        ("return x + 1```", "return x + 1"),
        ("8 + 7\n```\nThe sum is 15.", "8 + 7"),
        ("x\n```", "x"),
        ("print(8 + 7)\n```\nIt prints\n```\n15\n```", "print(8 + 7)"),
        ("for i in range(3):\n    print(i)\n```\nIt counts.", "for i in range(3):\n    print(i)"),
        (f"{DOCSTRING}\n```\nIt is x.", DOCSTRING),
        (DOCSTRING, DOCSTRING),
        ("x = '```'\nx", "x = '```'\nx"),
        ("# Solution\n```\n15\n```", "15"),
        ("# Solution\n```\n15", "15"),
        ("x = 5:\n```\n15\n```", "15"),
        ("Answer: 42\n```\n15\n```", "15"),
        ("For this I write:\n```\n15", "15"),
    ],
)
def test_code_at_the_beginning_is_told_from_text_before_a_block(
    completion: str, program: str
) -> None:
    assert program_of(completion) == program


@pytest.mark.parametrize(
    "text",
    [
        "```" + " " * 200_000,
        "```\n" * 50_000,
        "```python\n" * 20_000,
        "\n" * 200_000,
        "x = '" * 50_000,
    ],
)
def test_a_completion_made_to_be_slow_to_read_is_not(text: str) -> None:
    start = time.process_time()
    program_of(text)
    assert time.process_time() - start < 2


async def grade(
    answer: Execution, row: dict[str, Any], completion: str = "3+5", **params: Any
) -> Part:
    bound = registry.bind(
        RewardSpec(grader="python_value", params=params), tools_of(ScriptedSandbox(answer))
    )
    (part,) = await bound.grade([ScoreItem(prompt="", completion=completion, row=row)])
    return part


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (Execution(verdict="ok", value=15), Part(value=1.0, detail="evaluated to 15")),
        (
            Execution(verdict="ok", value=8),
            Part(value=0.0, verdict="wrong", detail="evaluated to 8, wanted 15"),
        ),
        (
            Execution(verdict="time_limit", stderr="late\n"),
            Part(value=0.0, verdict="time_limit", detail="late"),
        ),
        (
            Execution(verdict="memory_limit"),
            Part(value=0.0, verdict="memory_limit", detail="memory_limit"),
        ),
        (
            Execution(
                verdict="runtime_error", stderr="Traceback\nSyntaxError: bad\n", stdout="hello"
            ),
            Part(value=0.0, verdict="runtime_error", detail="SyntaxError: bad", stdout="hello"),
        ),
    ],
)
async def test_how_a_program_ended_is_its_verdict(answer: Execution, part: Part) -> None:
    assert await grade(answer, {"target": 15}) == part


async def test_a_broken_sandbox_is_no_reward() -> None:
    with pytest.raises(GradingFailed, match="no slot") as caught:
        await grade(Execution(verdict="sandbox_error", stderr="no slot"), {"target": 15})
    assert caught.value.errors == ("python_grader_server_error",)


async def test_the_expected_value_never_enters_the_sandbox() -> None:
    sandbox = ScriptedSandbox(Execution(verdict="ok", value=1))
    for params in ({}, {"tolerance": 0.5}):
        bound = registry.bind(RewardSpec(grader="python_value", params=params), tools_of(sandbox))
        await bound.grade(
            [
                ScoreItem(
                    prompt="",
                    completion="1+2",
                    row={"target": 987654321, "nums": [1, 2], "hint": "987654321"},
                )
            ]
        )
    assert len(sandbox.asked) == 2
    assert not any("987654321" in request.model_dump_json() for request in sandbox.asked)


def test_what_the_verdict_depends_on_is_the_program_and_the_columns_used() -> None:
    bound = registry.bind(RewardSpec(grader="python_value"), scripted())
    items = [
        ScoreItem(prompt="", completion=text, row={"target": 3, "x": text})
        for text in ("1+2", "So:\n```\n1+2\n```")
    ]
    assert [bound.content(item) for item in items] == [["1+2", 3, None]] * 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"target": 8, "nums": "3, 5"},
            "column 'nums' is '3, 5'; expected a list of whole numbers",
        ),
        (
            {"target": 8, "nums": [True]},
            r"column 'nums' is \[True\]; expected a list of whole numbers",
        ),
        ({"target": "8", "nums": [3, 5]}, "column 'target' is '8'; expected a number"),
    ],
)
async def test_columns_of_the_wrong_type_have_no_reward(row: dict[str, Any], message: str) -> None:
    with pytest.raises(GradingFailed, match=message):
        await grade(Execution(verdict="ok", value=8), row, numbers="nums")


async def test_waiting_behind_programs_that_sleep_makes_no_reward_missing() -> None:
    async with running_sandbox(1) as sandbox:
        spec = RewardSpec(grader="python_value", params={"timeout_s": 0.1})
        grader = registry.bind(spec, tools_of(sandbox))
        grader.deadline_s = 0.3
        items = [
            ScoreItem(prompt="", completion=f"import time\ntime.sleep(9)\n{n}", row={"target": n})
            for n in range(6)
        ]
        parts = await Caller(grader).grade(items)
        assert [part.verdict for part in parts] == ["time_limit"] * 6


async def test_a_row_without_a_target_grades_nothing(scripted_tools: GraderTools) -> None:
    grader = registry.bind(RewardSpec(grader="python_value"), scripted_tools)
    with pytest.raises(GradingFailed, match="column 'target' is None; expected a value"):
        await grader.grade([ScoreItem(prompt="", completion="print()", row={"target": None})])
    with pytest.raises(GradingFailed, match="column 'target' is None"):
        await grader.check_row({})


def test_no_two_threads_parse_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []
    parse = ast.parse

    def noting(*args: Any, **kwargs: Any) -> ast.AST:
        held.append(expressions._PARSING.locked())  # pyright: ignore[reportPrivateUsage]
        return parse(*args, **kwargs)

    monkeypatch.setattr(ast, "parse", noting)
    expressions.parse_program("x = 1")
    assert isinstance(expressions.parse_expression("1 + 2"), ast.BinOp)
    assert held == [True, True]
    assert not expressions._PARSING.locked()  # pyright: ignore[reportPrivateUsage]
