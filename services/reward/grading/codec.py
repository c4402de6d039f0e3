"""Plain Python data as text and back: the only data that crosses between a sandbox and the trusted
side; and which of it is the same. Standard library only.

Its source is sent into sandboxes too (`inside_candidate.py`, `inside_tests.py`). Inside, `encode`
is only a convenience: a program may write any text it likes. What counts is that `decode`, on the
other side, makes nothing but exact built-in types.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, ItemsView, Iterable, Iterator, KeysView
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from time import process_time
from typing import Any

MAX_DEPTH = 48
MAX_ITEMS = 100_000
MAX_CHARS = 200_000
MAX_OF_ONE_HASH = 64
MAX_DECIMAL = 1000
"""Most digits of a decimal number, before and after its point: `int` of it has as many."""

MAX_FRACTION_BITS = 100_000
"""Reducing a fraction takes time that grows with the square of its length."""

ALWAYS_TAKEN, TAKEN_S = 1000, 0.5
"""So many items are taken from an iterator in any time, and more only within so many seconds of CPU
time, because it may have no end."""

KEPT_CHARS = 10_000
"""Characters that are kept of an iterator that may have no end."""

SPECIAL = frozenset({"nan", "inf"})
"""The floats that no test may meet unless it names them, because they can make a tolerance hold."""


class NotPlain(Exception):
    """A value, or a text, that is not plain data. The message says what it is instead."""


class WrongType(NotPlain):
    """A value of a type, `kind`, that is not plain data."""

    def __init__(self, kind: type) -> None:
        super().__init__(f"a value of type {kind.__name__!r}")
        self.kind = kind


class UnfinishedIterator(Exception):
    """An iterator was asked for more than was taken of it."""


class AwaitedResult:
    """The result of a coroutine, which tests await again."""

    def __init__(self, value: Any) -> None:
        self.value = value


class ValueTooLong(Exception):
    """A value of more than `MAX_CHARS` as text."""


def encode(value: Any) -> str:
    """Returns `value` as text. Subclasses of the built-in types count as their content, iterators
    as the items that they give.

    Raises NotPlain for other values, and for values that nest too deeply or contain themselves;
    ValueTooLong for more than `MAX_CHARS`.
    """
    try:
        text = json.dumps(_tree(value, 0))
    except ValueError as error:
        raise NotPlain(str(error)) from None
    if len(text) > MAX_CHARS:
        raise ValueTooLong(f"a value of {len(text)} characters, at most {MAX_CHARS} are taken")
    return text


def _tree(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise NotPlain(f"data nested deeper than {MAX_DEPTH}")
    if isinstance(value, int) and not -_LONG < value < _LONG:
        return {"int": [hex(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_tree(part, depth + 1) for part in list.__iter__(value)]
    if isinstance(value, dict):
        kind = next((one for one in (Counter, OrderedDict) if isinstance(value, one)), dict)
        return {
            kind.__name__: [
                [_tree(key, depth + 1), _tree(part, depth + 1)] for key, part in dict.items(value)
            ]
        }
    kind: Any
    for kind in (tuple, set, frozenset, deque, *_VIEWS):
        if isinstance(value, kind):
            return {kind.__name__: [_tree(part, depth + 1) for part in kind.__iter__(value)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, AwaitedResult):
        return {"awaited": [_tree(value.value, depth + 1)]}
    for kind, parts in _PARTS.items():
        if isinstance(value, kind):
            return {kind.__name__: [_tree(part, depth + 1) for part in parts(value)]}
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return _tree(value.item(), depth + 1)
    if hasattr(value, "__next__"):
        return _taken(value, depth)
    raise WrongType(type(value))


_LONG = 10**4000
"""Larger numbers cross in hexadecimal, because Python reads at most 4300 decimal digits, in a time
that grows with their square."""

_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_PARTS: dict[type, Callable[[Any], list[Any]]] = {
    Fraction: lambda value: [value.numerator, value.denominator],
    Decimal: lambda value: [str(value)],
    datetime: lambda value: [value.isoformat()],
    date: lambda value: [value.isoformat()],
    time: lambda value: [value.isoformat()],
    timedelta: lambda value: [value.days, value.seconds, value.microseconds],
}
"""The parts of a value that cross, by its class. A datetime is a date too, so it comes first."""


def _taken(values: Any, depth: int) -> Any:
    """Returns the items of an iterator, up to the first that is not plain, too large or late; of an
    iterator that may have no end, a beginning."""
    parts: list[Any] = []
    num_kept, size, start_s = 0, 0, process_time()
    for part in values:
        try:
            tree = _tree(part, depth + 1)
            size += len(json.dumps(tree))
        except (NotPlain, ValueError):
            if not parts:
                raise
            break
        is_long = len(parts) >= MAX_ITEMS or size > MAX_CHARS // 2
        is_slow = len(parts) >= ALWAYS_TAKEN and process_time() - start_s > TAKEN_S
        if is_long or is_slow:
            break
        parts.append(tree)
        num_kept += size <= KEPT_CHARS
    else:
        return {"iterator": parts}
    return {"unfinished": parts[: max(num_kept, 1)]}


def decode(text: str, *, special: frozenset[str] = SPECIAL) -> Any:
    """Returns the value that `text` stands for, made of exact built-in types. Raises NotPlain for
    any other text, and for special floats that are not in `special`."""
    if len(text) > MAX_CHARS:
        raise NotPlain(f"a text of {len(text)} characters, at most {MAX_CHARS} are taken")
    try:
        return _value(json.loads(text), 0, special)
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise NotPlain(f"not plain data ({type(error).__name__})") from None


def _value(tree: Any, depth: int, special: frozenset[str]) -> Any:
    if depth > 2 * MAX_DEPTH:
        raise NotPlain("data nested too deeply")
    if type(tree) is float:
        return _number(tree, special)
    if type(tree) is list:
        return [_value(part, depth + 1, special) for part in tree]
    if type(tree) is not dict:
        return tree
    ((kind, content),) = tree.items()
    if kind == "bytes":
        return bytes.fromhex(content)
    parts = _value(content, depth + 1, special)
    if type(parts) is not list:
        raise NotPlain(f"a {kind!r:.20} of no list")
    return _scalar(kind, parts) if kind in _SCALARS else _collected(kind, parts)


def _range(start: int, stop: int, step: int) -> range:
    made = range(start, stop, step)
    if not -MAX_ITEMS <= (stop - start) // step <= MAX_ITEMS:
        raise NotPlain(f"a range of more than {MAX_ITEMS} items")
    return made


def _fraction(numerator: int, denominator: int) -> Any:
    if numerator.bit_length() + denominator.bit_length() > MAX_FRACTION_BITS:
        raise NotPlain(f"a fraction of more than {MAX_FRACTION_BITS} bits")
    return Fraction(numerator, denominator)


def _decimal(text: str) -> Any:
    number = Decimal(text)
    if not number.is_finite():
        raise NotPlain(f"{text:.20}, which is not a finite number")
    if len(text) > MAX_DECIMAL or abs(number.adjusted()) > MAX_DECIMAL:
        raise NotPlain(f"a decimal number of more than {MAX_DECIMAL} digits")
    return number


_SCALARS: dict[str, tuple[tuple[type, ...], Callable[..., Any]]] = {
    "int": ((str,), lambda text: int(text, 16)),
    "range": ((int, int, int), _range),
    "Fraction": ((int, int), _fraction),
    "Decimal": ((str,), _decimal),
    "datetime": ((str,), datetime.fromisoformat),
    "date": ((str,), date.fromisoformat),
    "time": ((str,), time.fromisoformat),
    "timedelta": ((int, int, int), timedelta),
}
"""By class: the exact types of the parts, and the function that makes a value of them."""


def _scalar(kind: str, parts: list[Any]) -> Any:
    types, made = _SCALARS[kind]
    if tuple(map(type, parts)) != types:
        raise NotPlain(f"no {kind!r:.20}")
    try:
        return made(*parts)
    except ArithmeticError as error:
        raise NotPlain(f"no {kind!r:.20} ({type(error).__name__})") from None


def _number(number: float, special: frozenset[str]) -> float:
    name = "nan" if math.isnan(number) else "inf" if math.isinf(number) else ""
    if name and name not in special:
        raise NotPlain(f"{number}, which no test speaks of")
    return number


def _collected(kind: str, parts: list[Any]) -> Any:
    if kind in _LISTED:
        return _LISTED[kind](parts)
    if kind == "complex" and len(parts) == 2 and {*map(type, parts)} <= {int, float}:
        return complex(*parts)
    if kind == "awaited" and len(parts) == 1:
        return AwaitedResult(parts[0])
    if kind in _HASHED and not _has_hash_collisions(parts):
        return _HASHED[kind](parts)
    is_pairs = all(type(pair) in (list, tuple) and len(pair) == 2 for pair in parts)
    if kind in _PAIRED and is_pairs and not _has_hash_collisions(key for key, _ in parts):
        return _PAIRED[kind](parts)
    raise NotPlain(f"no {kind!r:.20}")


def _unfinished(parts: list[Any]) -> Iterator[Any]:
    yield from parts
    raise UnfinishedIterator(f"more than the first {len(parts)} items of an iterator")


_LISTED: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "iterator": iter,
    "unfinished": _unfinished,
    "deque": deque,
    "dict_values": lambda parts: dict(enumerate(parts)).values(),
}
_HASHED: dict[str, Callable[[list[Any]], Any]] = {
    "set": set,
    "frozenset": frozenset,
    "dict_keys": lambda parts: dict.fromkeys(parts).keys(),
}
_PAIRED: dict[str, Callable[[list[Any]], Any]] = {
    "dict": dict,
    "Counter": lambda parts: Counter(dict(parts)),
    "OrderedDict": OrderedDict,
    "dict_items": lambda parts: dict(parts).items(),
}


def _has_hash_collisions(keys: Iterable[Hashable]) -> bool:
    """Returns whether more than `MAX_OF_ONE_HASH` unequal keys have the same hash. Numbers can be
    chosen so, and making a set of n of them takes n * n steps."""
    of_hash: dict[int, list[Hashable]] = {}
    for key in keys:
        alike = of_hash.setdefault(hash(key), [])
        if key not in alike:
            alike.append(key)
        if len(alike) > MAX_OF_ONE_HASH:
            return True
    return False


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
