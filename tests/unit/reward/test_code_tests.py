"""Programs and tests as people write them, in the real sandbox."""

from __future__ import annotations

from typing import Any

import pytest

from services.reward.graders.code_tests import CodeTestsParams, candidate, completed
from services.reward.grading import registry
from services.reward.sandbox.local import SHORT_S, LocalSandbox
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.settings import Settings
from shared.wire import ExecuteRequest, Execution, ScoreItem
from tests.support.reward_helpers import ScriptedSandbox, grade, scripted, tools_of

pytestmark = pytest.mark.slow


UNITTEST = (
    "import unittest\nclass Tests(unittest.TestCase):\n    def test_sum(self):\n"
    "        self.assertEqual(f(1, 2), 3)\n        for x in range(3):\n"
    "            with self.subTest(x=x):\n                self.assertEqual(f(x, 2), x + 2)\n"
)
RUN = "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(Tests))"
SUM, DIFFERENCE = "def f(a, b):\n    return a + b", "def f(a, b):\n    return 3 - (a - 1) * 9"
LENGTHS = (
    "for k in (3, 4):\n    n = len(f(k))\n    assert f(n) == 'x' * n\n"
    "    assert int(g(n)) == n and g(int(g(n)) - 1) == str(n - 1)"
)
ENDLESS = (
    "def f(n):\n    text = ''\n    while len(text) != n or n == 0: text += 'x'\n    return text\n"
    "def g(n):\n    return str(len([0] * (10 ** 10 if n < 1 else n)))"
)
RAISES = (
    "try:\n    f({0})\n    raise SystemExit(1)\n"
    "except {1} as error:\n    assert str(error) == {2!r}\n"
)
WAYS: list[tuple[str, str, str]] = [
    ("x = [1]\nassert f(x, [2]) == [1, 2]", SUM, "def f(a, b):\n    return a"),
    (UNITTEST + "unittest.main()", SUM, DIFFERENCE),
    (UNITTEST + "unittest.main(exit=False)", SUM, DIFFERENCE),
    (UNITTEST + RUN, SUM, DIFFERENCE),
    (
        "def test():\n    for x in range(3):\n        assert f(x, 2) == x + 2\n"
        "if __name__ == '__main__':\n    test()",
        SUM,
        DIFFERENCE,
    ),
    ("import sys\nsys.exit(any(f(x, 2) != x + 2 for x in range(4)))", SUM, DIFFERENCE),
    (LENGTHS, ENDLESS, ENDLESS.replace("return text", "return text + 'x'")),
    (
        RAISES.format("-1", "ValueError", "no: -1") + "assert f(1) == 1",
        "class No(ValueError): pass\ndef f(x):\n    if x < 0: raise No(f'no: {x}')\n    return x",
        "class No(LookupError): pass\ndef f(x):\n    if x < 0: raise No(f'no: {x}')\n    return x",
    ),
    (
        RAISES.format("'a'", "KeyError", "'a'"),
        "def f(x):\n    return {}[x]",
        "def f(x):\n    return x",
    ),
    (
        "import math\nassert math.isnan(f())",
        "def f():\n    return float('nan')",
        "def f(): return 1",
    ),
    ("assert f(3)(4) == 7", "def f(n):\n    return lambda m: n + m", "def f(n):\n    return abs"),
]
"""Tests as people write them too, with a right and a wrong program."""

COUNTING = "seen = []\nfor x in range(3):\n    seen.append(f(f(x)))\nassert seen == [2, 4, 6]"
CHAIN = "x = 0\nfor _ in range(110):\n    x = inc(x)\nassert x == 110"
IN_ORDER = "x = f(f(0))\ny = f(7)\nif x == 2:\n    z = f(1)\nassert (x, y) == (2, 3)"
MBPP: list[tuple[str, list[str]]] = [
    (
        "def first(words):\n    return next(w for w in words if w in set(words))",
        ["assert first(['a', 'b']) == 'a'"],
    ),
    (
        "from collections import Counter\ndef count(x):\n    return Counter(x)",
        ["assert count('aab') == {'a': 2, 'b': 1}"],
    ),
    (
        "def pairs(n):\n    for i in range(n):\n        yield i, i",
        ["assert list(pairs(2)) == [(0, 0), (1, 1)]"],
    ),
    (
        "def area(r):\n    return 3.14159265 * r * r",
        ["import math\nassert math.isclose(area(2), 12.5663, rel_tol=0.001)"],
    ),
    (
        "class Solution:\n    def twice(self, x):\n        return 2 * x",
        ["assert Solution().twice(4) == 8"],
    ),
    (
        "def encode(s):\n    return s[::-1]\ndecode = encode",
        ["assert decode(encode('abc')) == 'abc'"],
    ),
    ("def sum(a, b):\n    return a * b", ["assert sum(2, 5) == 10"]),
    (
        "def f(d):\n    return {k: set(v) for k, v in d.items()}",
        ["assert f({(1, 2): [3, 3]}) == {(1, 2): {3}}"],
    ),
    ("def inf():\n    return float('inf')", ["assert inf() == float('inf')"]),
    (
        "def root(x):\n    if x < 0: raise ValueError('negative')\n    return x ** .5",
        ["try:\n    root(-1)\n    assert False\nexcept ValueError: pass"],
    ),
    (
        "count = 0\ndef f(x):\n    global count\n    count += 1\n    return count",
        [COUNTING, IN_ORDER],
    ),
    ("def inc(x):\n    return x + 1", [CHAIN]),
    ("def inc(x):\n    return x + 1", ["for x in range(50):\n    assert inc(inc(x)) == x + 2"]),
]


