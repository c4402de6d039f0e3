"""Runs the model's program against a row's tests. The expected answers never enter the sandbox
where it runs.

    tests.py      the column of the tests, in any form -> what to run
    asserts.py    assert statements -> calls to make, and what must hold of the results
    sound.py      tests that mean nothing for any program, and names that tests do not define
    candidate.py  makes the calls in a sandbox (`inside_candidate.py`), has the results judged in a
                  second one (`inside_tests.py`), and runs whole programs on inputs
    proxy.py      tests that cannot be converted: they run in the second sandbox, with proxies for
                  the candidate's functions

A missing result is a failed test, whatever the exit code and whatever was printed. Whether a row
has no reward follows from the row alone: no program can choose it. Not supported: tests that use
objects of the candidate's classes (only plain data crosses), and tests of changes that a function
makes to its arguments (calls get copies).
"""

from __future__ import annotations

import asyncio
import itertools
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from services.reward.graders.code_tests import proxy, sound
from services.reward.graders.code_tests.candidate import (
    NO_VALUE,
    Candidate,
    TestLimits,
    judged,
    run_pair,
)
from services.reward.graders.code_tests.tests import Style, Tests, owner, read
from services.reward.grading.expressions import parse_program
from services.reward.grading.failures import wrong_row
from services.reward.grading.programs import program_of, programs_in
from services.reward.grading.registry import Column, ItemGrader, Params, grader, reference_text
from shared.errors import BadRequest
from shared.wire import Part, ScoreItem, Verdict

CALLS_PER_JOB = 32

LONG_CHARS = 3000
"""A longer column is read in a thread. Reading one of this length takes at most 0.15 s."""

_SPOKEN = {
    "nan": re.compile(r"\b(is)?nan\b", re.IGNORECASE),
    "inf": re.compile(r"\b(is)?inf(inity)?\b|\d[eE]\+?\d{3}", re.IGNORECASE),
}
"""How tests name the special floats. A program may return one only if its tests name it."""


class CodeTestsParams(Params):
    """How a program is tested, and by which columns of its row."""

    tests: Column = "tests"
    """The column of the tests."""

    style: Style | None = None
    """How they are written. "asserts": Python source of assert statements, or a list of it (MBPP's
    `test_list`), also as JSON text. "check": Python source that defines `check(candidate)`
    (HumanEval's `test`), called with the function `entry_point`. "stdio": a list of `{"input",
    "output"}`, or `{"inputs": [...], "outputs": [...]}`, as data or as JSON text, of calls where it
    has `fn_name` or is "functional". None: it is recognized from each row."""

    entry_point: Column | None = None
    """The column with the name of the function that is tested, or `Solution().name`."""

    setup: Column | None = None
    """The column with Python source that is run before the program, such as imports, or a list of
    it (MBPP's `test_imports`); after the program where it uses names of the program's."""

    prefix: Column | None = None
    """The column with the beginning of the program (HumanEval's `prompt`), for completions that do
    not define the function themselves."""

    credit: Literal["binary", "partial"] = "binary"
    """"binary": 1 if all tests pass, else 0, and the first failing test is the last; "partial": the
    share that passes, of which constants earn some, so that True is not 1 then."""

    cpu_s: float = Field(default=4.0, gt=0, le=120)
    """Seconds of CPU time for one test."""

    timeout_s: float = Field(default=30.0, gt=0, le=300)
    """Seconds of wall clock for all tests of a program."""

    idle_s: float = Field(default=2.5, gt=0, le=300)
    """Seconds of `timeout_s` that a program may sleep or wait. With 2.5, four sandboxes finish 384
    programs that only sleep in five minutes."""

    memory_mib: int = Field(default=512, ge=16, le=8192)
    """MiB of memory for a program."""

    tolerance: float = Field(default=0.0, ge=0)
    """The largest difference of two numbers that count as equal: absolute or relative in the output
    of "stdio", absolute in the results of calls that are given as data."""


