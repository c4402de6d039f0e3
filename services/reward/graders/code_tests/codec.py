"""Plain Python data as text and back: all that crosses between a sandbox and the trusted side.
Standard library only.

Its source is sent into sandboxes too (`inside_candidate.py`, `inside_tests.py`). Inside, `encode`
is only a convenience: a program may write any text it likes. What counts is that `decode`, on the
other side, makes nothing but exact built-in types.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

MAX_DEPTH = 48
MAX_ITEMS = 100_000
MAX_CHARS = 200_000


class NotPlain(Exception):
    """A value, or a text, that is not plain data. The message says what it is instead."""


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
    raise NotPlain(f"a value of type {type(value).__name__!r}")


def decode(text: str, *, allow_nan: bool = True) -> Any:
    """Returns the value that `text` stands for, made of exact built-in types. Raises NotPlain for
    any other text."""
    try:
        return _value(json.loads(text), 0, allow_nan)
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise NotPlain(f"not plain data ({type(error).__name__})") from None


def _value(tree: Any, depth: int, allow_nan: bool) -> Any:
    if depth > 2 * MAX_DEPTH:
        raise NotPlain("data nested too deeply")
    if type(tree) is float and tree != tree and not allow_nan:
        raise NotPlain("NaN")
    if type(tree) is list:
        return [_value(part, depth + 1, allow_nan) for part in tree]
    if type(tree) is not dict:
        return tree
    ((kind, content),) = tree.items()
    if kind == "bytes":
        return bytes.fromhex(content)
    parts = _value(content, depth + 1, allow_nan)
    if type(parts) is not list:
        raise NotPlain(f"a {kind!r:.20} of no list")
    if kind == "complex":
        return complex(*parts)
    makers: dict[str, Any] = {
        "dict": dict,
        "tuple": tuple,
        "set": set,
        "frozenset": frozenset,
        "iterator": iter,
    }
    if kind not in makers:
        raise NotPlain(f"an unknown kind {kind!r:.20}")
    return makers[kind](parts)
