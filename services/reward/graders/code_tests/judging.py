"""Makes the calls of cases, and has their results judged: in a process with limits, for what a
program returned decides what that costs."""

from __future__ import annotations

from collections.abc import Sequence

from services.reward.graders.code_tests.asserts import Case
from services.reward.graders.code_tests.candidate import CallEnd, Candidate
from services.reward.grading.limited.pool import Call, LimitedPool, NoValue
from shared.wire import Verdict

FIRST_CPU_S, JUDGING_CPU_S = 0.2, 2.0
"""Of the cases of one process together. Most take a millisecond. What takes longer than the first
is judged again, after all completions of its group that have used less: so many that are made to be
slow make others wait for a tenth of what they take."""

CHARS_PER_CPU_S = 100_000
"""Of tests: their length is the row's doing, so it adds to what they may take."""

Judged = tuple[Verdict, str]


async def judged(
    limited: LimitedPool,
    candidate: Candidate,
    cases: Sequence[Case],
    *,
    last: Sequence[str] = (),
    share: int = 1,
) -> list[Judged] | None:
    """Returns the verdicts of cases run in one process; None where that process ended, or the
    judging, and another try, one by one, may tell more."""
    calls = [["expression", call] for case in cases for call in case.calls]
    outcomes = await candidate.call(calls, last=last, share=min(share, len(cases)))
    if isinstance(outcomes, CallEnd):
        return [(outcomes.verdict, outcomes.detail)] if len(cases) == 1 else None
    verdicts: list[Judged | None] = []
    open_cases: list[tuple[Case, list[str]]] = []
    start = 0
    for case in cases:
        own = outcomes[start : start + len(case.calls)]
        start += len(case.calls)
        verdicts.append(_without_value(case, own))
        if verdicts[-1] is None:
            open_cases.append((case, [outcome.text for outcome in own]))
    try:
        told = iter(await _told(limited, open_cases, candidate.special))
    except NoValue as error:
        if len(cases) > 1:
            return None
        verdict = "wrong" if error.end == "error" else error.end
        return [(verdict, f"what it returned could not be judged: {error.detail}")]
    return [next(told) if verdict is None else verdict for verdict in verdicts]


def _without_value(case: Case, outcomes: list[CallEnd]) -> Judged | None:
    """Returns the verdict on a case of which a call gave no value, None for others."""
    for outcome in outcomes:
        if outcome.verdict != "ok":
            return outcome.verdict, f"{outcome.detail} in {case.source:.100}"
    if len(outcomes) < len(case.calls):
        return "runtime_error", f"no result in {case.source:.100}"
    return None


async def _told(
    limited: LimitedPool, cases: list[tuple[Case, list[str]]], special: frozenset[str]
) -> list[Judged]:
    """Returns the verdict on each case with its results. Raises NoValue."""
    if not cases:
        return []
    given = [(case.source[:100], case.test, results) for case, results in cases]
    chars = sum(len(case.test) for case, _ in cases)
    for cpu_s in (FIRST_CPU_S, JUDGING_CPU_S):
        own_s = cpu_s + chars / CHARS_PER_CPU_S
        call = Call("assertions", "judged", (given, sorted(special)), own_s)
        try:
            return [(verdict, detail) for verdict, detail in await limited.run(call)]
        except NoValue as error:
            if error.end != "time_limit" or cpu_s == JUDGING_CPU_S:
                raise
    raise AssertionError("the last try returns or raises")