@pytest.mark.parametrize(("program", "tests"), MBPP)
async def test_right_programs_pass_the_tests_people_write(
    sandbox: LocalSandbox, program: str, tests: list[str]
) -> None:
    part = await grade(sandbox, f"Sure.\n```python\n{program}\n```\n", {"tests": tests})
    assert (part.value, part.detail) == (1.0, f"passed {len(tests)} tests")


async def test_the_body_of_a_function_is_put_below_its_prompt_and_a_whole_function_is_not(
    sandbox: LocalSandbox,
) -> None:
    prompt = 'def helper(x):\n    return x + 1\n\ndef twice(x):\n    """Doubles."""\n'
    tests = (
        "def check(candidate):\n    for x in range(3):\n"
        "        assert candidate(helper(x)) == 2 * helper(x)\n"
    )
    row = {"test": tests, "prompt": prompt, "name": "twice"}
    params = {"tests": "test", "style": "check", "entry_point": "name", "prefix": "prompt"}
    assert (await grade(sandbox, "    return x * 2\n", row, **params)).value == 1.0
    assert (
        await grade(sandbox, "```python\ndef twice(x):\n    return x + x\n```", row, **params)
    ).value == 1.0
    cheat = "```python\ndef helper(x):\n    return 0\ndef twice(x):\n    return 0\n```"
    assert (await grade(sandbox, cheat, row, **params)).verdict == "wrong"


ZERO = """import math

def poly(xs: list, x: float):
    return sum([coeff * math.pow(x, i) for i, coeff in enumerate(xs)])

def find_zero(xs: list):
    \"\"\"Returns one x with poly(xs, x) == 0.\"\"\"
"""
BISECTED = """    begin, end = -1.0, 1.0
    while poly(xs, begin) * poly(xs, end) > 0:
        begin *= 2.0
        end *= 2.0
    while end - begin > 1e-10:
        center = (begin + end) / 2.0
        if poly(xs, center) * poly(xs, begin) > 0:
            begin = center
        else:
            end = center
    return begin
"""
FIND_ZERO = """
def check(candidate):
    import math
    import random
    rng = random.Random(42)
    import copy
    for _ in range(100):
        ncoeff = 2 * rng.randint(1, 4)
        coeffs = []
        for _ in range(ncoeff):
            coeff = rng.randint(-10, 10)
            if coeff == 0:
                coeff = 1
            coeffs.append(coeff)
        solution = candidate(copy.deepcopy(coeffs))
        assert math.fabs(poly(coeffs, solution)) < 1e-4
"""
ADD = """
def check(candidate):
    import random
    assert candidate(0, 1) == 1
    for i in range(700):
        x, y = random.randint(0, 1000), random.randint(0, 1000)
        assert candidate(x, y) == x + y
"""
LOOPED: list[tuple[str, str, str, str]] = [
    ("find_zero", FIND_ZERO, ZERO, BISECTED),
    ("add", ADD, 'def add(x: int, y: int):\n    """Adds."""\n', "    return x + y\n"),
]


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("I do not know", "SyntaxError: invalid syntax (program.py, line 1)"),
        ("raise ValueError('no')", "ValueError: no"),
        ("x = 1", "NameError: name 'f' is not defined"),
    ],
)
async def test_tests_that_expect_errors_are_not_met_by_a_program_without_the_function(
    sandbox: LocalSandbox, program: str, detail: str
) -> None:
    for error in ("ValueError", "KeyError", "Exception"):
        row = {"tests": f"try:\n    f(-1)\n    assert False\nexcept {error}:\n    pass"}
        part = await grade(sandbox, program, row)
        assert (part.value, part.detail) == (0.0, f"test 1 of 1: {detail}")
        assert (await grade(sandbox, f"def f(x): raise {error}", row)).value == 1


