"""What graders that run programs share: where the program is in a completion, and how its end
becomes a verdict."""

from __future__ import annotations

import re

from services.reward.grading.registry import GradingFailed
from shared.wire import Execution, Verdict

KEEP_CHARS = 1000
"""Kept of what a program printed."""

_FENCE = re.compile(
    r"```[ \t]{0,4}(?:python3?|py)?[ \t]{0,16}\r?\n(.*?)```", re.DOTALL | re.IGNORECASE
)


def program_of(completion: str) -> str:
    """Returns the last fenced code block of the completion, or else all of it, without empty lines
    around.

    The first line keeps its indentation: it may be the rest of a function whose beginning was in
    the prompt."""
    blocks = _FENCE.findall(completion)
    return (blocks[-1] if blocks else completion).rstrip().lstrip("\r\n")


def fault(execution: Execution) -> tuple[Verdict, str]:
    """Returns verdict and reason of a program that gave nothing to compare ("ok", "" if it did).
    Raises GradingFailed where the sandbox failed, not the program."""
    if execution.verdict == "sandbox_error":
        reason = execution.stderr.strip()[-200:] or "the sandbox failed"
        raise GradingFailed(reason, "python_grader_server_error", by_sandbox=True)
    if execution.verdict == "ok":
        return "ok", ""
    lines = execution.stderr.strip().splitlines() or [execution.verdict]
    return execution.verdict, lines[-1][:200]
