"""Reads what a judge said: the JSON object that its reply ends with, which has to hold the key that
only this question named.

A judge may quote the completion, and the completion may hold an object of its own. No completion
knows the key: it is drawn when the judge is asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from services.reward.grading.failures import GradingFailed

MAX_CHARS = 20_000
"""Characters at the end of a reply that are searched."""

KEY = "key"

_CLOSING_FENCE = re.compile(r"\s*(?:```\s*)?\Z")


class Unreadable(GradingFailed):
    """A reply has no verdict, and the judge may be asked again."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail, "model_grader_parse_error")


def verdict(text: str, key: str) -> dict[str, Any]:
    """Returns the JSON object that ends `text`, a closing fence after it not counted. Raises
    Unreadable where there is none, or one without this `key`."""
    found = _last_object(text[-MAX_CHARS:])
    if found is None:
        raise Unreadable(f"the judge's reply does not end with a JSON object: {text[-200:]!r}")
    if found.get(KEY) != key:
        raise Unreadable(
            f"the object that ends the judge's reply has {KEY!r} {found.get(KEY)!r:.40}, expected "
            f"the one in its question, {key!r}: {text[-200:]!r}"
        )
    return found


def number(found: Mapping[str, Any], name: str, low: float, high: float) -> float:
    """Returns the number under `name`. Raises Unreadable if there is none from `low` to `high`."""
    value: Any = found.get(name)
    if type(value) not in (int, float) or not low <= value <= high:
        raise Unreadable(
            f"the judge gave {value!r:.80}; expected {name!r} from {low:g} to {high:g}"
        )
    return float(value)


def label(found: Mapping[str, Any], name: str, labels: tuple[str, ...]) -> str:
    """Returns the label under `name`. Raises Unreadable if it is none of `labels`."""
    value = found.get(name)
    if value not in labels:
        raise Unreadable(f"the judge gave {value!r:.80}; expected one of {', '.join(labels)}")
    return value


def _last_object(text: str) -> dict[str, Any] | None:
    """Returns the largest JSON object that reaches to the end of `text`; None: there is none."""
    text = _CLOSING_FENCE.sub("", text, count=1)
    decoder = json.JSONDecoder()
    position = text.find("{") if text.endswith("}") else -1
    while position >= 0:
        try:
            found, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            end = position + 1
        else:
            if end == len(text):
                return found
        position = text.find("{", end)
    return None
