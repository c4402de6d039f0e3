"""Forgeries made by mutating the known ones, over all ways of testing, in the real sandbox: each
earns 0, and none is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from services.reward.grading.registry import GradingFailed
from services.reward.sandbox.local import LocalSandbox
from shared.wire import Part
from tests.support.forgeries import (
    HARMLESS,
    HASTY,
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
from tests.support.reward_helpers import grade

SLOTS = 6

pytestmark = pytest.mark.slow

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
        return await grade(sandbox, program, row, **PARAMS | limits | params)
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
