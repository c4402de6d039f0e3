"""Whose the names in tests are, rows that no one can pass, and which block of a completion is the
program."""

from __future__ import annotations

from typing import Any

import pytest

from services.reward.graders.code_tests.tests import read
from services.reward.grading.failures import GradingFailed
from services.reward.grading.programs import program_of
from services.reward.grading.registry import GraderTools
from services.reward.grading.scoring import Scorer
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire import Part, Prompt
from tests.support.reward_helpers import grade

LIAR = """
class Liar:
    year = 5
    def __call__(self, *a, **k): return self
    def __eq__(self, other): return True
    def __iter__(self): return iter([5])
def f(x): return 5
"""
JUDGED = {
    "isclose": "assert isclose(f(2), 12.566)",
    "sqrt": "assert sqrt(f(4)) == 2",
    "gcd": "assert f(4) == gcd(8, 12)",
    "factorial": "assert f(3) == factorial(2) * 2",
    "datetime": "assert f(3) == 4 and datetime(2020, 1, 1).year == f(2020)",
    "deepcopy": "x = [1]\nassert f(deepcopy(x)) == deepcopy([1])",
    "permutations": "assert sorted(f(3)) == sorted(permutations([1]))",
    "assert_equal": "assert_equal(f(2), 3)",
    "assertEqual": "assertEqual(f(2), 3)",
    "Counter": "assert Counter(f(2)) == Counter('ab')",
}


async def graded(tools: GraderTools, tests: Any, program: str, **params: Any) -> Part:
    return await grade(tools, program, {"tests": tests, "entry": "f"}, **params)


@pytest.mark.parametrize("name", JUDGED)
async def test_a_standard_name_that_judges_is_not_the_programs(
    name: str, tools: GraderTools
) -> None:
    for tests in (JUDGED[name], f"for i in range(1):\n    pass\n{JUDGED[name]}"):
        part = await graded(tools, tests, f"{LIAR}\n{name} = Liar()")
        assert part.value == 0.0 and part.verdict in ("wrong", "opaque"), part


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        ("assert isclose(f(2), 12.566, rel_tol=1e-3)", "def f(r): return 3.14159 * r * r"),
        ("assert_equal(f(2), 3)", "def f(x): return x + 1"),
        ("assert gcd(12, 18) == 6", "def gcd(a, b): return a if not b else gcd(b, a % b)"),
        ("n = factorial(5)\nassert n == 120", """
def factorial(n): return n * factorial(n - 1) if n else 1"""),
        ("assert f(2) == factorial(3)", "def f(n): return 6"),
        ("assert f(date(2024, 1, 31)) == date(2024, 2, 1)", "def f(d): return d + timedelta(1)"),
        ("x = f(1)\nassert x.date() == datetime.date(2020, 1, 2)", """
import datetime
def f(n): return datetime.datetime(2020, 1, 2)"""),
        ("assert even(half(4))\nassert not even(3)", """
def even(n): return n % 2 == 0
def half(n): return n // 2"""),
        ("assert back(there('ab')) == 'ab'", "back = there = lambda s: s[::-1]"),
        ("assert f(1).keys() == {'a'} and f(1).items() == {('a', 1)}", "def f(x): return {'a': 1}"),
        ("assert f(9) == 2**20000 and len(str(f(9))) == 6021", "def f(x): return 2**20000"),
    ],
)  # fmt: skip
async def test_a_right_program_passes_by_such_names(
    tests: str, program: str, tools: GraderTools
) -> None:
    part = await graded(tools, tests, program)
    assert part.value == 1.0, part


async def test_a_tested_name_is_not_given_to_a_program(tools: GraderTools) -> None:
    for name in ("gcd", "deepcopy", "Counter", "sqrt", "heappush"):
        for tests in (
            f"assert {name}(4, 6) == 2",
            {"fn_name": name, "inputs": [[4]], "outputs": [2]},
        ):
            part = await graded(tools, tests, "x = 1")
            assert (part.value, part.verdict) == (0.0, "runtime_error"), part
            assert "is not defined" in part.detail


async def test_usual_names_need_no_import_and_a_programs_own_win(tools: GraderTools) -> None:
    calls = {"fn_name": "f", "inputs": [[[3, 1]]], "outputs": [[1, 3]]}
    usual = """
class Solution:
    @lru_cache(None)
    def g(self, n: int) -> Optional[int]: return n
    def f(self, a: List[int]) -> Dict[str, int]:
        h, d = [], deque(a)
        while d: heappush(h, min(self.g(d.popleft()), inf))
        return [heappop(h), *sorted(h, key=cmp_to_key(lambda x, y: x - y))]
"""
    assert (await graded(tools, calls, usual)).value == 1.0
    own = "def heappop(a): return sorted(a)\ndef f(a): return heappop(a)"
    assert (await graded(tools, calls, own)).value == 1.0
    whole = [{"input": "3 1", "output": "1 3"}]
    part = await graded(tools, whole, "d = deque(input().split())\nprint(*sorted(d))")
    assert part.value == 0.0 and "deque" in part.detail


