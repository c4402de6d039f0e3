"""Runs a program in a sandbox, makes calls of its functions and has the results judged.

What a sandbox returns is untrusted: it is checked here. What a program returned decides how much
judging it costs, so it is judged in a sandbox, another one than the program's (`inside_tests.py`).
"""

from __future__ import annotations

import importlib.util
import itertools
import marshal
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.reward.graders.code_tests.asserts import Case
from services.reward.grading import codec
from services.reward.grading.codec import SPECIAL
from services.reward.grading.programs import KEEP_CHARS, explained, fault
from services.reward.sandbox.base import Sandbox
from services.reward.sandbox.inside.child import WALL_PER_CPU
from shared.wire import ExecuteRequest, Execution, Verdict

NO_VALUE = ("raised", "absent", "opaque", "large", "late", "memory")
MAX_MESSAGE_CHARS = 200
_MOSTLY = 0.9
"""The share of the idle limit that counts as reached: the report of a run that was ended for idling
may be slightly below the limit."""

_VERDICTS: dict[str, Verdict] = {
    "raised": "runtime_error",
    "absent": "runtime_error",
    "opaque": "wrong",
    "large": "output_limit",
    "late": "time_limit",
    "memory": "memory_limit",
}


@dataclass(frozen=True)
class TestLimits:
    """`cpu_s` and `memory_mib` limit one test. `timeout_s` of wall clock, and `idle_s` of it
    without work, limit all tests of a program together."""

    cpu_s: float
    timeout_s: float
    idle_s: float
    memory_mib: int


@dataclass(frozen=True)
class CallEnd:
    """How one call ended. With the verdict "ok", `text` is the encoded result as the program sent
    it, not yet decoded. `how` is "value" or one of `NO_VALUE`."""

    verdict: Verdict
    detail: str = ""
    how: str = ""
    text: str = ""


@dataclass
class Candidate:
    """One program, with its output and its time so far. `names` are the names that its tests take
    from it. `is_strict`: to its tests True is not 1."""

    sandbox: Sandbox
    setup: str
    program: str
    limits: TestLimits
    special: frozenset[str] = SPECIAL
    names: frozenset[str] = frozenset()
    is_strict: bool = False
    stdout: str = ""
    wall_s: float = 0.0
    idle_s: float = 0.0

    @property
    def out_of_time(self) -> str:
        """Returns which limit for all tests together was reached, "" if none was."""
        if self.wall_s >= self.limits.timeout_s:
            return f"all tests together took longer than {self.limits.timeout_s:g} s"
        idled = f"all tests together idled for {self.limits.idle_s:g} s"
        return idled if self.idle_s >= _MOSTLY * self.limits.idle_s else ""

    async def call(
        self, calls: Sequence[list[str]], *, last: Sequence[str] = (), share: int = 1
    ) -> list[CallEnd] | CallEnd:
        """Returns the outcome of each call, up to the first that ends as one of `last`; or the one
        outcome that ended the whole process. All calls are made in one process, which may use the
        CPU time of `share` tests. Raises GradingFailed."""
        arguments = {
            "setup": self.setup,
            "program": self.program,
            "calls": list(calls),
            "cpu_s": self.limits.cpu_s,
            "last": list(last),
            "names": sorted(self.names),
        }
        execution = await self.execute(job("inside_candidate", arguments, **self.job_limits(share)))
        verdict, detail = fault(execution)
        if verdict != "ok":
            return CallEnd(verdict, detail)
        return self._outcomes(execution.value, len(calls))

    async def execute(self, request: ExecuteRequest) -> Execution:
        """Runs a job of this program, and adds its time to the time so far."""
        execution = await self.sandbox.execute(request)
        self.wall_s += execution.wall_s
        self.idle_s += max(execution.wall_s - WALL_PER_CPU * execution.cpu_s, 0.0)
        self.stdout = execution.stdout[-KEEP_CHARS:]
        return execution

    def job_limits(self, share: int = 1) -> dict[str, Any]:
        cpu_s = min(self.limits.cpu_s * share, self.limits.timeout_s)
        return {**asdict(self.limits), "cpu_s": cpu_s}

    def _outcomes(self, answer: Any, num_calls: int) -> list[CallEnd] | CallEnd:
        pairs = answer if isinstance(answer, list) else []
        if not all(
            isinstance(pair, list) and len(pair) == 2 and all(type(part) is str for part in pair)
            for pair in pairs
        ):
            pairs = []
        if not pairs:
            return CallEnd("runtime_error", "the program gave no usable result")
        return [self._outcome(how, text) for how, text in pairs[:num_calls]]

    def _outcome(self, how: str, text: str) -> CallEnd:
        """Returns how a call ended, as the program says. It may send any word: an unknown one
        counts as "raised"."""
        if how == "value":
            return CallEnd("ok", how=how, text=text)
        how, text = how if how in NO_VALUE else "raised", text[:MAX_MESSAGE_CHARS]
        detail = f"returned {text}" if how == "opaque" else explained(text)
        return CallEnd(_VERDICTS[how], detail, how=how, text=detail)


