"""What counts as equal: numbers by value, all else by exact type too. `True` is not 1, a tuple no
list, NaN equals nothing."""

from __future__ import annotations

from typing import Any


def same(value: Any, target: Any, tolerance: float = 0.0) -> bool:
    """Returns whether two plain values are equal. Numbers anywhere in lists, tuples and the values
    of dicts may differ by `tolerance`; the members of sets and the keys of dicts may not."""
    if type(value) in (int, float) and type(target) in (int, float):
        try:
            return value == target or (tolerance > 0 and abs(value - target) <= tolerance)
        except OverflowError:
            return False  # a whole number beyond what a float can hold is near no float
    if isinstance(value, set | frozenset) and isinstance(target, set | frozenset):
        return {_marked(part) for part in value} == {_marked(part) for part in target}
    if type(value) is not type(target):
        return False
    if isinstance(value, list | tuple):
        return len(value) == len(target) and all(
            same(a, b, tolerance) for a, b in zip(value, target, strict=True)
        )
    if isinstance(value, dict):
        ours, theirs = (
            {_marked(key): part for key, part in data.items()} for data in (value, target)
        )
        return ours.keys() == theirs.keys() and all(
            same(part, theirs[key], tolerance) for key, part in ours.items()
        )
    return bool(value == target)


def _marked(key: Any) -> Any:
    """Returns `key` so that what equals it in Python but is not `same` (True and 1) no longer
    does."""
    if isinstance(key, tuple | frozenset):
        return type(key).__name__, type(key)(_marked(part) for part in key)
    return "bool" if isinstance(key, bool) else "", key
