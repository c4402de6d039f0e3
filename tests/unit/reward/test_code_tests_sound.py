"""Which tests of a row mean something: the style that is recognized, and rows that no program could
be graded by."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.reward.graders.code_tests.tests import read, recognized
from services.reward.grading.failures import GradingFailed
from services.reward.grading.scoring import Scorer
from services.reward.sandbox.local import LocalSandbox
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire import Prompt
from tests.support.reward_helpers import grade, tools_of

CHECK = "def check(candidate):\n    for x in range(3):\n        assert candidate(x) == x\n"
JUNK = "def f(x):\n    return 'junk'"


@pytest.mark.parametrize(
    ("value", "style"),
    [
        (["assert f(1) == 1"], "asserts"),
        ("assert f(1) == 1", "asserts"),
        (CHECK, "check"),
        (["import math", CHECK], "check"),
        (CHECK + "check(f)\n", "asserts"),
        (CHECK + "if True:\n    check(f)\n", "asserts"),
        ("def check(a, b):\n    return a == b\nassert check(f(1), 1)", "asserts"),
        ([{"input": "1", "output": "1"}], "stdio"),
        ({"inputs": ["1"], "outputs": ["1"]}, "stdio"),
        ('[{"input": "1", "output": "1"}]', "stdio"),
        ('{"inputs": ["1"], "outputs": ["1"]}', "stdio"),
        ("assert f(", "asserts"),
    ],
)
def test_the_style_is_recognized_from_the_tests(value: Any, style: str) -> None:
    assert recognized(value) == style


USELESS: list[tuple[Any, dict[str, Any], str]] = [
    (CHECK, {}, "the entry point is None; expected the name of a function, or"),
    (CHECK, {"style": "asserts"}, 'define check(candidate) and never call it; expected style "ch'),
    ("for i in range(3):\n    f(i)", {}, "the tests assert nothing: 'for i in range(3):"),
    ("assert (f(1) == 1, 'why')", {}, "the tests assert nothing: \"assert (f(1) == 1, 'why')"),
    (["assert (f(x) == x for x in [1])"], {}, "the tests assert nothing"),
    ("def check(candidate):\n    assert (candidate(1) == 1,)", {"entry": "f"}, "assert nothing"),
    (["x = f(1)", "print(x)"], {}, "expected assert statements on calls of the program's function"),
    ("def check(candidate):\n    candidate(1)\n    assert True", {"entry": "f"}, "assert nothing"),
    (
        "def test(x):\n    assert f(x) == 1",
        {},
        "end without a call of the program; expected calls of f. They define 'test' and do not c",
    ),
    (
        "import nothing_here\nfor x in [1]:\n    assert f(x)",
        {},
        "(ModuleNotFoundError: No module named 'nothing_here' (line 1: import nothing_here)) "
        "without a call of the program; expected calls of f. HONE_SANDBOX_PACKAGES names",
    ),
    ("while True: pass\nassert f(1) == 1", {}, "the tests themselves ended with time_limit"),
    (
        "for x in [1]:\n    assert eval(f(x)) == 24",
        {},
        "the tests use 'eval', and what a program r",
    ),
    (
        "for x in [1]:\n    assert value(f(x)) == 24",
        {"setup": "def value(text):\n    return eval(text)"},
        "the tests use 'eval'",
    ),
    (
        "for x in [1]:\n    s = Solution()\n    assert s.g(x) == 1",
        {},
        "an object of the class 'So",
    ),
    ("for x in [1]:\n    assert Solution().g(x) == 1", {}, "an object of the class 'Solution'"),
    (
        "for x in [1]:\n    assert f(open) == 1",
        {},
        "the tests pass on what is not plain data",
    ),
    ("for x in [1]:\n    assert Solution().find(x) == 1", {}, "an object of the class 'Solution'"),
    ("g = f(1)\nassert g(2) == 3", {}, "the tests call a result, g"),
    ("for x in [1]:\n    assert f(x)(2) == 3", {}, "the tests call a result, f(x)"),
    ("x = [2, 1]\nf(x)\nassert x == [1, 2]", {}, "look at what f(x) changes, and calls get cop"),
    (
        "def check(candidate):\n    x = [2, 1]\n    candidate(x)\n    assert x == [1, 2]",
        {"entry": "f"},
        "look at what candidate(x) changes",
    ),
    (
        "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    f(1)\n"
        "assert out.getvalue() == '1\\n'",
        {},
        "the tests read what a program prints",
    ),
    ("assert f(1) == " + "1 + " * 40_000 + "1", {}, "nest too deeply, or are too long an exp"),
    ([{"input": "1", "output": "\n"}], {}, "no test expects any output"),
    ([], {}, "the row has no tests: []; expected assert statements"),
    ({"inputs": None, "outputs": None}, {}, "the tests are {'inputs': None, 'outputs': None}; exp"),
    ({"inputs": "12", "outputs": "34"}, {}, "the tests are {'inputs': '12', 'outputs': '34'}; exp"),
    ({"inputs": ["1", "2"], "outputs": ["1"]}, {}, "have 2 inputs and 1 outputs; expected as many"),
    ({"inputs": ["1", [2]], "outputs": ["1", "2"]}, {}, "test 2 is {'input': [2], 'output': "),
    ({"fn_name": "f", "inputs": [[1]], "outputs": [None]}, {}, "no test expects a result of f"),
    (
        {"fn_name": "f()", "inputs": [[1]], "outputs": [2]},
        {},
        "the function 'f()'; expected a name",
    ),
    (
        {"fn_name": "f", "inputs": [1], "outputs": [2]},
        {},
        "a call is 1 with the result 2; expected",
    ),
    ([{"input": "1", "output": "2", "testtype": "functional"}], {}, "do not name it; expected its"),
    (
        "x = 1\nassert f(1 == 1",
        {},
        "the tests are not Python: '(' was never closed (line 2: 'asser",
    ),
    (
        "assert f(1) == 1",
        {"setup": "import )"},
        "the setup, or the prefix that the tests use, is n",
    ),
]


@pytest.mark.parametrize(("tests", "params", "message"), USELESS)
async def test_a_row_by_which_no_program_can_be_graded_is_told_before_and_while_training(
    sandbox: LocalSandbox, tests: Any, params: dict[str, Any], message: str
) -> None:
    row = {"tests": tests, "name": params.get("entry"), "setup": params.get("setup")}
    entry = {"entry_point": "name"} if "entry" in params else {}
    style = {"style": params["style"]} if "style" in params else {}
    spec = RewardSpec(
        grader="code_tests", params={"cpu_s": 0.1, "setup": "setup", **entry, **style}
    )
    scorer = Scorer(tools_of(sandbox))
    usable = {**row, "tests": ["assert f(1) == 1"], "name": "f", "setup": None}
    good = Prompt(index=1, content="", row=usable)
    bad = Prompt(index=7, content="", row=row)
    with pytest.raises(BadRequest) as refused:
        await scorer.check([spec], [*row], [good, bad])
    assert refused.value.detail.startswith("reward 'code_tests', row 7 of the data: ")
    assert message in refused.value.detail
    with pytest.raises(GradingFailed) as missing:
        await grade(sandbox, JUNK, row, **spec.params)
    assert message in missing.value.detail
    await scorer.close()


async def test_rows_that_can_be_graded_pass_the_check(sandbox: LocalSandbox) -> None:
    spec = RewardSpec(grader="code_tests", params={"entry_point": "name"})
    prompts = [
        Prompt(index=index, content="", row={"tests": tests, "name": "f"})
        for index, tests in enumerate(
            [
                CHECK,
                ["import math", "assert math.isclose(f(1), 1)"],
                "try:\n    f(-1)\n    assert False\nexcept ValueError: pass",
                "for x in [1]:\n    assert Find_Max([x]).copy() == [1]",
                "for x in [1]:\n    assert eval('1 + 1') == f(x)",
                [{"input": "", "output": ""}, {"input": "1", "output": "1"}],
                "import unittest\ncase = unittest.TestCase()\nfor x in [1]: case.assertTrue(f(x))",
            ]
        )
    ]
    scorer = Scorer(tools_of(sandbox))
    await scorer.check([spec], ["tests", "name"], prompts)
    await scorer.close()


def test_asserts_and_setup_may_be_lists_also_as_json_text() -> None:
    asserts = ["assert f(1) == 1", "assert f(2) == 2"]
    assert read(json.dumps(asserts), None, None, "", "").count == 2


async def test_what_failed_is_told_where_asserts_have_no_message(sandbox: LocalSandbox) -> None:
    tests = "for x in [1, 2]:\n    assert same(f(x), x)"
    row = {"tests": tests, "setup": ["import math", "same = math.isclose"]}
    part = await grade(sandbox, "def f(x):\n    return 1", row, setup="setup")
    assert part.detail == "test 1 of 1: AssertionError (line 2: assert same(f(x), x))"


@pytest.mark.parametrize(
    "test",
    [
        "assert same(f(7), 8) == True",
        "assert True is same(f(7), 8)",
        "assert not same(f(7), 8) is False",
        "assert bool(same(f(7), 8))",
        "assert all([same(f(7), 8), same(f(8), 9)])",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
        "        self.assertTrue(same(f(7), 8))\nunittest.main()",
        "r = f(7)\nassert same(r, 8)",
        "assert all(same(r, 8) for r in [f(7)])",
        "for a, b in zip(f(7), [8]):\n    assert same(a, b)",
    ],
)
def test_a_program_does_not_judge_itself_however_its_judge_is_asserted(test: str) -> None:
    with pytest.raises(GradingFailed, match="take 'same' from the program, which would judge its"):
        read(test, None, None, "", "")
    assert read(f"assert same(1, 2) == False\n{test}", None, None, "", "").count


def test_a_text_that_asserts_nothing_is_for_those_after_it() -> None:
    tests = read(["import math", "assert math.isclose(f(1), 1)"], None, None, "", "")
    assert (tests.count, tests.imports) == (1, "import math")


async def test_a_first_row_without_the_tests_is_told_as_a_sentence(sandbox: LocalSandbox) -> None:
    scorer = Scorer(tools_of(sandbox))
    with pytest.raises(BadRequest) as refused:
        await scorer.check(
            [RewardSpec(grader="code_tests")], ["tests"], [Prompt(index=3, content="", row={})]
        )
    assert "row 3 of the data: the tests are None; expected Python source" in refused.value.detail
    await scorer.close()
