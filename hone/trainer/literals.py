"""Plain data, patterns and loggers as the text that makes them again in another process."""

from __future__ import annotations

import functools
import logging
import math
import re
import types
from collections.abc import Mapping
from importlib import metadata
from typing import Any, cast

from shared.rewards import FunctionConfig, SandboxConfig

MANY = 20
"""Least entries of a dict that may be the list of installed packages, which takes long to make."""

LISTED = 0.9
"""Share of its names that are then installed now: `sys.path` changes after an import."""


def as_data(name: str, value: Any) -> str | None:
    """Returns the statements that make `value` as `name`; None for what is no plain data."""
    if isinstance(value, logging.Logger):
        return f"import logging\n{name} = logging.getLogger({value.name!r})\n"
    if isinstance(value, re.Pattern):
        pattern = cast("re.Pattern[Any]", value)
        return f"import re\n{name} = re.compile({pattern.pattern!r}, {pattern.flags})\n"
    names = cast(dict[Any, Any], value).keys() if type(value) is dict else set[Any]()
    if len(names) >= MANY and len(names & _importable()) > LISTED * len(names):
        return f"from importlib import metadata\n{name} = metadata.packages_distributions()\n"
    literal = literal_of(value)
    return None if literal is None else f"{name} = {literal}\n"


@functools.cache
def _importable() -> set[str]:
    """Returns which packages can be imported here. Where a reward asks for that, it means the place
    where it runs."""
    return set(metadata.packages_distributions())


def literal_of(value: Any) -> str | None:
    """Returns the expression of plain data; None for anything else."""
    if value is None or type(value) in (bool, int, str, bytes):
        return repr(value)
    if isinstance(value, SandboxConfig | FunctionConfig):
        return f"__import__('hone').{value!r}"
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if type(value) is dict or isinstance(value, types.MappingProxyType):
        pairs = [
            (literal_of(key), literal_of(each))
            for key, each in cast(Mapping[Any, Any], value).items()
        ]
        return (
            None
            if any(None in pair for pair in pairs)
            else f"{{{', '.join(f'{key}: {each}' for key, each in pairs)}}}"
        )
    build: dict[type, str] = {
        list: "[{}]",
        tuple: "({})",
        set: "set([{}])",
        frozenset: "frozenset([{}])",
    }
    kind = value.__class__
    if kind not in build:
        return None
    items = [literal_of(each) for each in value]
    if None in items:
        return None
    return build[kind].format("".join(f"{item}, " for item in items))


def same(one: Any, other: Any) -> bool:
    """Whether two objects are one, or equal plain data."""
    literal = literal_of(one)
    return one is other or (literal is not None and literal == literal_of(other))


def described(value: Any) -> str:
    """Returns what an error calls an object."""
    if isinstance(value, types.FunctionType | type):
        return f"{value.__qualname__!r} of {value.__module__}"
    kind = value.__class__
    return f"an object of type {kind.__module__}.{kind.__qualname__}"