@pytest.mark.parametrize(
    ("tests", "told"),
    [
        ("assert check_it(f(2), 3)", "'check_it'"),
        ("assert not differ(f(2), g(3))", "'differ'"),
        ("check_equal(f(2), 3)\nassert f(1) == 2", "'check_equal'"),
        ("try:\n    f(1)\nexcept OwnError:\n    pass\nassert f(2) == 3", "the class 'OwnError'"),
        (
            "try:\n    f(1)\nexcept (ValueError, OwnError):\n    pass\nassert f(2) == 3",
            "'OwnError'",
        ),
        ("import unittest\nunittest.TestCase().assertRaises(OwnError, f, 1)", "'OwnError'"),
        ("assert isinstance(f(1), Shape)", "the class 'Shape'"),
        ("assert f(1) == EXPECTED", "'EXPECTED'"),
    ],
)
async def test_a_row_whose_verdict_is_the_programs_is_refused(tests: str, told: str) -> None:
    with pytest.raises(GradingFailed, match=told):
        read(tests, None, None, "", "")


ROWS = [
    {"tests": "assert f(1) == 2", "solution": "def f(x): return x + 1"},
    {"tests": "assert f(1) == 3", "solution": "```python\ndef f(x):\n    return x + 1\n```"},
    {"tests": "assert f(1) == 3", "solution": "It is clear."},
    {"tests": "assert f(1) == 3", "solution": "It = 3"},
    {"tests": [{"input": "1", "output": "3"}], "solution": "print(int(input()) + 1)"},
    {"tests": [{"input": "1", "output": "3"}], "solution": "3"},
]


async def test_a_row_that_its_own_solution_fails_is_refused(tools: GraderTools) -> None:
    scorer = Scorer(tools)
    spec = RewardSpec(grader="code_tests")
    prompts = [Prompt(index=at, content="", row=row) for at, row in enumerate(ROWS)]
    for at in (0, 2, 3, 5):
        await scorer.check([spec], ["tests"], [prompts[at]])
    with pytest.raises(BadRequest) as refused:
        await scorer.check([spec], ["tests"], prompts)
    told = str(refused.value)
    assert "row 1 of the data: the row's own solution fails its tests" in told
    assert "f(1) == 3 does not hold: it got 2" in told
    assert "2 of the 6 rows tried are refused" in told


SOLUTION = "```python\ndef f(x):\n    return 1\n```\n"
BODY = "def f(x):\n    return 1"


@pytest.mark.parametrize(
    "completion",
    [
        SOLUTION + "Usage:\n```python\nprint(f(2))\n```",
        SOLUTION + "```python\n>>> f(2)\n1\n```\n```\n1\n```",
        "```python\ndef f(x):\n    return 0\n```\nBetter:\n"
        + SOLUTION
        + "```py\nassert f(2) == 1\n```",
        "```\ndef f(x):\n    return 1\n```\nTry it:\n```python\nprint(f(1))\n```",
        "\ufeff" + SOLUTION,
        "```python\n\ufeffdef f(x):\n    return 1\n```",
        "```\u00a0python\ndef f(x):\n\u00a0\u00a0\u00a0\u00a0return 1\n```",
        "```language-python\ndef f(x):\n    return 1\n```",
        "```py3\ndef f(x):\n    return 1",
        "~~~ python\ndef f(x):\n    return 1\n~~~\n",
        "Sure:\r\n```python\r\ndef f(x):\r\n    return 1\r\n```\r\nDone.",
    ],
)
async def test_the_block_that_defines_what_is_tested_is_the_program(completion: str) -> None:
    tests = read("assert f(1) == 1", None, None, "", "")
    assert program_of(completion, tests.fit) == BODY


async def test_the_block_that_reads_input_is_the_whole_program() -> None:
    tests = read([{"input": "3", "output": "4"}], None, None, "", "")
    whole = "```python\nprint(int(input()) + 1)\n```\nSo\n```python\nprint('4')\n```"
    assert program_of(whole, tests.fit) == "print(int(input()) + 1)"
    silent = read([{"input": "", "output": "4"}], None, None, "", "")
    assert program_of(whole, silent.fit) == "print('4')"


async def test_what_takes_long_to_judge_ends_in_a_process_of_its_own(tools: GraderTools) -> None:
    slow = f"assert [f(7), {'sum(range(1000000)), ' * 200}] == [1]"
    part = await graded(tools, slow, "f = lambda x: 7")
    assert (part.value, part.verdict) == (0.0, "time_limit"), part
    assert "could not be judged" in part.detail
    right = await graded(tools, "assert f(1) == 2", "def f(x): return 2")
    assert right.value == 1.0
