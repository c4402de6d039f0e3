"""Tests in the forms that public data sets have, and of what functions return beyond numbers, text
and lists, in the real sandbox: a right program earns 1, an honest mutant 0. Forgeries of these
forms are among the ways of `tests/support/forgeries.py`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.reward.graders.code_tests.tests import read
from services.reward.grading.failures import GradingFailed
from services.reward.sandbox.local import LocalSandbox
from shared.wire import Part
from tests.support import reward_helpers

KODCODE = """
from solution import chunks

def test_even():
    assert chunks([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]

def test_rest():
    items = [1, 2, 3]
    result = chunks(items, 2)
    assert len(result) == 2
    assert result[-1] == [3]

def test_error():
    try:
        chunks([1], 0)
    except ValueError:
        return
    assert False
"""
CHUNKS = "def chunks(x, n):\n    return [x[i:i + n] for i in range(0, len(x), n)]"
PAIR = "def pair(numbers, total):\n    return (numbers[0], total - numbers[0])"
SUMS = "while True:\n    try: print(sum(map(int, input().split())))\n    except EOFError: break"
TWICE = "class Solution:\n    def twice(self, n: int) -> int:\n        return n * 2"
LEETCODE = (
    "def check(candidate):\n    assert candidate(n = 2) == 4\n    assert candidate(n = -1) == -2"
)


def row(tests: Any, name: str | None = None) -> dict[str, Any]:
    return {"tests": tests, "name": name}


FORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "KodCode": (row(KODCODE), CHUNKS, CHUNKS.replace("i + n]", "i + 2]").replace("x), n", "x), 2")),
    "APPS, a function": (
        row({"fn_name": "pair", "inputs": [[[1, 2], 5], [[4], 4]], "outputs": [[1, 4], [4, 0]]}),
        PAIR,
        PAIR.replace("total - ", ""),
    ),
    "APPS, results in lists, as text": (
        row(json.dumps({"fn_name": "f", "inputs": [["a"], ["3"]], "outputs": [["aa"], ["33"]]})),
        "def f(x):\n    return x * 2",
        "def f(x):\n    return x * 2 if x == 'a' else int(x) * 11",
    ),
    "APPS, lists of one item": (
        row({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2]]}),
        "def f(x):\n    return [x]",
        "def f(x):\n    return [[x]]",
    ),
    "TACO, keys of JSON": (
        row({"fn_name": "f", "inputs": [[[5, 5]]], "outputs": [{"5": 2}]}),
        "def f(x):\n    return {n: x.count(n) for n in x}",
        "def f(x):\n    return {n: len(set(x)) for n in x}",
    ),
    "a class for fn_name": (
        row({"fn_name": "twice", "inputs": [[2], [5]], "outputs": [4, 10]}),
        TWICE,
        TWICE.replace("n * 2", "n ** 2"),
    ),
    "LiveCodeBench, functional": (
        row(
            json.dumps([{"input": "[1, 2]\n5", "output": "[1, 4]", "testtype": "functional"}]),
            "pair",
        ),
        PAIR,
        PAIR.replace("total - ", ""),
    ),
    "LiveCodeBench, stdin": (
        row([{"input": "1 2\n3 4", "output": "3\n7", "testtype": "stdin"}]),
        SUMS,
        SUMS.replace("sum", "max"),
    ),
    "lists of lines": (
        row({"inputs": [["1 2", "3 4"]], "outputs": [["3", "7"]]}),
        SUMS,
        SUMS.replace("sum", "max"),
    ),
    "LeetCode": (row(LEETCODE, "Solution().twice"), TWICE, TWICE.replace("n * 2", "n ** 2")),
    "LeetCode, looped": (
        row("def check(candidate):\n    for n in range(4): assert candidate(n) == n + n",
            "Solution().twice"),
        TWICE,
        TWICE.replace("n * 2", "n ** 2"),
    ),
}  # fmt: skip


async def grade(sandbox: LocalSandbox, program: str, given: dict[str, Any], **params: Any) -> Part:
    return await reward_helpers.grade(sandbox, program, given, entry_point="name", **params)


@pytest.mark.parametrize("form", FORMS)
async def test_tests_of_public_data_sets_tell_right_from_wrong(
    sandbox: LocalSandbox, form: str
) -> None:
    given, program, mutant = FORMS[form]
    parts = [await grade(sandbox, one, given) for one in (program, mutant)]
    assert [part.value for part in parts] == [1.0, 0.0], parts


async def test_functions_of_pytest_are_tests_of_their_own(sandbox: LocalSandbox) -> None:
    wrong = CHUNKS.replace("return", "return [] if n == 0 else")
    part = await grade(sandbox, wrong, row(KODCODE), credit="partial")
    assert part.value == 2 / 3, part


def test_results_given_as_data_take_a_tolerance() -> None:
    value = {"fn_name": "f", "inputs": [[1]], "outputs": [0.3]}
    (case,) = read(value, None, None, "", "", tolerance=0.0).cases
    assert case.source == "f(1) == 0.3"
    assert case.calls == ("(f if 'f' in globals() else Solution().f)(1)",)


@pytest.mark.parametrize("entry", ["Solution().", "Solution()().f", "f()", "a.b", "1f"])
def test_an_entry_point_is_a_function_or_a_method_of_a_plain_object(entry: str) -> None:
    with pytest.raises(GradingFailed, match="the entry point is"):
        read(LEETCODE, None, entry, "", "")


WAYS: dict[str, tuple[str, str, str, str]] = {
    "fraction": (
        "from fractions import Fraction\nassert f(1, 2) == Fraction(1, 2)\nassert f(4, 2) == 2",
        "from fractions import Fraction\ndef f(a, b):\n    return Fraction(a, b)",
        "Fraction(a, b)",
        "Fraction(b, a)",
    ),
    "fraction, looped": (
        "from fractions import Fraction\nfor n in (1, 3):\n    assert f(n, 2) * 2 == n",
        "from fractions import Fraction\ndef f(a, b):\n    return Fraction(a, b)",
        "Fraction(a, b)",
        "Fraction(a + 1, b)",
    ),
    "decimal": (
        "from decimal import Decimal\nassert f('1.10') == Decimal('2.20')",
        "from decimal import Decimal\ndef f(text):\n    return Decimal(text) * 2",
        "* 2",
        "* 3",
    ),
    "date": (
        "from datetime import date\nassert f(2024) == date(2024, 2, 29)",
        "import datetime\ndef f(year):\n    return datetime.date(year, 2, 29)",
        "29",
        "28",
    ),
    "an attribute of a datetime": (
        "for hour in (1, 2):\n    assert f(hour).hour == hour",
        "import datetime\ndef f(hour):\n    return datetime.datetime(2024, 1, 1, hour)",
        "1, hour)",
        "1, hour + 1)",
    ),
    "time between dates": (
        "from datetime import date, timedelta\n"
        "assert f(date(2024, 1, 1), date(2024, 3, 1)) == timedelta(days=60)",
        "def f(a, b):\n    return b - a",
        "b - a",
        "a - b",
    ),
    "deque": (
        "from collections import deque\nassert f([1, 2, 3]) == deque([3, 2, 1])",
        "from collections import deque\ndef f(x):\n    return deque(x[::-1])",
        "deque(x[::-1])",
        "deque(x)",
    ),
    "no list for a deque": (
        "from collections import deque\nassert f([1, 2]) == deque([1, 2])",
        "from collections import deque\ndef f(x):\n    return deque(x)",
        "deque(x)",
        "list(x)",
    ),
    "counter": (
        "from collections import Counter\nassert f('aab') == Counter(a=2, b=1)\n"
        "assert f('aab').most_common(1) == [('a', 2)]\nassert f('a')['z'] == 0",
        "from collections import Counter\ndef f(x):\n    return Counter(x)",
        "Counter(x)",
        "Counter(set(x))",
    ),
    "defaultdict": (
        "assert f('ab') == {'a': [0], 'b': [1]}",
        "from collections import defaultdict\ndef f(x):\n    places = defaultdict(list)\n"
        "    for place, one in enumerate(x): places[one].append(place)\n    return places",
        "append(place)",
        "append(one)",
    ),
    "ordered dict": (
        "from collections import OrderedDict\n"
        "assert f({'b': 1, 'a': 2}) == OrderedDict([('a', 2), ('b', 1)])",
        "from collections import OrderedDict\ndef f(x):\n    return OrderedDict(sorted(x.items()))",
        "sorted(x.items())",
        "x",
    ),
    "range": (
        "r = f(3)\nassert r[1] == 1 and len(r) == 3 and r == range(3)",
        "def f(n):\n    return range(n)",
        "range(n)",
        "range(1, n + 1)",
    ),
    "keys": (
        "keys = f({'a': 1})\nassert len(keys) == 1 and keys == {'a'}",
        "def f(x):\n    return x.keys()",
        "x.keys()",
        "dict(b=1).keys()",
    ),
    "generator": (
        "assert list(f(3)) == [0, 1, 4]",
        "def f(n):\n    for k in range(n): yield k * k",
        "k * k",
        "k + k",
    ),
    "endless generator": (
        "from itertools import islice\nassert list(islice(f(2), 4)) == [2, 4, 8, 16]\n"
        "assert [x for _, x in zip(range(2), f(3))] == [3, 9]\nassert next(f(5)) == 5",
        "def f(n):\n    power = n\n    while True:\n        yield power\n        power *= n",
        "power *= n",
        "power += n",
    ),
    "endless generator of factorials": (
        "gen = f()\nassert [next(gen) for _ in range(4)] == [1, 2, 6, 24]",
        "def f():\n    n = k = 1\n    while True:\n        yield n\n        k += 1\n        n *= k",
        "n *= k",
        "n += k",
    ),
    "endless generator that should end": (
        "assert [*f(3)] == [0, 1, 2]",
        "def f(n):\n    k = 0\n    while k < n:\n        yield k\n        k += 1",
        "k < n",
        "True",
    ),
    "async function": (
        "import asyncio\nassert asyncio.run(f(2)) == 4",
        "import asyncio\nasync def f(n):\n    await asyncio.sleep(0)\n    return n * n",
        "n * n",
        "n * n * n",
    ),
    "awaited in tests": (
        "import asyncio\nasync def main():\n    assert await f(2) == 4\n"
        "    assert await asyncio.gather(f(1), f(3)) == [1, 9]\nasyncio.run(main())",
        "async def f(n):\n    return n * n",
        "n * n",
        "n + 2",
    ),
    "an error of an async function": (
        "import asyncio\nasync def main():\n    try:\n        await f(-1)\n"
        "    except ValueError:\n        return\n    assert False\nasyncio.run(main())",
        "async def f(n):\n    if n < 0: raise ValueError(n)",
        "ValueError(n)",
        "KeyError(n)",
    ),
}


@pytest.mark.parametrize("way", WAYS)
async def test_values_of_standard_classes_tell_right_from_wrong(
    sandbox: LocalSandbox, way: str
) -> None:
    tests, program, right, wrong = WAYS[way]
    assert program.count(right) == 1
    mutant = program.replace(right, wrong)
    parts = [await grade(sandbox, one, row(tests)) for one in (program, mutant)]
    assert [part.value for part in parts] == [1.0, 0.0], parts


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        ("assert f(1, 2) == Fraction(1, 2)", "def f(*a): return 7\nFraction = f"),
        ("for n in (1, 2): assert f(n) == Counter('a')", "def f(*a): return 7\nCounter = f"),
    ],
)
async def test_what_a_standard_name_means_in_tests_is_not_the_programs_to_say(
    sandbox: LocalSandbox, tests: str, program: str
) -> None:
    part = await grade(sandbox, program, row(tests))
    assert part.value == 0.0, part


async def test_a_package_that_is_not_there_is_named_with_the_setting(sandbox: LocalSandbox) -> None:
    for tests in ("assert f() == 1", [{"input": "", "output": "1"}]):
        program = "import numpy\ndef f(): return 1\nprint(1)"
        part = await grade(sandbox, program, row(tests))
        assert part.value == 0.0
        assert "No module named 'numpy'. HONE_SANDBOX_PACKAGES names" in part.detail
