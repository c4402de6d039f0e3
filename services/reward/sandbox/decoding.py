"""Text that a program wrote -> plain data: finite, of bounded depth and size. Pure."""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_DEPTH = 64

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A string of JSON, also one that does not end, so that no text is gone through twice."""


class NotPlain(Exception):
    """A text that is not plain data; the message says what is wrong with it."""


def decode(text: bytes, *, max_items: int) -> Any:
    """Returns the value of a text of JSON. Raises NotPlain for any other text, for more than
    `max_items` values (before any is made), for what is nested deeper than `MAX_DEPTH`, and for
    numbers that are not finite."""
    if _items(text) > max_items and _items(_STRING.sub(b"", text)) > max_items:
        raise NotPlain(f"more than {max_items} values")
    try:
        value = json.loads(text)
        _check(value, 0)
    except (ValueError, RecursionError) as error:
        raise NotPlain(f"{type(error).__name__}: {error}") from None
    return value


def _items(text: bytes) -> int:
    """Returns at least how many values a text of JSON without strings has; with strings, perhaps
    more."""
    return sum(text.count(mark) for mark in (b",", b"[", b"{"))


def _check(value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is no finite number")
    elif isinstance(value, list | dict):
        for part in value if isinstance(value, list) else value.values():
            _check(part, depth + 1)
