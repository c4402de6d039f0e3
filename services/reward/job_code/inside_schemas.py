"""JSON schemas of tools, from type hints and Google docstrings: the same as
`transformers.utils.get_json_schema` makes, which a sandbox may not have. Standard library only."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_SECTION = re.compile(r"(Args|Returns|Raises):")
_ARGUMENT = re.compile(r"\s*(\w+):\s*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
_NAMES = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
    list: "array",
    tuple: "array",
}


class NoSchema(Exception):
    """A tool has no schema; the message says what it lacks."""


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """Returns the schema of a function or method in OpenAI's shape. Raises NoSchema for a tool
    without docstring, type hints, or descriptions of its arguments."""
    name = getattr(tool, "__name__", "operation")
    text = (inspect.getdoc(tool) or "").strip()
    if not text:
        raise NoSchema(f"{name} has no docstring, which tells the model what it does")
    doc = _Docstring(text)
    try:
        hints = get_type_hints(tool)
    except (NameError, TypeError) as error:
        raise NoSchema(f"the type hints of {name} cannot be read: {error}") from error
    properties: dict[str, Any] = {}
    parameters = _parameters(tool)
    for parameter in parameters.values():
        if parameter.annotation is parameter.empty:
            raise NoSchema(f"argument {parameter.name!r} of {name} has no type hint")
    for argument in (argument for argument in hints if argument != "return"):
        if argument not in doc.arguments:
            raise NoSchema(
                f"the docstring of {name} does not describe its argument {argument!r} under Args:"
            )
        properties[argument] = _typed(hints[argument], name) | _described(doc.arguments[argument])
    needed = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    function: dict[str, Any] = {
        "name": name,
        "description": doc.description,
        "parameters": {"type": "object", "properties": properties}
        | ({"required": needed} if needed else {}),
    }
    if "return" in hints:
        told = {} if doc.returns is None else {"description": doc.returns}
        function["return"] = _typed(hints["return"], name) | told
    return {"type": "function", "function": function}


def _parameters(tool: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the parameters without a leading self or cls that has no type hint."""
    parameters = dict(inspect.signature(tool).parameters)
    first = next(iter(parameters.values()), None)
    if first is not None and first.name in ("self", "cls") and first.annotation is first.empty:
        del parameters[first.name]
    return parameters


class _Docstring:
    """The parts of a Google docstring, each with its blanks at both ends removed; `returns` None:
    it has no such section."""

    def __init__(self, text: str) -> None:
        first = _SECTION.search(text)
        self.description = (text[: first.start()] if first else text).strip()
        block = _section(text, "Args", ("Returns", "Raises"))
        self.arguments = _arguments(block or "")
        self.returns = _section(text, "Returns", ("Raises",))


def _section(text: str, name: str, enders: tuple[str, ...]) -> str | None:
    start = re.search(rf"\n\s*{name}:\n", text)
    if start is None:
        return None
    rest = text[start.end() :]
    end = re.search("|".join(f"{ender}:" for ender in enders), rest)
    return (rest[: end.start()] if end else rest).strip()


def _arguments(block: str) -> dict[str, str]:
    """Returns the description of each argument. A line that does not begin with a name and a colon
    continues with the description before it."""
    told: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in block.splitlines():
        if match := _ARGUMENT.match(line):
            lines = told[match[1]] = [match[2].strip()]
        elif line.strip():
            lines.append(line.strip())
    return {name: " ".join(filter(None, lines)) for name, lines in told.items()}


def _described(text: str) -> dict[str, Any]:
    match = _CHOICES.search(text)
    if match is None:
        return {"description": text}
    try:
        choices = json.loads(match[1])
    except ValueError as error:
        raise NoSchema(f"the choices in {text!r:.200} are not JSON: {error}") from error
    stripped = [choice.strip() if isinstance(choice, str) else choice for choice in choices]
    return {"enum": stripped, "description": text[: match.start()].strip()}


def _typed(hint: Any, tool: str) -> dict[str, Any]:
    kind, inner = get_origin(hint), get_args(hint)
    if kind is None:
        if hint is Any:
            return {}
        return {"type": _NAMES.get(hint, "object") if isinstance(hint, type) else "object"}
    if kind is Union or kind is types.UnionType:
        return _union([_typed(one, tool) for one in inner if one is not type(None)]) | (
            {"nullable": True} if type(None) in inner else {}
        )
    if kind is Literal:
        return _literal(inner, tool)
    if not inner and kind in (list, tuple, dict):  # typing.List and the like
        return {"type": _NAMES.get(kind, "object")}
    if kind is list:
        return {"type": "array", "items": _typed(inner[0], tool)}
    if kind is dict:
        return {"type": "object", "additionalProperties": _typed(inner[1], tool)}
    if kind is tuple and len(inner) > 1 and ... not in inner:
        return {"type": "array", "prefixItems": [_typed(one, tool) for one in inner]}
    raise NoSchema(f"the type hint {hint} of {tool} has no JSON schema; expected list, dict, ...")


def _union(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    if len(schemas) == 1:
        return schemas[0]
    if not all(set(schema) == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        return {"anyOf": schemas}
    names = sorted({schema["type"] for schema in schemas})
    return {"type": names[0] if len(names) == 1 else names}


def _literal(values: tuple[Any, ...], tool: str) -> dict[str, Any]:
    if not all(type(value) in (int, float, str, bool, type(None)) for value in values):
        raise NoSchema(f"Literal{list(values)} of {tool} has values that JSON does not have")
    names = list(dict.fromkeys(_NAMES[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": list(values)}
