"""The job as TOML: each key with the name that it had, and what differs above it."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterator
from typing import Any, cast

from hone.importing.table import Draft, Entry
from shared.job import Job

WIDTH = 100
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""Characters that a TOML file must not have."""


def text(draft: Draft, title: str) -> str:
    """Returns the TOML of a draft. Keys that the user must fill in are comments."""
    sections = [name for name in Job.model_fields if name != "rewards"]
    parts = [[f"# From {title}, by `hone import`."], list(_section("", draft))]
    parts += [list(_section(name, draft)) for name in sections]
    parts += [list(_reward(entry)) for entry in draft.rewards]
    if "rewards" in draft.fill_in:
        parts.append([*_comment(f"fill in [[rewards]]: {draft.fill_in['rewards']}")])
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _section(name: str, draft: Draft) -> Iterator[str]:
    """Yields the lines of a section; of the job's own keys for ""."""
    prefix = f"{name}." if name else ""
    own = {key: entry for key, entry in draft.entries.items() if _within(key, prefix)}
    missing = {key: why for key, why in draft.fill_in.items() if _within(key, prefix)}
    if name and (own or missing):
        yield f"[{name}]"
    for key, why in missing.items():
        if key != "rewards":
            yield from _comment(f"fill in {key.removeprefix(prefix)}: {why}")
    for key, entry in sorted(own.items(), key=lambda item: _position(item[0])):
        yield from _line(key.removeprefix(prefix), entry)


def _within(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and "." not in key.removeprefix(prefix)


def _position(key: str) -> int:
    names = list(Job.model_fields)
    return names.index(key) if key in names else 0


def _line(key: str, entry: Entry) -> Iterator[str]:
    for note in entry.notes:
        yield from _comment(note)
    origin = f"    # {entry.origin}" if entry.origin else ""
    yield f"{key} = {toml(entry.value)}{origin}"


def _reward(entry: Entry) -> Iterator[str]:
    for note in entry.notes:
        yield from _comment(note)
    yield f"[[rewards]]    # {entry.origin}"
    yield from (f"{key} = {toml(value)}" for key, value in entry.value.items())


def _comment(said: str) -> list[str]:
    printable = CONTROL.sub("?", " ".join(said.split()))
    return textwrap.wrap(printable, WIDTH, initial_indent="# ", subsequent_indent="# ")


def toml(value: Any) -> str:
    """Returns a value as TOML writes it in one line."""
    if isinstance(value, dict):
        items = cast(dict[str, Any], value).items()
        return f"{{ {', '.join(f'{_key(str(key))} = {toml(each)}' for key, each in items)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, cast(list[Any], value)))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name)