@pytest.mark.parametrize(("name", "tests", "prompt", "right"), LOOPED)
async def test_looped_checks_as_humaneval_has_them_tell_right_from_wrong(
    sandbox: LocalSandbox, name: str, tests: str, prompt: str, right: str
) -> None:
    row = {"tests": tests, "name": name, "prompt": prompt}
    params: dict[str, Any] = {"entry_point": "name", "prefix": "prompt"}
    assert (await grade(sandbox, right, row, **params)).detail == "passed 1 tests"
    for wrong in ("    return 0\n", "    return object()\n", "    return float('nan')\n"):
        assert (await grade(sandbox, wrong, row, **params)).verdict == "wrong"


PROMPT = """import math
from typing import List

def halved(x):
    return x / 2

def total(numbers: List[float]) -> float:
    \"\"\"Returns the sum of halves.
    >>> total([2, 4])
    3.0
    \"\"\"
"""


@pytest.mark.parametrize(
    "completion",
    [
        "    return math.fsum(map(halved, numbers))\n",
        "```python\ndef total(numbers: List[float]) -> float:\n"
        "    return math.fsum(map(halved, numbers))\n```",
        "```python\nfrom __future__ import annotations\n\ndef total(numbers: Row) -> float:\n"
        "    return math.fsum(numbers) / 2\n```",
        "```python\n    return sum(numbers) / 2\n```",
        "```python\ntotal = lambda numbers: math.fsum(map(halved, numbers))\n```",
        PROMPT + "    return sum(map(halved, numbers))\n",
    ],
)
async def test_a_function_defined_again_keeps_what_stands_above_it_in_the_prompt(
    sandbox: LocalSandbox, completion: str
) -> None:
    tests = "def check(candidate):\n    assert candidate([2, 4]) == 3.0\n"
    row = {"tests": tests, "prompt": PROMPT, "name": "total"}
    part = await grade(sandbox, completion, row, entry_point="name", prefix="prompt")
    assert (part.value, part.detail) == (1.0, "passed 1 tests")


async def test_what_stands_above_a_function_is_without_its_decorators() -> None:
    again = "def total(numbers):\n    return 0"
    above, _, function = PROMPT.partition("\n\ndef total")
    decorated = f"{above}\n\n@cached\n@timed(1)\ndef total{function}"
    assert completed(again, decorated, "total") == (f"{above}\n", again)
    assert completed(again, "", "total") == ("", again)
    body = completed("    pass", "def total(numbers):\n", "total")
    assert body == ("", "def total(numbers):\n    pass")


async def test_partial_credit_is_the_share_of_passed_tests_whatever_ends_the_others(
    sandbox: LocalSandbox,
) -> None:
    ends = ["os._exit(0)", "sys.exit(0)", "return object()"]
    program = (
        "import os, sys\ndef f(x):\n"
        + "".join(f"    if x == {x}: {end}\n" for x, end in enumerate(ends, 1))
        + "    return x"
    )
    row = {"tests": [f"assert f({x}) == {x}" for x in range(5)]}
    part = await grade(sandbox, program, row, credit="partial")
    assert (part.value, part.verdict) == (0.4, "runtime_error")
    assert part.detail.startswith("test 2 of 5: ")
    assert (await grade(sandbox, program, row)).value == 0.0


async def test_the_first_failing_test_is_the_last_one_unless_partial_credit_is_asked() -> None:
    row = {"tests": [{"input": str(x), "output": str(x)} for x in range(4)]}
    watched = ScriptedSandbox(Execution(verdict="ok", stdout="1\n"))
    for credit, num_jobs, value in (("binary", 1, 0.0), ("partial", 4, 0.25)):
        bound = registry.bind(
            RewardSpec(grader="code_tests", params={"style": "stdio", "credit": credit}),
            tools_of(watched),
        )
        (part,) = await bound.grade([ScoreItem(prompt="", completion="print(1)", row=row)])
        assert (len(watched.asked), part.value) == (num_jobs, value)
        watched.asked.clear()


