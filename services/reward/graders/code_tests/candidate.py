"""Makes the calls of a program in a sandbox, from the outside. What comes back is untrusted and
read here with care."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.reward.graders.code_tests import inside
from services.reward.grading.codec import SPECIAL
from services.reward.grading.programs import KEEP_CHARS, explained, fault
from services.reward.sandbox.base import Sandbox
from services.reward.sandbox.inside.child import WALL_PER_CPU
from shared.wire import ExecuteRequest, Execution, Verdict

NO_VALUE = ("raised", "absent", "opaque", "large", "late", "memory")
MAX_MESSAGE_CHARS = 200
_MOSTLY = 0.9
"""Of the idle time that ended a run is left in its report: its slot looked a little earlier."""

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
    """Of one test: seconds of CPU, MiB of memory. Of all tests of a program together: `timeout_s`
    seconds of wall clock, and `idle_s` of these in which it does nothing."""

    cpu_s: float
    timeout_s: float
    idle_s: float
    memory_mib: int


@dataclass(frozen=True)
class CallEnd:
    """What one call came to. `verdict` "ok": `text` is what it returned, by the program's own
    account, and nothing was made of that yet. `how` is "value" or one of `NO_VALUE`."""

    verdict: Verdict
    detail: str = ""
    how: str = ""
    text: str = ""


@dataclass
class Candidate:
    """One program, with what it printed and how long it ran so far. `names` are those that its
    tests have from it."""

    sandbox: Sandbox
    setup: str
    program: str
    limits: TestLimits
    special: frozenset[str] = SPECIAL
    names: frozenset[str] = frozenset()
    stdout: str = ""
    wall_s: float = 0.0
    idle_s: float = 0.0

    @property
    def out_of_time(self) -> str:
        """Returns which of the limits for all tests together was reached, "" if none was."""
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
        execution = await self.execute(inside.candidate_job(arguments, **self.job_limits(share)))
        verdict, detail = fault(execution)
        if verdict != "ok":
            return CallEnd(verdict, detail)
        return self._outcomes(execution.value, len(calls))

    async def execute(self, request: ExecuteRequest) -> Execution:
        """Returns how a job of this program ended, and adds up its time and output."""
        execution = await self.sandbox.execute(request)
        self.wall_s += execution.wall_s
        self.idle_s += max(execution.wall_s - WALL_PER_CPU * execution.cpu_s, 0.0)
        self.stdout = execution.stdout[-KEEP_CHARS:]
        return execution

    def job_limits(self, share: int = 1) -> dict[str, Any]:
        cpu_s = min(self.limits.cpu_s * share, self.limits.timeout_s)
        return {
            "cpu_s": cpu_s,
            "timeout_s": self.limits.timeout_s,
            "idle_s": self.limits.idle_s,
            "memory_mib": self.limits.memory_mib,
        }

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
        """Returns what a call came to by the program's own account. It may send any word; one that
        is not of ours says that the call gave no value."""
        if how == "value":
            return CallEnd("ok", how=how, text=text)
        how, text = how if how in NO_VALUE else "raised", text[:MAX_MESSAGE_CHARS]
        detail = f"returned {text}" if how == "opaque" else explained(text)
        return CallEnd(_VERDICTS[how], detail, how=how, text=detail)
