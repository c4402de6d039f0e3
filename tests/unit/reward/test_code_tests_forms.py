"""Tests in the forms that public data sets have, in the real sandbox: a right program earns 1, an
honest mutant 0. Forgeries of these forms are among the ways of `tests/support/forgeries.py`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.reward.graders.code_tests.tests import read
from services.reward.grading.registry import GradingFailed
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
