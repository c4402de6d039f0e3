"""Configurations as flat keys and values: command lines, shell scripts, YAML and TOML."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hone.importing import shell
from hone.importing.table import UNREAD
from shared.errors import BadRequest

WORDS = {"true": True, "false": False, "null": None, "none": None, "": None}

MAX_BYTES, MAX_VALUES = 1 << 20, 10_000
"""The longest file, and the most values of a YAML file; a configuration is far below both."""

_OVERRIDE = re.compile(r"(?:\+\+|\+|~)?([A-Za-z_][\w.@]*)=(.*)", re.DOTALL)


def of_words(words: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments of a command line: `--name value`, `--name=value`, `--flag`, several
    values, and hydra's `a.b=c`."""
    found: dict[str, Any] = {}
    name: str | None = None
    for word in words:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            found[name] = [value_of(text)] if equals else []
            name = None if equals else name
        elif override := _OVERRIDE.fullmatch(word):
            found[override[1]] = [value_of(override[2])]
            name = None
        elif name is not None:
            found[name].append(value_of(word))
    return {
        key: True if not values else values[0] if len(values) == 1 else values
        for key, values in found.items()
    }


def value_of(text: str) -> Any:
    """Returns the value that a text on a command line stands for."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    if text[:1] in "[{(" and UNREAD not in text:
        return _collection(text)
    return text


def _collection(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError):
        if text[0] != "[":
            return text
        return [value_of(part.strip(" '\"")) for part in text[1:-1].split(",")]


def of_script(text: str, conditional: set[str]) -> list[list[str]]:
    """Returns the commands of a shell script, and adds the variables that a condition sets."""
    try:
        return list(shell.commands(text, conditional))
    except ValueError as error:  # of shlex
        raise BadRequest(f"the script cannot be read as a shell's: {error}") from error


def of_yaml(text: str) -> dict[str, Any]:
    """Returns a YAML file's values by dotted keys."""
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if _count(root) > MAX_VALUES:
            raise BadRequest(f"the YAML's aliases stand for more than {MAX_VALUES} values")
        document = cast(Any, loader).construct_document(root) if root else None
    except (yaml.YAMLError, ValueError) as error:
        raise BadRequest(f"not valid YAML: {error}") from error
    if not isinstance(document, dict):
        raise BadRequest(f"the YAML is {type(document).__name__}, expected keys and values")
    values = dict(flat(cast(dict[str, Any], document)))
    return {name: _resolved(value, values) for name, value in values.items()}


@functools.cache
def _count(node: Any) -> int:
    """Returns how many values a node of YAML stands for, with each alias written out."""
    if isinstance(node, tuple):
        return sum(map(_count, cast(tuple[Any, ...], node)))
    children = getattr(node, "value", None)
    return 1 + sum(map(_count, cast(list[Any], children))) if isinstance(children, list) else 1


def _resolved(value: Any, values: Mapping[str, Any]) -> Any:
    """Returns the value with OmegaConf's `${a.b}` looked up; None, the default, where it calls a
    resolver. YAML 1.1 takes 1e-6 for text."""
    if not isinstance(value, str):
        return value
    if found := re.fullmatch(r"\$\{([\w.]+)\}", value):
        return values.get(found[1])
    return None if "${" in value else value_of(value)


def of_toml(text: str) -> dict[str, Any]:
    """Returns a TOML file's values by dotted keys."""
    try:
        return dict(flat(tomllib.loads(text)))
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"not valid TOML: {error}") from error


def flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields values by dotted keys. Tables in lists stay as they are."""
    for name, value in document.items():
        if isinstance(value, dict) and value:
            yield from flat(cast(dict[str, Any], value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read(path: Path) -> str:
    """Returns a file's text. Raises BadRequest if it cannot be read, or is too long."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise BadRequest(f"{str(path)!r} is longer than {MAX_BYTES} bytes")
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{str(path)!r} cannot be read as text: {error}") from error
