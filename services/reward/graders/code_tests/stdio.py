"""Programs that read stdin and write stdout: one process a test, its output compared here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.reward.graders.code_tests.candidate import Candidate
from services.reward.grading.programs import fault
from shared.wire import ExecuteRequest, Verdict

MAX_OUTPUT_BYTES = 60_000
"""What a test may expect: the sandbox keeps 64 KiB."""

_NUMBER = re.compile(r"[-+]?(\d{1,400}(\.\d{0,400})?|\.\d{1,400})([eE][-+]?\d{1,3})?")


@dataclass(frozen=True)
class Pair:
    stdin: str
    stdout: str


async def run(candidate: Candidate, pair: Pair, tolerance: float) -> tuple[Verdict, str]:
    """Returns the verdict on one run, and why."""
    program = f"{candidate.setup}\n{candidate.program}" if candidate.setup else candidate.program
    execution = await candidate.execute(
        ExecuteRequest(code=program, stdin=pair.stdin, **candidate.job_limits())
    )
    verdict, detail = fault(execution)
    if verdict != "ok":
        return verdict, detail
    if agree(execution.stdout, pair.stdout, tolerance):
        return "ok", ""
    return "wrong", f"printed {execution.stdout.strip()!r:.80}, wanted {pair.stdout.strip()!r:.80}"


def agree(given: str, wanted: str, tolerance: float = 0.0) -> bool:
    """Returns whether two outputs are the same line by line, empty lines around them and blanks at
    the ends of lines aside. With a `tolerance`, numbers may differ by that much (absolute, or
    relative to what is wanted)."""
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
