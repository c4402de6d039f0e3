"""Plain Python data as text and back: all that crosses between a sandbox and the trusted side.
Standard library only.

Its source is sent into sandboxes too (`inside_candidate.py`, `inside_tests.py`). Inside, `encode`
is only a convenience: a program may write any text it likes. What counts is that `decode`, on the
other side, makes nothing but exact built-in types.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Hashable, Iterable
from typing import Any

MAX_DEPTH = 48
MAX_ITEMS = 100_000
MAX_CHARS = 200_000
MAX_OF_ONE_HASH = 64
SPECIAL = frozenset({"nan", "inf"})
"""The floats that are no numbers to calculate with: they make a tolerance hold."""


class NotPlain(Exception):
    """A value, or a text, that is not plain data. The message says what it is instead."""


class WrongType(NotPlain):
    """A value of a type, `kind`, that is not plain data."""

    def __init__(self, kind: type) -> None:
        super().__init__(f"a value of type {kind.__name__!r}")
        self.kind = kind


class TooLarge(Exception):
    """A value of more than `MAX_CHARS` as text."""


def encode(value: Any) -> str:
    """Returns `value` as text. Subclasses of the built-in types count as their content, iterators
    as what they give.

    Raises NotPlain for all else, and for what nests too deeply or contains itself; TooLarge for
    more than `MAX_CHARS`.
    """
    try:
        text = json.dumps(_tree(value, 0))
    except ValueError as error:
        raise NotPlain(str(error)) from None
    if len(text) > MAX_CHARS:
        raise TooLarge(f"a value of {len(text)} characters, at most {MAX_CHARS} are taken")
    return text


def _tree(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise NotPlain(f"data nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_tree(part, depth + 1) for part in list.__iter__(value)]
    if isinstance(value, dict):
        return {
            "dict": [
                [_tree(key, depth + 1), _tree(part, depth + 1)] for key, part in dict.items(value)
            ]
        }
    kind: Any
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [_tree(part, depth + 1) for part in kind.__iter__(value)]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return _tree(value.item(), depth + 1)
    if hasattr(value, "__next__") or isinstance(
        value, range | type({}.keys()) | type({}.values()) | type({}.items())
    ):
        return {"iterator": [_tree(part, depth + 1) for part in itertools.islice(value, MAX_ITEMS)]}
    raise WrongType(type(value))


def decode(text: str, *, special: frozenset[str] = SPECIAL) -> Any:
    """Returns the value that `text` stands for, made of exact built-in types; of the special floats
    only those named. Raises NotPlain for any other text."""
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
    return _collected(kind, parts)


def _number(number: float, special: frozenset[str]) -> float:
    name = "nan" if math.isnan(number) else "inf" if math.isinf(number) else ""
    if name and name not in special:
        raise NotPlain(f"{number}, which no test speaks of")
    return number


def _collected(kind: str, parts: list[Any]) -> Any:
    if kind == "tuple":
        return tuple(parts)
    if kind == "iterator":
        return iter(parts)
    if kind == "complex" and len(parts) == 2 and {*map(type, parts)} <= {int, float}:
        return complex(*parts)
    if kind in ("set", "frozenset") and not crowded(parts):
        return set(parts) if kind == "set" else frozenset(parts)
    is_pairs = all(type(pair) is list and len(pair) == 2 for pair in parts)
    if kind == "dict" and is_pairs and not crowded(key for key, _ in parts):
        return dict(parts)
    raise NotPlain(f"no {kind!r:.20}")


def crowded(keys: Iterable[Hashable]) -> bool:
    """Returns whether more than `MAX_OF_ONE_HASH` unequal keys have the same hash, as numbers can
    be chosen to: a set of n of them takes n * n steps to make."""
    of_hash: dict[int, list[Hashable]] = {}
    for key in keys:
        alike = of_hash.setdefault(hash(key), [])
        if key not in alike:
            alike.append(key)
        if len(alike) > MAX_OF_ONE_HASH:
            return True
    return False
