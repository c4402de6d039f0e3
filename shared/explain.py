"""Turns pydantic's validation errors into sentences: the value, what was expected, where, and the
nearest valid key."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def nearest(name: str, valid: Sequence[str], what: str = "valid keys") -> str:
    """Returns `did you mean 'x'?` for a near miss, else the list of what is valid."""
    close = closest(name, valid)
    return f"did you mean {close!r}?" if close else f"{what} are {', '.join(sorted(valid))}"


def closest(name: str, valid: Sequence[str]) -> str | None:
    """Returns the one of `valid` that `name` is probably a misspelling of."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return close[0] if close else None


def sentences(
    error: ValidationError, model: type[BaseModel], where: str = ""
) -> list[dict[str, str]]:
    """Returns one `{pointer, detail}` for each fault. `where` opens each sentence, for example a
    file's name."""
    return [_explain(dict(fault), model, where) for fault in error.errors(include_url=False)]


def _explain(fault: dict[str, Any], model: type[BaseModel], where: str) -> dict[str, str]:
    loc: tuple[Any, ...] = tuple(fault["loc"])
    key = ".".join(str(part) for part in loc)
    start = f"{where}: " if where else ""
    if fault["type"] == "extra_forbidden":
        owner = _model_at(model, loc[:-1])
        hint = f"; {nearest(str(loc[-1]), list(owner.model_fields))}" if owner else ""
        detail = f"{start}unknown key {key!r}{hint}"
    elif fault["type"] == "missing":
        detail = f"{start}{key!r} is missing and has no default"
    else:
        message = fault["msg"].removeprefix("Value error, ")
        value = fault.get("input")
        shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
        detail = (
            f"{start}{key!r}: got {shown}; {message[0].lower() + message[1:]}"
            if key
            else f"{start}{message}"
        )
    return {"pointer": "/" + "/".join(str(part) for part in loc), "detail": detail}


def _model_at(model: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel] | None:
    """Returns the model class that the path `loc` leads to, or None where it leads into free
    data."""
    current: type[BaseModel] | None = model
    for part in loc:
        if isinstance(part, int) or current is None:
            continue
        field = current.model_fields.get(str(part))
        current = _model_in(field.annotation) if field else None
    return current


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    """Returns `model` and every model that its fields lead to, each once."""
    found, queue = list[type[BaseModel]](), [model]
    while queue:
        current = queue.pop(0)
        if current not in found:
            found.append(current)
            fields = current.model_fields.values()
            queue += [part for field in fields if (part := _model_in(field.annotation))]
    return found


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        if found := _model_in(argument):
            return found
    return None
