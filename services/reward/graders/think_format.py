"""Rewards the form "<think>reasoning</think>answer", as TRL's `think_format_reward` does, and
stricter in two points:

a second "</think>" and an empty answer earn 0 here and 1 there. As there, the completion must start
with "<think>" and have only one.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.reward.grading.registry import grader
from shared.wire import Part, ScoreItem

OPEN, CLOSE = "<think>", "</think>"


@grader("think_format")
def think_format(items: Sequence[ScoreItem]) -> list[Part]:
    """1 for a completion of exactly one <think>...</think> at its start and then a non-empty
    answer, else 0."""
    faults = [_fault(item.completion) for item in items]
    return [
        Part(value=0.0, verdict="wrong", detail=fault) if fault else Part(value=1.0)
        for fault in faults
    ]


def _fault(text: str) -> str:
    if not text.startswith(OPEN):
        return f"does not start with {OPEN}"
    if (text.count(OPEN), text.count(CLOSE)) != (1, 1):
        return f"{text.count(OPEN)} {OPEN} and {text.count(CLOSE)} {CLOSE}, expected one each"
    return "" if text.partition(CLOSE)[2].strip() else f"no answer after {CLOSE}"
