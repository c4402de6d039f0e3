"""Verdicts by content, in memory: a pure grader is not asked twice about the same params and item.
The least recently used are dropped first."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

from services.reward.grading.registry import Grader
from shared.wire import Part, ScoreItem

_OVERHEAD_BYTES = 1024
"""About what a cached verdict takes beside its texts."""

_BY_CHANCE = ("time_limit", "sandbox_error", "error")
"""Verdicts that the next try may not repeat; they are not cached."""


class VerdictCache:
    """Holds about `size_bytes` of verdicts; with 0, none."""

    def __init__(self, size_bytes: int) -> None:
        self._free_bytes = size_bytes
        self._parts: OrderedDict[bytes, Part] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parts)

    def get(self, key: bytes) -> Part | None:
        """Returns the verdict as one that took no time, or None."""
        part = self._parts.get(key)
        if part is None:
            return None
        self._parts.move_to_end(key)
        return as_cached(part)

    def put(self, key: bytes, part: Part) -> None:
        if part.verdict in _BY_CHANCE or key in self._parts:
            return
        self._parts[key] = part
        self._free_bytes -= _size_bytes(part)
        while self._free_bytes < 0:
            _, oldest = self._parts.popitem(last=False)
            self._free_bytes += _size_bytes(oldest)


def as_cached(part: Part) -> Part:
    return part.model_copy(update={"cached": True, "seconds": 0.0})


def key_of(grader: Grader[Any], item: ScoreItem) -> bytes:
    """Returns a digest of all that a pure grader's verdict on `item` depends on. 1, 1.0, True and
    "1" differ."""
    return hashlib.sha256(
        repr((grader.name, grader.params, grader.content(item))).encode("utf-8", "surrogatepass")
    ).digest()


def _size_bytes(part: Part) -> int:
    return _OVERHEAD_BYTES + 4 * (len(part.detail) + len(part.stdout))