JUDGING_CPU_S = 2.0
"""Seconds of CPU time for judging the cases of one process; most take a millisecond."""

CHARS_PER_CPU_S = 100_000
"""Characters of tests that add a second to this limit, because the row decides the length of its
tests."""

Judged = tuple[Verdict, str]


async def judged(
    candidate: Candidate,
    cases: Sequence[Case],
    imports: str,
    *,
    last: Sequence[str] = (),
    share: int = 1,
) -> list[Judged] | None:
    """Returns the verdicts of cases that are run in one process; None if that process or the
    judging ended early, and running the cases one by one may tell more. `imports` are the tests'
    own."""
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
    told = await _told(candidate, open_cases, imports)
    if isinstance(told, tuple):
        return [told] if len(cases) == 1 else None
    rest = iter(told)
    return [next(rest) if verdict is None else verdict for verdict in verdicts]


def _without_value(case: Case, outcomes: list[CallEnd]) -> Judged | None:
    """Returns the verdict on a case if one of its calls gave no value, else None."""
    for outcome in outcomes:
        if outcome.verdict != "ok":
            return outcome.verdict, f"{outcome.detail} in {case.source:.100}"
    if len(outcomes) < len(case.calls):
        return "runtime_error", f"no result in {case.source:.100}"
    return None


async def _told(
    candidate: Candidate, cases: list[tuple[Case, list[str]]], imports: str
) -> list[Judged] | Judged:
    """Returns the verdict on each case with its results, or the one verdict of a judging that ended
    early. Its time counts as the program's."""
    if not cases:
        return []
    arguments = {
        "imports": imports,
        "cases": [[case.source[:100], case.test, results] for case, results in cases],
        "special": sorted(candidate.special),
        "is_strict": candidate.is_strict,
    }
    cpu_s = JUDGING_CPU_S + sum(len(case.test) for case, _ in cases) / CHARS_PER_CPU_S
    limits = {**candidate.job_limits(), "cpu_s": cpu_s}
    execution = await candidate.sandbox.execute(job("inside_tests", arguments, "judged", **limits))
    candidate.wall_s += execution.wall_s
    verdict, detail = fault(execution)
    if verdict != "ok":
        return verdict, f"what it returned could not be judged: {detail}"
    return [(verdict, detail) for verdict, detail in execution.value]


MAX_OUTPUT_BYTES = 60_000
"""Most bytes of output that a test may expect: the sandbox keeps 64 KiB."""

KEPT_BEFORE = 20
"""Characters shown before the first one that differs."""

_NUMBER = re.compile(r"[-+]?(\d{1,400}(\.\d{0,400})?|\.\d{1,400})([eE][-+]?\d{1,3})?")


@dataclass(frozen=True)
class Pair:
    stdin: str
    stdout: str


