"""Runs tests that could not be converted, as they are, in a second sandbox that never holds the
candidate's code.

    tests' sandbox   the tests, with a proxy for each function of the candidate  -> calls to make
    trusted side     passes calls and results on, as plain data
    candidate's      the program, and those calls                                -> results

A sandbox job is one shot, so tests and calls take turns: the tests run with what is known, and say
which calls they need; the candidate makes all calls so far, in order; the tests run again. Guessing
(`inside_tests.py`) makes that two turns for most tests. The values are exact built-in types, but it
is Python's own equality that the tests use: `True` is 1 to them.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from services.reward.graders.code_tests import inside
from services.reward.graders.code_tests.asserts import BUILTINS, bound_names, loaded_names
from services.reward.graders.code_tests.candidate import CallEnd, Candidate
from services.reward.grading.programs import fault
from services.reward.grading.registry import GradingFailed
from shared.wire import ExecuteRequest, Verdict

MAX_TURNS = 100
UNSTEADY_TURNS = 10
GUESSING_TURNS = 4
ENDINGS = ("late", "large", "memory")
"""Ends of a call that the tests never see: such a call decides the verdict."""

_VERDICTS: dict[str, Verdict] = {"passed": "ok", "failed": "wrong", "opaque": "wrong"}


@dataclass(frozen=True)
class TestCode:
    """Tests as source. `names` are the candidate's functions in it; `entry` is what its `check` is
    called with."""

    setup: str
    source: str
    names: tuple[str, ...]
    entry: str | None = None


def unconverted(source: str, setup: str, entry: str | None = None) -> TestCode:
    """Returns test code with proxies for all names that neither it, nor the setup, nor Python
    defines."""
    tree = ast.parse(source)
    known = BUILTINS | bound_names(ast.parse(setup)) | bound_names(tree)
    names = (loaded_names(tree) - known) | ({entry} if entry else set())
    return TestCode(setup, source, tuple(sorted(names)), entry)


async def run(candidate: Candidate, tests: TestCode) -> tuple[Verdict, str]:
    """Returns the verdict of the tests, and why. Raises GradingFailed where they cannot be run in
    this way."""
    calls = await _guessed_calls(candidate, tests, [])
    known: list[list[str]] = []
    is_steady = True
    for turn in range(MAX_TURNS):
        outcomes = await _made(candidate, calls)
        if isinstance(outcomes, CallEnd):
            return outcomes.verdict, outcomes.detail
        before, known = (
            known,
            [
                [*call, outcome.how, outcome.text]
                for call, outcome in zip(calls, outcomes, strict=True)
            ],
        )
        is_steady = is_steady and _agree(before, known)
        if turn >= UNSTEADY_TURNS and not is_steady:
            return "wrong", "the program gives other results each time it runs"
        if candidate.out_of_time:
            return "time_limit", f"the tests took longer than {candidate.limits.timeout_s:g} s"
        answer = await _tests_turn(candidate, tests, known)
        if answer["how"] == "unfit":
            raise GradingFailed(
                f"the tests pass on what is not plain data: {answer['text']}", "other_error"
            )
        if answer["how"] == "opaque" and answer["calls"][-1][0][:1].isupper():
            raise GradingFailed(
                f"the tests use an object of the candidate's {answer['calls'][-1][0]}, and only "
                "plain data crosses"
            )
        # Else what a call gave may come of others before it.
        in_order = answer["calls"] == calls[: len(answer["calls"])]
        if answer["how"] != "unknown" and in_order:
            return _VERDICTS.get(answer["how"], "runtime_error"), answer["text"]
        is_short = answer["how"] == "unknown" and turn < GUESSING_TURNS
        guessed = await _guessed_calls(candidate, tests, known) if is_short else []
        calls = max(guessed, answer["calls"], key=len)
    raise GradingFailed(
        f"the tests were not done after {MAX_TURNS} turns; do they make other calls each time they "
        "run?"
    )


def _agree(before: list[list[str]], after: list[list[str]]) -> bool:
    """Returns whether the calls with which two turns begin alike came to the same."""
    for ours, theirs in zip(before, after, strict=False):
        if ours[:2] != theirs[:2]:
            return True
        if ours != theirs:
            return False
    return True


async def _made(candidate: Candidate, calls: list[list[str]]) -> list[CallEnd] | CallEnd:
    """Returns the outcome of each call, or the one that decides all."""
    if not calls:
        return []
    outcomes = await candidate.call(
        [["call", *call] for call in calls], last=ENDINGS, share=len(calls)
    )
    if isinstance(outcomes, CallEnd):
        return outcomes
    if ended := next((outcome for outcome in outcomes if outcome.how in ENDINGS), None):
        return ended
    return (
        outcomes
        if len(outcomes) == len(calls)
        else CallEnd("runtime_error", "no result of some calls")
    )


async def _guessed_calls(
    candidate: Candidate, tests: TestCode, known: list[list[str]]
) -> list[list[str]]:
    """Returns the calls that the tests will make, as far as guesses tell; none where a guess was
    wrong."""
    execution = await candidate.sandbox.execute(_job(candidate, tests, known, guess=True))
    return execution.value["calls"] if fault(execution)[0] == "ok" else []


async def _tests_turn(
    candidate: Candidate, tests: TestCode, known: list[list[str]]
) -> dict[str, Any]:
    execution = await candidate.sandbox.execute(_job(candidate, tests, known, guess=False))
    verdict, detail = fault(execution)
    if verdict != "ok":
        raise GradingFailed(f"the tests themselves ended with {verdict}: {detail}")
    return execution.value


def _job(
    candidate: Candidate, tests: TestCode, known: list[list[str]], *, guess: bool
) -> ExecuteRequest:
    arguments = {
        "setup": tests.setup,
        "tests": tests.source,
        "names": list(tests.names),
        "entry": tests.entry,
    }
    return inside.tests_job(arguments | {"known": known, "guess": guess}, **candidate.job_limits())
