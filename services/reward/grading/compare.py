"""What counts as equal: numbers by value, all else by exact type too. `True` is not 1, a tuple no
list, NaN equals nothing."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import ItemsView, KeysView
from decimal import Decimal
from fractions import Fraction
from typing import Any

_SETS = (set, frozenset, KeysView, ItemsView)
_NUMBERS = (int, float, Fraction, Decimal)


def same(value: Any, target: Any, tolerance: float = 0.0) -> bool:
    """Returns whether two plain values are equal. Numbers anywhere in lists, tuples and the values
    of dicts may differ by `tolerance`; the members of sets and the keys of dicts may not."""
    if type(value) in _NUMBERS and type(target) in _NUMBERS:
        try:
            return value == target or (tolerance > 0 and abs(value - target) <= tolerance)
        except (OverflowError, TypeError):
            return False  # a number beyond what a float can hold, or of another kind, is near none
    if isinstance(value, ItemsView) and isinstance(target, ItemsView):
        return _same_dicts(dict(value), dict(target), 0.0)
    if isinstance(value, _SETS) and isinstance(target, _SETS):
        return {_marked(part) for part in value} == {_marked(part) for part in target}
    if isinstance(value, dict) and isinstance(target, dict):
        return _same_dicts(value, target, tolerance)
    if type(value) is not type(target):
        return False
    if isinstance(value, list | tuple | deque):
        return len(value) == len(target) and all(
            same(a, b, tolerance) for a, b in zip(value, target, strict=True)
        )
    return bool(value == target)


def _same_dicts(value: dict[Any, Any], target: dict[Any, Any], tolerance: float) -> bool:
    """As in Python the order counts between two that are ordered, and a count of 0 is none between
    two counters."""
    kinds = type(value), type(target)
    ours, theirs = (
        {
            _marked(key): part
            for key, part in data.items()
            if kinds != (Counter, Counter) or part != 0
        }
        for data in (value, target)
    )
    if kinds == (OrderedDict, OrderedDict) and list(ours) != list(theirs):
        return False
    return ours.keys() == theirs.keys() and all(
        same(part, theirs[key], tolerance) for key, part in ours.items()
    )


def _marked(key: Any) -> Any:
    """Returns `key` so that what equals it in Python but is not `same` (True and 1) no longer
    does."""
    if isinstance(key, tuple | frozenset):
        return type(key).__name__, type(key)(_marked(part) for part in key)
    return "bool" if isinstance(key, bool) else "", key
