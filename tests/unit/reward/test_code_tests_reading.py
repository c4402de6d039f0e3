"""How tests are read, values cross and assertions are judged, without a sandbox."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import Counter, OrderedDict, deque
from datetime import date, datetime, timedelta, timezone
from datetime import time as clock
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from services.reward.graders.code_tests.asserts import from_asserts, from_check
from services.reward.graders.code_tests.candidate import agree, difference
from services.reward.graders.code_tests.inside_tests import judged
from services.reward.graders.code_tests.tests import MAX_PYTHON_CHARS, calls, read
from services.reward.grading.codec import (
    SPECIAL,
    NotPlain,
    UnfinishedIterator,
    ValueTooLong,
    decode,
    encode,
)
from services.reward.grading.failures import GradingFailed
from services.reward.grading.programs import MAX_SEARCHED_CHARS, program_of


def told(test: str, *results: str, is_strict: bool = False, imports: str = "") -> list[str]:
    """Returns the verdict and the reason of a test of these encoded results."""
    before = sys.get_int_max_str_digits()
    try:
        (answer,) = judged(imports, [["f()", test, [*results]]], [], is_strict)
    finally:
        sys.set_int_max_str_digits(before)
    return answer


@pytest.mark.parametrize(
    ("test", "calls", "left"),
    [
        ("f(1, x=[2]) == 3", ["f(1, x=[2])"], "_0 == 3"),
        ("f(g(1)) == f(2)", ["f(g(1))", "f(2)"], "_0 == _1"),
        ("abs(f(1.5) - 2) < 1e-6", ["f(1.5)"], "abs(_0 - 2) < 1e-06"),
        ("math.isclose(f(1), 0.3, rel_tol=0.01)", ["f(1)"], "math.isclose(_0, 0.3, rel_tol=0.01)"),
        ("not f('a') and f('b') is True", ["f('a')", "f('b')"], "not _0 and _1 is True"),
        ("3 in sorted(set(f([3])))", ["f([3])"], "3 in sorted(set(_0))"),
        ("Solution().two([1], 2) == [0]", ["Solution().two([1], 2)"], "_0 == [0]"),
        ("f(1)[0].value == 2", ["f(1)[0].value"], "_0 == 2"),
        ("f('a').lower() == 'b'", ["f('a')"], "_0.lower() == 'b'"),
        ("f([i * i for i in range(3)]) is None", ["f([i * i for i in range(3)])"], "_0 is None"),
        ("sum(10, 15) == 6", ["sum(10, 15)"], "_0 == 6"),
        ("f(math.pi, float('inf')) != 1", ["f(math.pi, float('inf'))"], "_0 != 1"),
        ("'%s' % f(1) == 'a'", ["f(1)"], "'%s' % _0 == 'a'"),
        ("all(x > 0 for x in f(1))", ["f(1)"], "all((x > 0 for x in _0))"),
        ("sorted(f(1), key=len)[0] == ''", ["f(1)"], "sorted(_0, key=len)[0] == ''"),
    ],
)
def test_the_candidates_calls_are_taken_out_of_an_assertion(
    test: str, calls: list[str], left: str
) -> None:
    suite = from_asserts(f"import math\nassert {test}, 'why'")
    assert suite is not None
    imports, (case,) = suite
    assert imports == "import math"
    assert (list(case.calls), case.test) == (calls, left)


@pytest.mark.parametrize(
    "tests",
    [
        "for x in range(3):\n    assert f(x) == x",
        "x = f(1)\nassert x == 1",
        "assert all(f(i) == i for i in range(3))",
        "assert f is not None",
        "assert f(1) == helper",
        "assert eval(f(1)) == 1",
        "assert getattr(f(1), 'x')(eval) == 1",
        "import numpy\nassert numpy.allclose(f(1), 1)",
        "len = f(1)\nassert len(f(2)) == 1",
        "try:\n    f(1)\nexcept ValueError:\n    pass",
        "def near(a, b):\n    return abs(a - b) < 1\nassert near(f(1), 2)",
    ],
)
def test_what_is_no_plain_assertion_on_calls_is_not_converted(tests: str) -> None:
    assert from_asserts(tests) is None


def test_a_check_of_asserts_is_converted_to_calls_of_the_entry_point() -> None:
    tests = '''
METADATA = {"author": "x"}

def check(candidate):
    """Docs."""
    assert candidate([1, 2], 3) == [3], "first"
    assert True, "This prints if this assert fails"
    print
'''
    suite = from_check(tests, "find")
    assert suite is not None
    assert [(case.calls, case.test) for case in suite[1]] == [(("find([1, 2], 3)",), "_0 == [3]")]
    assert from_check(tests + "    lst = [1]\n    assert candidate(lst, 1) == []", "find") is None


@pytest.mark.parametrize(
    ("test", "value", "holds"),
    [
        ("_0 == 4", 4.0, True),
        ("_0 == False", 0, True),
        ("_0 is False", 0, False),
        ("_0 == [True, (0,)]", [1, (False,)], True),
        ("_0 == {1: 'a'}", {True: "a"}, True),
        ("_0 == 1", True, True),
        ("_0 == [1, 2]", (1, 2), False),
        ("_0 == {1, 2}", {2, 1}, True),
        ("_0 in (1, 2)", True, True),
        ("_0 in 'abc'", "b", True),
        ("_0 not in [1]", 2, True),
        ("_0 is None", None, True),
        ("_0", [0], True),
        ("1 < _0 <= 3", 3, True),
        ("_0 == 1 or _0 == 2", 2, True),
        ("sorted(_0.items())[0] == ('a', 1)", {"a": 1}, True),
        ("len(_0) == 2 and isinstance(_0, list)", [1, 2], True),
        ("round(_0, 2) == 3.14", 3.14159, True),
        ("(_0 if _0 else 7) == 7", 0, True),
        ("_0[1:][-1] == 3", [1, 2, 3], True),
        ("''.join(_0) == 'ab'", ["a", "b"], True),
        ("math.isclose(_0, 2.0)", 2.0000000001, True),
    ],
)
def test_assertions_are_judged_over_plain_values(test: str, value: Any, holds: bool) -> None:
    verdict, _ = told(test, encode(value), imports="import math\nimport no_such_package")
    assert (verdict == "ok") is holds


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1,
        2.5,
        "a",
        [1, [2]],
        (1, (2,)),
        {1, 2},
        frozenset({(1, 2)}),
        {(1, 2): {"a": None}},
        b"ab",
        1 + 2j,
        10**400,
        10**400,
        "ä\0",
        range(5, 0, -2),
        Fraction(-1, 3),
        Decimal("1.10"),
        deque([1, "a"]),
        Counter("aab"),
        OrderedDict([("b", 1), ("a", (2,))]),
        date(2024, 2, 29),
        datetime(2024, 2, 29, 12, 30, 1, 5),
        datetime(2024, 2, 29, 12, tzinfo=timezone(timedelta(hours=2))),
        clock(12, 30),
        timedelta(days=-1, microseconds=3),
    ],
)
def test_plain_data_crosses_unchanged(value: Any) -> None:
    crossed = decode(encode(value))
    assert crossed == value and type(crossed) is type(value)


def test_numbers_are_no_text_of_more_than_30_000_digits() -> None:
    start = time.process_time()
    assert told("len(str(_0)) == 29001", encode(10**29_000)) == ["ok", ""]
    verdict, why = told("str(_0) == 'a'", encode([7**200_000]))
    assert time.process_time() - start < 1
    assert verdict == "wrong" and "a number of more than 30000 digits" in why


def test_what_a_value_makes_a_test_raise_is_wrong() -> None:
    for test in ("_0 + 1", "_0.nothing", "_0[9]", "1 / 0", "exit()", "next(iter([]))"):
        verdict, why = told(test, encode("x"))
        assert verdict == "wrong" and why.startswith("f() cannot hold for 'x' ("), why
    assert told("_0 == 1", '{"set": [[1]]}')[0] == "wrong"


def test_whole_numbers_of_any_length_cross() -> None:
    for value in (10**5000, -(10**5000), Fraction(1, 10**5000), {"a": [10**4000 - 1]}):
        assert decode(encode(value)) == value
    with pytest.raises(ValueTooLong):
        encode(10**300_000)


def test_only_exact_types_come_out() -> None:
    assert type(decode(encode(Liar(3)))) is int
    assert type(decode(encode({"a": Liar(3)}))["a"]) is int
    assert list(decode(encode(x for x in "ab"))) == ["a", "b"]
    for value in (object(), [print], Liar):
        with pytest.raises(NotPlain):
            encode(value)
    with pytest.raises(ValueTooLong):
        encode("x" * 1_000_000)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1",
        '{"set": [[1]]}',
        '{"set": 1}',
        '{"object": []}',
        '{"dict": [1]}',
        '{"bytes": "zz"}',
        "{}",
        '{"a": 1, "b": 2}',
        '{"complex": [1, 2, 3]}',
        '{"complex": ["nan"]}',
        '{"dict": ["ab"]}',
        '"' + "x" * 200_000 + '"',
        '{"dict": [[[1], 2]]}',
        '{"bytes": [1]}',
        "[" * 100_000,
        "9" * 5000,
        '{"Fraction": [1, 0]}',
        '{"Fraction": [1, "2"]}',
        '{"Fraction": [true, 2]}',
        '{"Decimal": ["1e999999"]}',
        '{"Decimal": ["1e99999999999999999999"]}',
        '{"Decimal": ["-Infinity"]}',
        '{"Decimal": ["sNaN"]}',
        '{"Decimal": [1]}',
        '{"range": [0, 1000000000, 1]}',
        '{"range": [0, 1, 0]}',
        '{"date": ["2024-13-01"]}',
        '{"timedelta": [1e999, 0, 0]}',
        '{"timedelta": [9999999999, 0, 0]}',
        '{"Counter": [1]}',
        '{"dict_keys": [[1]]}',
        '{"awaited": []}',
    ],
)
def test_a_text_that_stands_for_no_plain_data_is_refused(text: str) -> None:
    with pytest.raises(NotPlain):
        decode(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("[NaN]", "nan"),
        ("1e999", "inf"),
        ("-Infinity", "inf"),
        ('{"complex": [0, NaN]}', "nan"),
        ('{"complex": [-1e999, 0]}', "inf"),
    ],
)
def test_special_floats_cross_only_where_the_tests_speak_of_them(text: str, name: str) -> None:
    assert name in repr(decode(text, special=frozenset({name})))
    for others in (frozenset[str](), SPECIAL - {name}):
        with pytest.raises(NotPlain):
            decode(text, special=others)


def test_a_set_of_equal_hashes_is_refused_before_it_is_made() -> None:
    numbers = [n * (2**61 - 1) for n in range(9000)]
    pairs = [[number, 0] for number in numbers]
    start = time.process_time()
    hashed = [(kind, numbers) for kind in ("set", "frozenset", "dict_keys")]
    hashed += [(kind, pairs) for kind in ("dict", "Counter", "OrderedDict", "dict_items")]
    for kind, parts in hashed:
        with pytest.raises(NotPlain):
            decode(json.dumps({kind: parts}))
    assert time.process_time() - start < 2
    assert decode(json.dumps({"set": numbers[:60]})) == set(numbers[:60])


def test_outputs_agree_line_by_line_and_numbers_within_a_tolerance() -> None:
    assert agree("1 2 \n3\n\n", "1 2\n3")
    assert not agree("1 2 3", "1 2\n3")
    assert not agree("1.0", "1")
    assert agree("1.00000001 a", "1 a", 1e-6)
    assert agree("1000001", "1000000", 1e-5)
    assert not agree("1.1", "1", 1e-6)
    assert not agree("nan", "1", 1e-6)
    assert not agree("inf", "1", 1e300)


@pytest.mark.parametrize(
    ("value", "wanted", "holds"),
    [
        ({1: 2, 0: 3}, {"1": 2, "0": 3}, True),
        ({True: 2}, {"true": 2}, True),
        ({1.5: (1, 2)}, {"1.5": [1, 2]}, True),
        ({None: 1}, {"null": 1}, True),
        ({"1": 2}, {1: 2}, True),
        ((1, [True]), [1, [1]], False),
        ("1", 1, False),
    ],
)
def test_results_given_as_data_are_compared_as_json_has_them(
    value: Any, wanted: Any, holds: bool
) -> None:
    (case,) = calls("f", [[]], [wanted], 0.0)
    assert (told(case.test, encode(value))[0] == "ok") is holds


def test_an_iterator_is_taken_as_far_as_it_fits_and_says_where_that_ends() -> None:
    endless = decode(encode(itertools.count()))
    assert [next(endless) for _ in range(1000)] == [*range(1000)]
    with pytest.raises(UnfinishedIterator):
        list(endless)
    assert list(decode(encode(iter(range(5000))))) == [*range(5000)]


def test_a_program_is_looked_for_in_the_end_of_a_completion() -> None:
    begin, end = "```python\nx = 1\n```\n", "```python\nx = 2\n```\n```text\nbye\n```"
    thoughts = "a thought\n" * (MAX_SEARCHED_CHARS // 10 + 10)
    assert program_of(begin + thoughts + end) == "x = 2"
    assert program_of(begin + thoughts) == (begin + thoughts).rstrip()
    assert program_of(begin + thoughts[200:]) == "x = 1"


@pytest.mark.parametrize(
    ("given", "wanted", "told"),
    [
        ("4\n", "5", "printed '4' in line 1, wanted '5'"),
        ("", "5", "printed '' in line 1, wanted '5'"),
        (" 5\n", "5\n", "printed ' 5' in line 1, wanted '5', which differs in white space only"),
        ("x\n" * 50 + "4", "x\n" * 50 + "5", "printed '4' in line 51, wanted '5'"),
        ("x\n" * 50, "x\n" * 49, "printed 'x' in line 50, wanted ''"),
        (
            "x" * 100 + "4",
            "x" * 100 + "5",
            f"printed '{'x' * 20}4' in line 1, wanted '{'x' * 20}5'",
        ),
    ],
)
def test_a_wrong_output_is_told_by_what_differs(given: str, wanted: str, told: str) -> None:
    assert not agree(given, wanted)
    assert difference(given, wanted) == told


@pytest.mark.parametrize(
    ("test", "value", "strict"),
    [
        ("_0 == 1", True, "wrong"),
        ("_0 == [0]", [0], "ok"),
        ("1 == _0 != 2", True, "wrong"),
        ("0 < _0 == 1", 1, "ok"),
        ("_0 in (0, 1)", True, "wrong"),
        ("_0 not in 'abc'", "d", "ok"),
        ("not _0 != [True]", [1], "wrong"),
        ("all(x == 1 for x in _0)", [1, True], "wrong"),
        ("_0 is True", True, "ok"),
    ],
)
def test_to_a_strict_judge_true_is_not_1(test: str, value: Any, strict: str) -> None:
    assert told(test, encode(value))[0] == "ok"
    assert told(test, encode(value), is_strict=True)[0] == strict


def test_arguments_as_lines_of_json_end_at_line_feeds_only() -> None:
    (case,) = calls("f", ['"a\u2028b\x85"\n2\r\n'], ['"c"'], 0.0)
    assert case.calls == ("(f if 'f' in globals() else Solution().f)('a\\u2028b\\x85', 2)",)


@pytest.mark.parametrize("style", ["asserts", None, "stdio"])
def test_more_python_than_is_read_at_a_time_is_refused_unparsed(style: Any) -> None:
    long = "(" * (MAX_PYTHON_CHARS + 1)  # it would be a SyntaxError
    value, setup = ([{"input": "1", "output": "2"}], long) if style == "stdio" else (long, "")
    with pytest.raises(GradingFailed, match=r"200001 characters of Python .*at most 200000"):
        read(value, style, None, setup, "")
    many = [{"input": "1" * 1000, "output": "2"}] * 300
    assert read(many, "stdio", None, "", "").count == 300, "data may be longer"
