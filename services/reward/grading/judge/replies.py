"""Reads what a judge said: the last JSON object in its reply, in which one key counts.

The last, because a judge may quote the completion, and the completion may hold an object of its
own.
"""

from __future__ import annotations

import json
import math
from typing import Any

from services.reward.grading.registry import GradingFailed

MAX_CHARS = 4000
"""Of a reply, how much of its end is searched."""


def last_object(text: str) -> dict[str, Any] | None:
    """Returns the last JSON object at the end of `text` that is inside no other one; None if there
    is none."""
    text = text[-MAX_CHARS:]
    decoder = json.JSONDecoder()
    found: dict[str, Any] | None = None
    position = text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
            found = value
        except (ValueError, RecursionError):
            end = position + 1
        position = text.find("{", end)
    return found


def number(text: str, key: str, low: float, high: float) -> float:
    """Returns the number under `key`. Raises GradingFailed if there is none from `low` to
    `high`."""
    value = _under(text, key)
    if type(value) not in (int, float) or not (math.isfinite(value) and low <= value <= high):
        raise GradingFailed(
            f"the judge gave {value!r:.80}; expected {key!r} from {low:g} to {high:g}",
            "model_grader_parse_error",
        )
    return float(value)


def label(text: str, key: str, labels: tuple[str, ...]) -> str:
    """Returns the label under `key`. Raises GradingFailed if it is none of `labels`."""
    value = _under(text, key)
    if value not in labels:
        raise GradingFailed(
            f"the judge gave {value!r:.80}; expected one of {', '.join(labels)}",
            "model_grader_parse_error",
        )
    return value


def _under(text: str, key: str) -> Any:
    found = last_object(text)
    if found is None or key not in found:
        raise GradingFailed(
            f"the judge's reply has no JSON object with {key!r}: {text[-200:]!r}",
            "model_grader_parse_error",
        )
    return found[key]
