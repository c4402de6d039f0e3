"""Searches texts for patterns of the `regex` package."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import regex

MAX_PATTERNS = 4
"""Kept compiled. A pattern may be large, and a job has one or two."""


def prepare() -> None:
    import regex  # noqa: F401


def groups(pattern: str, flags: list[str]) -> dict[str, Any]:
    """Returns the `count` of a pattern's groups and their `names`, or what is wrong with it, as
    `fault`."""
    import regex

    try:
        compiled = _compiled(pattern, tuple(flags))
    except (regex.error, RecursionError, OverflowError, ValueError) as error:
        return {"fault": str(error)}
    return {"count": compiled.groups, "names": sorted(compiled.groupindex)}


def find(
    pattern: str, flags: list[str], mode: str, which: str, group: int | str, text: str, cpu_s: float
) -> dict[str, Any]:
    """Returns, as `found`, what the group matched ("" if it took no part, None if the pattern was
    not found); `late` if the search took longer than `cpu_s`."""
    compiled = _compiled(pattern, tuple(flags))
    try:
        match = _match(compiled, mode, which, text, cpu_s)
    except TimeoutError:
        return {"found": None, "late": True}
    return {"found": None if match is None else match[group] or "", "late": False}


def _match(
    compiled: regex.Pattern[str], mode: str, which: str, text: str, cpu_s: float
) -> regex.Match[str] | None:
    if mode == "full":
        return compiled.fullmatch(text.strip(), timeout=cpu_s)
    if which == "first":
        return compiled.search(text, timeout=cpu_s)
    return next(iter(deque(compiled.finditer(text, timeout=cpu_s), maxlen=1)), None)


@lru_cache(MAX_PATTERNS)
def _compiled(pattern: str, flags: tuple[str, ...]) -> regex.Pattern[str]:
    import regex

    return regex.compile(
        pattern, flags=sum(getattr(regex, flag) for flag in flags), cache_pattern=False
    )