async def run_pair(candidate: Candidate, pair: Pair, tolerance: float) -> tuple[Verdict, str]:
    """Returns the verdict on a program that reads stdin and writes stdout, and why."""
    program = f"{candidate.setup}\n{candidate.program}" if candidate.setup else candidate.program
    execution = await candidate.execute(
        ExecuteRequest(code=program, stdin=pair.stdin, **candidate.job_limits())
    )
    verdict, detail = fault(execution)
    if verdict != "ok":
        return verdict, detail
    if agree(execution.stdout, pair.stdout, tolerance):
        return "ok", ""
    return "wrong", difference(execution.stdout, pair.stdout)


def difference(given: str, wanted: str) -> str:
    """Returns how an output differs from the one wanted, by the first line that does."""
    pairs = itertools.zip_longest(_lines(given), _lines(wanted), fillvalue="")
    number, (ours, theirs) = next(
        (number, pair)
        for number, pair in enumerate(pairs, 1)
        if pair[0].rstrip() != pair[1].rstrip()
    )
    same = itertools.takewhile(
        lambda letters: letters[0] == letters[1], zip(ours, theirs, strict=False)
    )
    at = max(sum(1 for _ in same) - KEPT_BEFORE, 0)
    is_blank = ours.split() == theirs.split()
    return (
        f"printed {ours[at:]!r:.80} in line {number}, wanted {theirs[at:]!r:.80}"
        f"{', which differs in white space only' if is_blank else ''}"
    )


def agree(given: str, wanted: str, tolerance: float = 0.0) -> bool:
    """Returns whether two outputs have the same lines. Empty lines before and after them and blanks
    at the ends of lines do not count. With a `tolerance`, numbers may differ by that much
    (absolutely, or relative to the wanted number)."""
    ours, theirs = (
        [line.split() if tolerance else line.rstrip() for line in _lines(text)]
        for text in (given, wanted)
    )
    if not tolerance or ours == theirs:
        return ours == theirs
    return len(ours) == len(theirs) and all(
        len(left) == len(right)
        and all(_near(a, b, tolerance) for a, b in zip(left, right, strict=True))
        for left, right in zip(ours, theirs, strict=True)
    )


def _lines(text: str) -> list[str]:
    """Returns the lines of a text from its first to its last that is not empty."""
    lines = text.rstrip().splitlines()
    first = next((number for number, line in enumerate(lines) if line.strip()), 0)
    return lines[first:]


def _near(given: str, wanted: str, tolerance: float) -> bool:
    if given == wanted:
        return True
    if not (_NUMBER.fullmatch(given) and _NUMBER.fullmatch(wanted)):
        return False
    return abs(float(given) - float(wanted)) <= tolerance * max(1.0, abs(float(wanted)))


_LOADER = """
import marshal, sys, types
for _name, _compiled, _source in _files:
    _module = sys.modules[_name] = types.ModuleType(_name)
    exec(marshal.loads(bytes.fromhex(_compiled)) if sys.hexversion == _hexversion
         else compile(_source, _name, "exec", dont_inherit=True), _module.__dict__)
"""


def _shipped(name: str) -> dict[str, Any]:
    """Returns the inputs of `_LOADER`: the codec, and the module `name` of this package. They are
    sent compiled, because compiling them in each sandbox would take longer than most programs. A
    sandbox with another version of Python compiles the source."""
    files: list[list[str]] = []
    for module in (codec.__name__, f"{__name__.rpartition('.')[0]}.{name}"):
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        source = Path(spec.origin).read_text()
        compiled = compile(source, module, "exec", dont_inherit=True)
        files.append([module, marshal.dumps(compiled).hex(), source])
    return {"_hexversion": sys.hexversion, "_files": files}


_INPUTS = {name: _shipped(name) for name in ("inside_candidate", "inside_tests")}


def job(
    module: str, arguments: dict[str, Any], function: str = "run", **limits: Any
) -> ExecuteRequest:
    """Returns the program that calls a function of `inside_candidate` or `inside_tests` in a
    sandbox."""
    return ExecuteRequest(
        code=_LOADER,
        expression=f"_module.{function}(**_arguments)",
        inputs={**_INPUTS[module], "_arguments": arguments},
        **limits,
    )
