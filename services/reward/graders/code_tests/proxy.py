"""Runs tests that could not be converted, unchanged, in a second sandbox that never holds the
candidate's code.

    tests' sandbox   the tests, with a proxy for each function of the candidate  -> calls to make
    trusted side     passes calls and results on, as plain data
    candidate's      the program, and those calls                                -> results

A sandbox job is one shot, so tests and calls take turns: the tests run with what is known, and say
which calls they need; the candidate makes all calls so far, in order; the tests run again. Guessing
(`inside_tests.py`) makes that two turns for most tests. The values are exact built-in types, but it
is Python's own equality that the tests use: `True` is 1 to them.

A failure of the tests before they know any result is their own fault, and no program can cause it
(`first_calls`). Any failure afterwards, running out of time or memory included, is the program's
fault: else a program could choose to have no reward in place of 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.reward.graders.code_tests import sound
from services.reward.graders.code_tests.candidate import CallEnd, Candidate, job
from services.reward.graders.code_tests.sound import BUILTINS, bound_names, loaded_names, names_of
from services.reward.grading.expressions import parse_program
from services.reward.grading.failures import GradingFailed, wrong_row
from services.reward.grading.programs import fault
from shared.wire import Verdict

MAX_TURNS = 300
UNSTEADY_TURNS = 10
GUESSING_TURNS = 4
ENDINGS = ("absent", "late", "large", "memory")
"""Ends of a call that the tests never see: such a call decides the verdict, if the tests make it
without guesses too."""

_VERDICTS: dict[str, Verdict] = {
    "passed": "ok",
    "failed": "wrong",
    "opaque": "wrong",
    "unfit": "wrong",
}


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
    tree = parse_program(source)
    known = BUILTINS | names_of(setup) | bound_names(tree)
    names = (loaded_names(tree) - known) | ({entry} if entry else set())
    return TestCode(setup, source, tuple(sorted(names)), entry)


async def run(candidate: Candidate, tests: TestCode) -> tuple[Verdict, str]:
    """Returns the verdict of the tests, and why. Raises GradingFailed where they cannot be run in
    this way, whatever the program."""
    calls = await first_calls(candidate, tests)
    known: list[list[str]] = []
    is_steady, num_confirmed, may_guess = True, 0, True
    for turn in range(MAX_TURNS):
        outcomes = await _made(candidate, calls)
        if isinstance(outcomes, CallEnd):
            return outcomes.verdict, outcomes.detail
        ended = outcomes.pop() if outcomes and outcomes[-1].how in ENDINGS else None
        before, known = known, _known(calls, outcomes)
        is_steady = is_steady and _agree(before, known)
        if turn >= UNSTEADY_TURNS and not is_steady:
            return "wrong", "the program gives other results each time it runs"
        if candidate.out_of_time:
            return "time_limit", candidate.out_of_time
        answer = await _turn(candidate, tests, known)
        if answer.fault is not None:
            verdict, detail = answer.fault
            return verdict, f"the tests ran out over what the program returned: {detail}"
        # In another order a result may depend on calls that the tests do not make.
        in_order = answer.calls == calls[: len(answer.calls)]
        if answer.how != "unknown" and in_order:
            return _VERDICTS[answer.how], answer.text
        if ended is not None and in_order and len(answer.calls) > len(known):
            return ended.verdict, ended.detail
        may_guess = may_guess and ended is None  # that call may only follow from a guess
        is_confirmed = answer.calls[: len(calls)] == calls
        is_worth_guessing = may_guess and (
            turn < GUESSING_TURNS or (is_confirmed and len(calls) > num_confirmed + 1)
        )
        num_confirmed = len(calls) if is_confirmed else 0
        calls = answer.calls
        if answer.how == "unknown" and is_worth_guessing:
            guessed = await _turn(candidate, tests, known, guess=True)
            calls = max(guessed.calls, calls, key=len)
    if await _differ(candidate, tests):
        raise GradingFailed("the tests make other calls each time they run")
    return "time_limit", f"the tests were not done after {MAX_TURNS} turns"


async def first_calls(candidate: Candidate, tests: TestCode) -> list[list[str]]:
    """Returns the first calls that the tests make, before they know any result. Raises
    GradingFailed where they make none, or a call cannot be passed on."""
    guessed = await _turn(candidate, tests, [], guess=True)
    answer = (
        guessed if guessed.calls or guessed.how == "unfit" else await _turn(candidate, tests, [])
    )
    if answer.fault is not None:
        verdict, detail = answer.fault
        raise GradingFailed(f"the tests themselves ended with {verdict}: {detail}")
    if answer.how == "unfit":
        raise GradingFailed(f"the tests pass on what is not plain data: {answer.text}")
    if not answer.calls:
        raise wrong_row(_no_call(answer, tests))
    return answer.calls


def _no_call(answer: _Answer, tests: TestCode) -> str:
    """Returns why tests grade nothing if they end before they call the program."""
    how = f"fail by themselves ({answer.text})" if answer.how == "failed" else "end"
    fault = f"the tests {how} without a call of the program; expected calls of "
    fault += " or ".join(tests.names) or "its functions"
    if answer.text.startswith("ModuleNotFoundError"):
        return f"{fault}. HONE_SANDBOX_PACKAGES names the packages that tests may import"
    name = sound.uncalled(parse_program(tests.source))
    return f"{fault}. They define {name!r} and do not call it" if name else fault


def _known(calls: list[list[str]], outcomes: list[CallEnd]) -> list[list[str]]:
    return [
        [*call, outcome.how, outcome.text] for call, outcome in zip(calls, outcomes, strict=False)
    ]


def _agree(before: list[list[str]], after: list[list[str]]) -> bool:
    """Returns whether the calls with which two turns begin alike had the same results."""
    for ours, theirs in zip(before, after, strict=False):
        if ours[:2] != theirs[:2]:
            return True
        if ours != theirs:
            return False
    return True


async def _made(candidate: Candidate, calls: list[list[str]]) -> list[CallEnd] | CallEnd:
    """Returns the outcome of each call up to the first that ends as one of `ENDINGS`, or the one
    outcome that ended the whole process."""
    if not calls:
        return []
    outcomes = await candidate.call(
        [["call", *call] for call in calls], last=ENDINGS, share=len(calls)
    )
    if isinstance(outcomes, CallEnd):
        return outcomes
    last = next((at for at, one in enumerate(outcomes, 1) if one.how in ENDINGS), len(calls))
    return (
        outcomes[:last]
        if len(outcomes) >= last
        else CallEnd("runtime_error", "no result of some calls")
    )


@dataclass(frozen=True)
class _Answer:
    """How one run of the tests ended: the `calls` that they made, `how` and `text` as
    `inside_tests.run` returns them. `fault`: the run ended early, and nothing else is known."""

    calls: list[list[str]]
    how: str = "unknown"
    text: str = ""
    fault: tuple[Verdict, str] | None = None


async def _turn(
    candidate: Candidate, tests: TestCode, known: list[list[str]], *, guess: bool = False
) -> _Answer:
    """Runs the tests once. If they know results of the program, their time counts as the
    program's."""
    arguments = {
        "setup": tests.setup,
        "tests": tests.source,
        "names": list(tests.names),
        "entry": tests.entry,
        "known": known,
        "special": sorted(candidate.special),
        "guess": guess,
    }
    execution = await candidate.sandbox.execute(
        job("inside_tests", arguments, **candidate.job_limits())
    )
    if known:
        candidate.wall_s += execution.wall_s
    verdict, detail = fault(execution)
    if verdict != "ok":
        return _Answer([], fault=(verdict, detail))
    value = execution.value
    again = [call[:2] for call in known[: value["again"]]]
    return _Answer([*again, *value["new"]], value["how"], value["text"])


async def _differ(candidate: Candidate, tests: TestCode) -> bool:
    """Returns whether the tests make other calls each time they run, whatever the program."""
    first, second = [await _turn(candidate, tests, [], guess=True) for _ in range(2)]
    return first.calls != second.calls
