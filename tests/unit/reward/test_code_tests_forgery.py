"""Programs that solve nothing and want the reward (`tests/support/forgeries.py`), and mutants of
them, against each way of testing, in the real sandbox: each earns 0, and none is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from services.reward.grading.failures import GradingFailed
from services.reward.sandbox.local import LocalSandbox
from shared.wire import Part
from tests.support import reward_helpers
from tests.support.forgeries import (
    HACKS,
    HARMLESS,
    HASTY,
    LOOP,
    NO_RESULT,
    PARAMS,
    RIGHT,
    SWALLOWED,
    WAYS,
    claims,
    exhausting,
    mutants,
    program_for,
)

SLOTS = 6

SIMILAR = ("a check", "proxied in a map", "proxied asserts", "proxied with errors")
"""Ways of testing that are as others are; mutants of all tricks are tried on them too."""
UNLIKE = [way for way in WAYS if way not in SIMILAR]

pytestmark = pytest.mark.slow


async def grade(sandbox: LocalSandbox, completion: str, row: dict[str, Any], **params: Any) -> Part:
    return await reward_helpers.grade(sandbox, completion, row, **PARAMS | params)


@pytest.mark.parametrize("style", WAYS)
async def test_the_right_program_earns_the_reward(sandbox: LocalSandbox, style: str) -> None:
    params, row = WAYS[style]
    program = program_for(style, RIGHT)
    assert (await grade(sandbox, f"Here:\n```python\n{program}\n```", row, **params)).value == 1.0


async def no_trick_earns(sandbox: LocalSandbox, style: str, names: Sequence[str]) -> None:
    """Checks too that a right program earns 1 after them."""
    params, row = WAYS[style]

    async def of(program: str, **limits: float) -> Part:
        return await grade(sandbox, program_for(style, program), row, **params, **limits)

    graded = await asyncio.gather(*(of(HACKS[name], **HASTY) for name in names))
    parts = dict(zip(names, graded, strict=True))
    assert {
        name: part
        for name, part in parts.items()
        if part.value != 0.0 or part.verdict in ("ok", "error")
    } == {}
    assert (await of(RIGHT)).value == 1.0


@pytest.mark.parametrize(("place", "style"), [*enumerate(UNLIKE)])
async def test_no_trick_earns_a_reward_and_the_next_program_is_judged_right(
    sandbox: LocalSandbox, place: int, style: str
) -> None:
    """Each trick is tried on a third of the ways: every way meets tricks of all kinds."""
    await no_trick_earns(sandbox, style, [*HACKS][place % 3 :: 3])


@pytest.mark.soak
@pytest.mark.parametrize("style", UNLIKE)
async def test_no_trick_earns_a_reward_in_any_way(sandbox: LocalSandbox, style: str) -> None:
    await no_trick_earns(sandbox, style, [*HACKS])


@pytest.mark.parametrize("style", WAYS)
async def test_partial_credit_counts_no_trick_as_a_passed_test_but_for_constants(
    sandbox: LocalSandbox, style: str
) -> None:
    params, row = WAYS[style]
    for name in (
        "R3 os._exit at import",
        "R6 an object that equals all",
        "R17 results on every descriptor",
    ):
        program = program_for(style, HACKS[name])
        part = await grade(sandbox, program, row, credit="partial", **params)
        assert part.value == 0.0, name
    constant = program_for(style, HACKS["a constant"])
    part = await grade(sandbox, constant, row, credit="partial", **params)
    shares = {"asserts": 1 / 3, "a check": 2 / 3, "stdin and stdout": 1 / 3}
    shares |= {"pytest functions": 1 / 2, "calls as data": 1 / 3, "a method": 1 / 2}
    assert part.value == shares.get(style, 0.0)


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("print(int(input()) + 1)", "ok"),
        ("import sys\nprint(int(sys.stdin.read()) + 1)\nsys.exit(0)", "ok"),
        ("print(3)", "wrong"),
        ("print('PASSED')", "wrong"),
        ("import sys\nsys.exit(0)", "wrong"),
        ("import os\nos.write(1, b'3\\n4\\n3')\nos._exit(0)", "wrong"),
        ("print(int(input()) + 1)\nraise ValueError", "runtime_error"),
        ("print(int(input()) + 1)\nwhile True: pass", "time_limit"),
        ("print('3\\n' * 100_000)", "output_limit"),
        ("x = 'x' * (1 << 30)", "memory_limit"),
    ],
)
async def test_outputs_of_programs_are_compared_outside(
    sandbox: LocalSandbox, program: str, verdict: str
) -> None:
    row = {"tests": [{"input": "2\n", "output": "3\n"}, {"input": "3", "output": "4"}]}
    part = await grade(sandbox, program, row, style="stdio")
    assert (part.value, part.verdict) == (float(verdict == "ok"), verdict)


async def test_no_job_of_the_candidate_holds_an_expected_answer(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs: list[str] = []
    execute = sandbox.execute

    async def watched(request: Any) -> Any:
        programs.append(request.model_dump_json())
        return await execute(request)

    monkeypatch.setattr(sandbox, "execute", watched)
    tests = (
        "def check(candidate):\n    for x in [1, 2]:\n"
        "        assert candidate(x, 2) == x + 2, 987654321\n"
    )
    await grade(
        sandbox,
        RIGHT,
        {"tests": ["assert add(1, 2) == 987654321", "assert abs(add(1, 2) - 987654321) < 1"]},
        credit="partial",
    )
    await grade(sandbox, RIGHT, {"tests": tests, "name": "add"}, style="check", entry_point="name")
    await grade(
        sandbox, RIGHT, {"tests": '{"inputs": ["1"], "outputs": ["987654321"]}'}, style="stdio"
    )
    with_program = [program for program in programs if "return a + b" in program]
    assert len(with_program) == 3
    assert not any("987654321" in program for program in with_program)
    assert not any("return a + b" in program for program in programs if "987654321" in program)


async def test_rows_without_usable_tests_have_no_reward_and_say_so(sandbox: LocalSandbox) -> None:
    bad: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"tests": []}, {}, "the row has no tests"),
        ({"tests": ["assert add(1, 2 =="]}, {}, "the tests are not Python"),
        ({"tests": 5}, {}, "the tests are 5; expected Python source"),
        ({"tests": "x = 1"}, {"style": "stdio"}, "expected JSON"),
        ({"tests": [{"input": 1, "output": "1"}]}, {"style": "stdio"}, "text in both"),
        (
            {"tests": LOOP, "name": "a b"},
            {"style": "check", "entry_point": "name"},
            "expected the name of a function",
        ),
        (
            {
                "tests": "def check(candidate):\n    x = 1\n    assert candidate(open) == x",
                "name": "add",
            },
            {"style": "check", "entry_point": "name"},
            "plain data",
        ),
    ]
    for row, params, message in bad:
        with pytest.raises(GradingFailed, match=message):
            await grade(
                sandbox,
                RIGHT + "\nclass Solution:\n    def f(self, x):\n        return x",
                row,
                **params,
            )


Forgery = tuple[str, dict[str, Any], dict[str, Any], str]
"""Its name, params, row and program."""


def over_ways(programs: Iterable[tuple[str, str]]) -> list[Forgery]:
    """Returns each program as a forgery of one way of testing, all ways taking turns."""
    forgeries: list[Forgery] = []
    for number, (name, program) in enumerate(programs):
        way = list(WAYS)[number % len(WAYS)]
        forgeries.append((f"{name} | {way}", *WAYS[way], program_for(way, program)))
    return forgeries


async def graded(sandbox: LocalSandbox, forgery: Forgery, **limits: float) -> Part | GradingFailed:
    _, params, row, program = forgery
    try:
        return await grade(sandbox, program, row, **limits | params)
    except GradingFailed as error:
        return error


async def earning(sandbox: LocalSandbox, forgeries: list[Forgery]) -> dict[str, Any]:
    """Returns the forgeries that earn anything but 0, all graded at once."""
    parts = await asyncio.gather(*(graded(sandbox, forgery, **HASTY) for forgery in forgeries))
    return {
        forgery[0]: part
        for forgery, part in zip(forgeries, parts, strict=True)
        if not isinstance(part, Part) or part.value != 0.0 or part.verdict in ("ok", "error")
    }


async def test_two_hundred_mutants_of_known_tricks_earn_nothing(sandbox: LocalSandbox) -> None:
    some = [*mutants()][::7]
    assert len({program for _, program in some}) == len(some) >= 200
    assert await earning(sandbox, over_ways(some)) == {}


@pytest.mark.soak
async def test_no_mutant_earns_anything(sandbox: LocalSandbox) -> None:
    assert await earning(sandbox, over_ways(mutants())) == {}


async def test_no_program_says_itself_what_its_calls_came_to(sandbox: LocalSandbox) -> None:
    forgeries = [
        (f"{name} | {way}", *WAYS[way], program_for(way, program))
        for name, program in claims()
        for way in ("asserts", "proxied", "proxied asserts", "proxied with a tolerance")
    ]
    assert await earning(sandbox, forgeries) == {}


async def test_what_ends_a_call_ends_the_tests_whatever_they_swallow(sandbox: LocalSandbox) -> None:
    forgeries: list[Forgery] = [
        (f"{value} | {way}", {"entry_point": "name"}, {"tests": tests, "name": "add"}, program)
        for way, tests in SWALLOWED.items()
        for value, program in NO_RESULT.items()
    ]
    assert len(forgeries) == 60
    assert await earning(sandbox, forgeries) == {}


async def test_tests_that_run_out_over_a_programs_value_are_its_fault(
    sandbox: LocalSandbox,
) -> None:
    """Every test with one of the values, and every value with some of the tests."""
    forgeries: list[Forgery] = [
        (name, {"entry_point": "name"}, row, program) for name, row, program in exhausting()
    ]
    assert len(forgeries) == 44
    some = [one for place, one in enumerate(forgeries) if place % 4 == place // 4 % 4]
    assert len(some) == 11
    assert await earning(sandbox, some) == {}


@pytest.mark.soak
async def test_all_tests_that_run_out_over_a_programs_value_are_its_fault(
    sandbox: LocalSandbox,
) -> None:
    forgeries: list[Forgery] = [
        (name, {"entry_point": "name"}, row, program) for name, row, program in exhausting()
    ]
    assert await earning(sandbox, forgeries) == {}


@pytest.mark.parametrize("change", ["", *HARMLESS])
async def test_right_programs_earn_1_whatever_they_look_like(
    sandbox: LocalSandbox, change: str
) -> None:
    program = HARMLESS[change](RIGHT) if change else RIGHT
    ways = {way: (way, *WAYS[way], program_for(way, program)) for way in WAYS} | {
        way: (way, {"entry_point": "name"}, {"tests": tests, "name": "add"}, program)
        for way, tests in SWALLOWED.items()
    }
    parts = await asyncio.gather(*(graded(sandbox, forgery) for forgery in ways.values()))
    assert dict(zip(ways, [getattr(part, "value", part) for part in parts], strict=True)) == (
        dict.fromkeys(ways, 1.0)
    )