async def test_each_call_has_its_own_time(sandbox: LocalSandbox) -> None:
    program = (
        "import time\ndef f(x):\n    end = time.process_time() + x\n"
        "    while time.process_time() < end: pass\n    return x"
    )
    row = {"tests": ["assert f(0.2) == 0.2", "assert f(5) == 5", "assert f(0) == 0"]}
    part = await grade(sandbox, program, row, cpu_s=0.5, credit="partial")
    assert (part.value, part.verdict) == (2 / 3, "time_limit")
    assert part.detail == "test 2 of 3: more than 0.5 s of CPU time in f(5) == 5"


async def test_what_a_program_printed_is_kept(sandbox: LocalSandbox) -> None:
    part = await grade(
        sandbox,
        "print('hello')\ndef f(x):\n    print(x)\n    return x",
        {"tests": ["assert f(1) == 2"]},
    )
    assert part.stdout == "hello\n1\n"
    assert part.detail == "test 1 of 1: f(1) == 2 does not hold: it got 1"


async def test_equal_programs_and_tests_are_one_content(sandbox: LocalSandbox) -> None:
    bound = registry.bind(RewardSpec(grader="code_tests"), tools_of(sandbox))
    one, two = (
        ScoreItem(prompt="", completion=text, row={"tests": ["x"], "id": text})
        for text in ("x = 1", "So\n```py\nx = 1\n```")
    )
    assert bound.pure and bound.content(one) == bound.content(two)


async def test_check_style_needs_an_entry_point() -> None:
    bound = registry.bind(RewardSpec(grader="code_tests", params={"style": "check"}), scripted())
    with pytest.raises(BadRequest, match='style "check" needs entry_point'):
        await bound.check(["tests"])


@pytest.mark.parametrize(("tests", "right", "wrong"), WAYS)
async def test_other_ways_of_testing_tell_right_from_wrong(
    sandbox: LocalSandbox, tests: str, right: str, wrong: str
) -> None:
    for program, value in ((right, 1.0), (wrong, 0.0)):
        part = await grade(sandbox, program, {"tests": tests}, cpu_s=0.3)
        assert (part.value, part.verdict == "ok") == (value, value == 1.0), part.detail


async def test_a_sandbox_compiles_none_of_our_own_code(sandbox: LocalSandbox) -> None:
    arguments = {
        "setup": "",
        "program": SUM,
        "calls": [["expression", "f(2, 3)"]],
        "cpu_s": 1.0,
        "last": [],
        "names": [],
    }
    request = candidate.job("inside_candidate", arguments)
    files = request.inputs["_files"]
    compiled = {"_files": [[name, code, "not Python"] for name, code, _ in files]}
    of_another = {"_files": [[name, "00", text] for name, _, text in files], "_hexversion": 0}
    for other in (compiled, of_another):
        inputs = {**request.inputs, **other}
        ended = await sandbox.execute(request.model_copy(update={"inputs": inputs}))
        assert ended.value == [["value", "5"]], ended


@pytest.mark.parametrize(
    ("completion", "tests"),
    [
        ("def f(x):\n    time.sleep(60)", ["assert f(1) == 1", "assert f(2) == 2"]),
        ("def f(x):\n    time.sleep(60)", "for x in range(3):\n    assert f(x) == x"),
        ("time.sleep(60)", [{"input": "", "output": "1"}, {"input": "1", "output": "2"}]),
    ],
    ids=["asserts", "loop", "stdio"],
)
async def test_a_program_sleeps_only_so_long_in_all_its_tests(
    sandbox: LocalSandbox, completion: str, tests: Any
) -> None:
    ran: list[Execution] = []

    class Noting(ScriptedSandbox):
        async def execute(self, request: ExecuteRequest) -> Execution:
            ran.append(await sandbox.execute(request))
            return ran[-1]

    if "whole programs" not in sandbox.report()["limits"]:
        pytest.skip("needs a cgroup for each slot")
    noting: Any = Noting(Execution(verdict="ok"))
    completion = f"import time\n{completion}"
    part = await grade(noting, completion, {"tests": tests}, idle_s=1.0, credit="partial")
    assert (part.value, part.verdict) == (0.0, "time_limit"), part
    assert sum(one.verdict == "time_limit" for one in ran) == 1


async def test_programs_that_sleep_leave_most_of_the_deadline_of_a_step() -> None:
    idle_s, slots, programs = CodeTestsParams().idle_s, 4, 384  # the slots of a host with two cores
    idle_s += SHORT_S["idle_s"]  # each is tried twice
    assert programs / slots * idle_s <= Settings().short_deadline_s / 2
