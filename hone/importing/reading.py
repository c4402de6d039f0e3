"""Configurations as values by dotted keys: command lines, YAML, TOML and JSON."""

from __future__ import annotations

import ast
import functools
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from shared.errors import BadRequest

MAX_BYTES, MAX_VALUES = 1 << 20, 10_000
"""The longest file, and the most values of a YAML file; a configuration is far below both."""


def of_words(words: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments of a command line: `--name value`, `--name=value`, `--flag`, several
    values, and hydra's `a.b=c`."""
    found: dict[str, list[Any]] = {}
    name: str | None = None
    for word in words:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            found[name] = [value_of(text)] if equals else []
            name = None if equals else name
        elif override := re.fullmatch(r"(?:\+\+|\+|~)?([A-Za-z_][\w.@]*)=(.*)", word, re.DOTALL):
            found[override[1]] = [value_of(override[2])]
            name = None
        elif name is not None:
            found[name].append(value_of(word))
    single = {key: values[0] if len(values) == 1 else values for key, values in found.items()}
    return dict(flat({key: True if value == [] else value for key, value in single.items()}))


def value_of(text: str) -> Any:
    """Returns the value that a text on a command line stands for."""
    words = {"true": True, "false": False, "null": None, "none": None, "": None}
    if text.lower() in words:
        return words[text.lower()]
    for read in (int, float, ast.literal_eval if text[:1] in ("[", "{", "(") else int):
        try:
            return read(text)
        except (ValueError, TypeError, SyntaxError):
            pass
    parts = [part.strip(" '\"") for part in text[1:-1].split(",")]
    if text[:1] == "[" and text[-1:] == "]":
        return [value_of(part) for part in parts]
    if text[:1] == "{" and text[-1:] == "}" and all(part.count(":") == 1 for part in parts):
        pairs = (part.split(":") for part in parts)  # hydra's {a:1,b:c}
        return {key.strip(): value_of(value.strip()) for key, value in pairs}
    return text


def of_file(path: Path) -> dict[str, Any]:
    """Returns the values of a YAML, TOML or JSON file by dotted keys."""
    if path.suffix == ".py":
        raise BadRequest(
            f"{str(path)!r} is a script, and only {', '.join(READERS)} files are read: write the "
            "arguments of its GRPOConfig after --, as in `hone import -- trl grpo --learning_rate "
            "1e-6`, or run it with `from hone import Trainer as GRPOTrainer` (docs/trainer.md)"
        )
    if path.suffix not in READERS:
        raise BadRequest(
            f"{str(path)!r} is not one of the {', '.join(READERS)} files that are read: write the "
            "command that starts the trainer after --, its variables replaced, as in `hone import "
            "-- python3 -m verl.trainer.main_ppo data.train_batch_size=256`"
        )
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise BadRequest(f"{str(path)!r} is longer than {MAX_BYTES} bytes")
        document = READERS[path.suffix](content.decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{str(path)!r} cannot be read as text: {error}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise BadRequest(f"{str(path)!r} is not valid {path.suffix[1:]}: {error}") from error
    if not isinstance(document, dict):
        raise BadRequest(f"{str(path)!r} is {type(document).__name__}, expected keys and values")
    values = dict(flat(cast(dict[str, Any], document)))
    if path.suffix == ".toml":
        return values  # YAML 1.1 takes 1e-6 for text
    return {key: value_of(each) if isinstance(each, str) else each for key, each in values.items()}


def _of_yaml(text: str) -> Any:
    loader = yaml.SafeLoader(text)
    root = loader.get_single_node()
    if _count(root) > MAX_VALUES:
        raise BadRequest(f"the YAML's aliases stand for more than {MAX_VALUES} values")
    return cast(Any, loader).construct_document(root) if root else None


@functools.cache
def _count(node: Any) -> int:
    """Returns how many values a node of YAML stands for, with each alias written out."""
    if isinstance(node, tuple):
        return sum(map(_count, cast(tuple[Any, ...], node)))
    children = getattr(node, "value", None)
    return 1 + sum(map(_count, cast(list[Any], children))) if isinstance(children, list) else 1


READERS: dict[str, Callable[[str], Any]] = {
    ".yaml": _of_yaml,
    ".yml": _of_yaml,
    ".toml": tomllib.loads,
    ".json": json.loads,
}


def flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields values by dotted keys. Tables in lists are unchanged."""
    for name, value in document.items():
        if isinstance(value, dict) and value and name not in WHOLE:
            yield from flat(cast(dict[str, Any], value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


WHOLE = (
    *("apply_chat_template_kwargs", "chat_template_kwargs", "lr_scheduler_kwargs", "columns"),
    *("model_init_kwargs", "generation_kwargs", "template_args"),
)
"""Keys whose values are tables."""
