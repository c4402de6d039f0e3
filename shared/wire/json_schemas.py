"""Bounds of the JSON Schemas that constrain an agent's answer, so that an engine compiles each
within seconds."""

from __future__ import annotations

import json
import re
from typing import Any, cast

MAX_BYTES = 64 << 10
MAX_DEPTH = 32
MAX_COUNT = 100
"""Largest `maxLength` or similar count. Each of its values is a state of the grammar, with a mask
over the vocabulary: 100 take 2.3 s of processor time with 49,000 tokens."""

MAX_COUNTS = 1000
"""Largest sum of such counts in a schema."""

MAX_PROPERTIES = 100
MAX_PATTERN = 200

COUNTS = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
)
REPEATED = re.compile(r"\{\s*\d*\s*,?\s*\d*\s*\}")
"""A counted repetition in a regular expression."""


def check_schema(schema: Any, where: str) -> None:
    """Raises ValueError for a schema that is too large, too deep, or has counts or regular
    expressions that could become large when they are compiled."""
    size = len(json.dumps(schema))
    if size > MAX_BYTES:
        raise ValueError(f"{where} has {size} bytes as JSON, expected at most {MAX_BYTES}")
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    total = 0.0
    while waiting:
        node, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"{where} is nested deeper than {MAX_DEPTH} levels")
        if isinstance(node, dict):
            fields = cast(dict[str, Any], node)
            total += _check_keywords(fields, where)
            node = list(fields.values())
        if isinstance(node, list):
            waiting += [(each, depth + 1) for each in cast(list[Any], node)]
    if total > MAX_COUNTS:
        raise ValueError(
            f"{where} has lengths and counts (maxLength and the like) of {total:g} together, "
            f"expected at most {MAX_COUNTS}"
        )


def _check_keywords(node: dict[str, Any], where: str) -> float:
    """Returns the sum of the node's lengths and counts."""
    counts = {name: node[name] for name in COUNTS & node.keys()}
    counts = {name: count for name, count in counts.items() if isinstance(count, int | float)}
    for name, count in counts.items():
        if count > MAX_COUNT:
            raise ValueError(f"{where} has {name} {count}, expected at most {MAX_COUNT}")
    properties = _table(node, "properties")
    if len(properties) > MAX_PROPERTIES:
        raise ValueError(
            f"{where} has {len(properties)} properties, expected at most {MAX_PROPERTIES}"
        )
    patterns: list[Any] = [node.get("pattern"), *_table(node, "patternProperties")]
    for pattern in patterns:
        if not isinstance(pattern, str):
            continue
        if len(pattern) > MAX_PATTERN:
            raise ValueError(
                f"{where} has a pattern of {len(pattern)} characters, expected at most "
                f"{MAX_PATTERN}"
            )
        if found := REPEATED.search(pattern):
            raise ValueError(
                f"{where} has the pattern {pattern!r:.80} with the counted repetition "
                f"{found[0]!r}, expected none: it may become large when compiled"
            )
    return sum(count for count in counts.values() if count > 0)


def _table(node: dict[str, Any], name: str) -> dict[str, Any]:
    found = node.get(name)
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}