@grader("code_tests")
class CodeTests(ItemGrader[CodeTestsParams]):
    """1 if the completion's program passes the row's tests, else 0; with partial credit, the share
    of them that it passes.

    The program is the last fenced block of the completion that defines what is tested, else the
    last one, or all of it. Tests say all that is known of the answer: a function that returns one
    constant passes the tests that expect only that, and with partial credit earns the share of
    them.
    """

    pure = True
    has_full_mark = True
    max_concurrency = 64
    deadline_s = 900.0

    async def check(self, columns: Sequence[str]) -> None:
        await super().check(columns)
        if self.params.style == "check" and self.params.entry_point is None:
            raise BadRequest(
                f'reward {self.spec.label!r}: style "check" needs entry_point, the column of the '
                "function's name"
            )

    async def check_row(self, row: Mapping[str, Any]) -> None:
        tests, nothing = await self._read(row, "")
        for code in tests.codes:
            await proxy.first_calls(nothing, code)
        await self._check_reference(row)

    async def _check_reference(self, row: Mapping[str, Any]) -> None:
        """Raises GradingFailed if the row has its own solution and that fails the row's tests.
        Running out of time is no such failure, because a busy host may cause it."""
        reference = self.reference(row)
        if reference is None or not _is_python(reference):
            return
        tests, candidate = await self._read(row, reference)
        if not (tests.fit(candidate.program) or (tests.pairs and "print" in candidate.program)):
            return
        for verdict, detail in await self._verdicts(candidate, tests):
            if verdict in ("wrong", "runtime_error"):
                raise wrong_row(
                    f"the row's own solution fails its tests: {detail}; expected tests that it "
                    "passes"
                )

    def reference(self, row: Mapping[str, Any]) -> str | None:
        return reference_text(row)

    def content(self, item: ScoreItem) -> Any:
        return [
            programs_in(item.completion),
            *(item.row.get(column) for column in self._columns if column),
        ]

    @property
    def _columns(self) -> tuple[str | None, ...]:
        return self.params.tests, self.params.entry_point, self.params.setup, self.params.prefix

    async def grade_item(self, item: ScoreItem) -> Part:
        tests, candidate = await self._read(item.row, item.completion)
        verdicts = await self._verdicts(candidate, tests)
        return self._part(verdicts, tests.count, candidate)

    async def _read(self, row: Mapping[str, Any], completion: str) -> tuple[Tests, Candidate]:
        """Does what `_given` does, in a thread if the row's columns or the completion are long."""
        texts = [completion, *(str(row.get(column)) for column in self._columns if column)]
        if sum(map(len, texts)) < LONG_CHARS:
            return self._given(row, completion)
        return await asyncio.to_thread(self._given, row, completion)

    def _given(self, row: Mapping[str, Any], completion: str) -> tuple[Tests, Candidate]:
        """Returns the row's tests, and the program to test. Raises GradingFailed."""
        params = self.params
        value = row.get(params.tests)
        entry, setup, prefix = (self._text(row, column) for column in self._columns[1:])
        tests = read(value, params.style, entry or None, setup, prefix, params.tolerance)
        limits = TestLimits(params.cpu_s, params.timeout_s, params.idle_s, params.memory_mib)
        program = program_of(completion, tests.fit)
        given, program = completed(program, prefix, owner(entry) or "")
        first, last = ("", setup) if sound.needs_program(setup) else (setup, "")
        before = "\n".join((first, tests.imports, given)).strip()
        program = f"{program}\n\n{last}" if last else program
        spoken = frozenset(
            name for name, pattern in _SPOKEN.items() if pattern.search(f"{value!r} {setup}")
        )
        return tests, Candidate(
            self.tools.sandbox,
            before,
            program,
            limits,
            special=spoken,
            names=tests.names,
            is_strict=params.credit == "partial",
        )

    def _text(self, row: Mapping[str, Any], column: str | None) -> str:
        text = row.get(column) if column else ""
        if column == self.params.setup and isinstance(text, list | tuple):
            text = "\n".join(text) if all(isinstance(part, str) for part in text) else text
        if not isinstance(text, str | None):
            raise wrong_row(f"column {column!r} is {text!r:.80}; expected text")
        return text or ""

    async def _verdicts(self, candidate: Candidate, tests: Tests) -> list[tuple[Verdict, str]]:
        """Returns the verdict and the reason of each test that was run, in order. With binary
        credit the first failing test is the last."""
        verdicts = await self._cases(candidate, tests)
        for code in tests.codes:
            if self._is_over(candidate, verdicts):
                return verdicts
            verdicts.append(await proxy.run(candidate, code))
        for pair in tests.pairs:
            if self._is_over(candidate, verdicts):
                return verdicts
            verdicts.append(await run_pair(candidate, pair, self.params.tolerance))
        return verdicts

    async def _cases(self, candidate: Candidate, tests: Tests) -> list[tuple[Verdict, str]]:
        """Runs many cases in one process. If that process ended early, runs them again one by
        one."""
        verdicts: list[tuple[Verdict, str]] = []
        for start in range(0, len(tests.cases), CALLS_PER_JOB):
            several = tests.cases[start : start + CALLS_PER_JOB]
            answers = await judged(
                candidate,
                several,
                tests.imports,
                last=NO_VALUE if self.params.credit == "binary" else (),
                share=2,
            )
            for case, answer in itertools.zip_longest(several, answers or ()):
                if self._is_over(candidate, verdicts):
                    return verdicts
                if answers is None:
                    (answer,) = await judged(candidate, [case], tests.imports) or [None]
                verdicts.append(answer or ("runtime_error", "no result"))
        return verdicts

    def _is_over(self, candidate: Candidate, verdicts: list[tuple[Verdict, str]]) -> bool:
        failed = self.params.credit == "binary" and any(verdict != "ok" for verdict, _ in verdicts)
        return failed or bool(candidate.out_of_time)

    def _part(self, verdicts: list[tuple[Verdict, str]], count: int, candidate: Candidate) -> Part:
        passed = sum(verdict == "ok" for verdict, _ in verdicts)
        share = passed / count
        value = share if self.params.credit == "partial" else float(passed == count)
        if passed == count:
            return Part(value=value, detail=f"passed {count} tests", stdout=candidate.stdout)
        if passed == len(verdicts):
            verdicts = [*verdicts, ("time_limit", candidate.out_of_time)]
        number, verdict, detail = next(
            (number, *end) for number, end in enumerate(verdicts, 1) if end[0] != "ok"
        )
        return Part(
            value=value,
            verdict=verdict,
            detail=f"test {number} of {count}: {detail}",
            stdout=candidate.stdout,
        )


def _is_python(text: str) -> bool:
    """Returns whether a text is a program, or the body of a function."""
    try:
        parse_program(textwrap.dedent(program_of(text)))
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        return False
    return True


def completed(program: str, prefix: str, entry_point: str) -> tuple[str, str]:
    """Returns the source to run before the program, and the program.

    If the program defines the entry point, the part of `prefix` above that function (imports,
    helpers) runs before it. Any other program is the rest of the prefix.
    """
    whole = textwrap.dedent(program).strip()
    if not prefix:
        return "", whole
    defined = rf"^(?:async def|def|class) +{re.escape(entry_point)}\b|^{re.escape(entry_point)} *="
    if not entry_point or not re.search(defined, whole, re.MULTILINE):
        return "", f"{prefix.rstrip()}\n{program}"
    above = [match.start() for match in re.finditer(defined, prefix, re.MULTILINE)]
    return _without_decorators(prefix[: above[-1]] if above else prefix), whole


def _without_decorators(source: str) -> str:
    """Returns source that ends above a function, without the decorators of that function."""
    lines = source.rstrip().split("\n")
    while lines and lines[-1].startswith("@"):
        lines.pop()
    return "\n".join(lines)
