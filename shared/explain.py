"""Turns pydantic's validation errors into sentences: the value, what was expected, where, and the
nearest valid key."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from itertools import islice
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, RootModel, ValidationError
from pydantic.fields import FieldInfo

from shared.http.urls import without_password

MAX_FAULTS = 20
"""Most faults listed for one body."""

MAX_READ_FAULTS = 20_000
"""Beyond it no fault is listed: pydantic would build the list of all, 2 microseconds each."""

MAX_SHOWN_CHARS = 80

UNITS = {"s": "seconds", "mib": "MiB", "gib": "GiB"}
"""The unit of a number, by the last part of its key."""

JOB_NAME = r"^[a-z0-9][a-z0-9_-]{0,62}$"
"""Ids and names of jobs end up in paths and URLs, so they are made of these characters only."""

JOB_NAME_RULE = "expected 1 to 63 of a-z, 0-9, _ and -, beginning with a letter or a digit"

NO_NUMBER = ("float_parsing", "float_type", "int_parsing", "int_type")
"""pydantic's error types for a value that is no number."""


def nearest(name: str, valid: Sequence[str], what: str = "valid keys") -> str:
    """Returns `did you mean 'x'?` for a near miss, else the list of what is valid."""
    close = closest(name, valid)
    if not valid:
        return f"there are no {what}"
    return f"did you mean {close!r}?" if close else f"{what} are {', '.join(sorted(valid))}"


def closest(name: str, valid: Sequence[str]) -> str | None:
    """Returns the name in `valid` that `name` probably misspells or abbreviates by its initials."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    short = [key for key in valid if "_" in key and _initials(key) == name]
    return next(iter(close + short), None)


def _initials(key: str) -> str:
    return "".join(part[:1] for part in key.split("_"))


def sentences(
    error: ValidationError, model: type[BaseModel], where: str = ""
) -> list[dict[str, str]]:
    """Returns one `{pointer, detail}` for each of the first `MAX_FAULTS` faults, and a last entry
    that says how many more there are. `where` opens each sentence, for example a file's name."""
    count = error.error_count()
    if count > MAX_READ_FAULTS:
        return [_more(f"{count} faults, too many to list (at most {MAX_READ_FAULTS})")]
    faults = [dict(fault) for fault in error.errors(include_url=False)]
    told = (fault for fault in faults if not _follows(fault, faults))
    listed = [_explain(fault, model, where) for fault in islice(told, MAX_FAULTS)]
    left = count - len(listed)
    return (
        [*listed, _more(f"and {left} more faults")] if len(listed) == MAX_FAULTS < count else listed
    )


def _more(detail: str) -> dict[str, str]:
    return {"pointer": "", "detail": detail}


def _follows(fault: dict[str, Any], faults: Sequence[dict[str, Any]]) -> bool:
    """Whether a list is too short only because pydantic leaves out its items that have faults."""
    loc = fault["loc"]
    return fault["type"] == "too_short" and any(
        other["loc"][: len(loc)] == loc for other in faults if other is not fault
    )


def _explain(fault: dict[str, Any], model: type[BaseModel], where: str) -> dict[str, str]:
    path, _ = _followed(model, fault["loc"])
    context = fault.get("ctx", {})
    if fault["type"] in ("union_tag_invalid", "union_tag_not_found"):
        path.append(context["discriminator"].strip("'"))
    key = ".".join(str(part)[:MAX_SHOWN_CHARS] for part in path)
    if fault["type"] == "extra_forbidden":
        _, parent = _followed(model, fault["loc"][:-1])
        owner = _model_in(parent)
        name = str(path[-1])[:MAX_SHOWN_CHARS]
        here = nearest(name, list(owner.model_fields)) if owner else ""
        at = fault["loc"][:-1]
        hint = _others(name, model, at) or _elsewhere(name, model, at)
        hint = hint or called_here(name, model, at) or here
        detail = f"unknown key {key!r}" + (f"; {hint}" if hint else "")
    elif fault["type"] == "union_tag_not_found":
        detail = f"{key!r} is missing; it says which kind this is"
    elif fault["type"] == "union_tag_invalid":
        detail = f"{key!r}: got {context['tag']!r}; expected one of {context['expected_tags']}"
    else:
        detail = refusal_message(key, fault)
    start = f"{where}: " if where else ""
    return {
        "pointer": "/" + "/".join(str(part)[:MAX_SHOWN_CHARS] for part in path),
        "detail": start + detail,
    }


def _others(name: str, model: type[BaseModel], at: tuple[int | str, ...]) -> str | None:
    """Returns how a configuration with a section `name` of another trainer becomes a job."""
    owner = None if at else getattr(model, "name_owners", {}).get(name)
    return f"that is a section of {owner}: `hone import FILE` makes a job of it" if owner else None


def _elsewhere(name: str, model: type[BaseModel], at: tuple[int | str, ...]) -> str | None:
    """Returns where else the body has a key of this name: in the innermost part around `at` that
    has one, beside its sections or inside them."""
    for depth in range(len(at), -1, -1):
        path, annotation = _followed(model, at[:depth])
        keys = _fields(annotation)
        start = "".join(f"{part}." for part in path)
        if name in keys:
            return f"did you mean {start + name!r}, which is in no section?"
        owners = {key: _fields(field.annotation) for key, field in keys.items()}
        found = [f"{start}{key}.{name}" for key, names in owners.items() if name in names]
        if found:
            return f"did you mean {' or '.join(map(repr, found))}?"
    return None


def called_here(name: str, model: type[BaseModel], at: tuple[int | str, ...]) -> str | None:
    """Returns the key for which other trainers use `name`, by the `other_names` of a model around
    `at`. Its `name_notes` are added."""
    for depth in range(len(at) + 1):
        path, annotation = _followed(model, at[:depth])
        around = _model_in(annotation)
        if key := getattr(around, "other_names", {}).get(name):
            here = "".join(f"{part}." for part in path) + key
            note = getattr(around, "name_notes", {}).get(name)
            return f"here it is {here!r}" + (f": {note}" if note else "")
    return None


def _fields(annotation: Any) -> Mapping[str, FieldInfo]:
    """Returns the keys of a section; none for a value that need not be a section."""
    kinds = _kinds(annotation)
    kind = kinds[0] if len(kinds) == 1 else None
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind.model_fields
    return {}


def refusal_message(key: str, fault: dict[str, Any]) -> str:
    """Returns the message for a value that pydantic refused: what it was and what was expected."""
    if fault["type"] == "missing":
        return f"{key!r} is missing and has no default"
    message = _expected(fault) or fault["msg"].removeprefix("Value error, ")
    if not key:
        return message
    unit = UNITS.get(key.lower().rpartition("_")[2])
    message += f"; expected {unit}" if unit and fault["type"] in NO_NUMBER else ""
    return f"{key!r}: got {elide(fault.get('input'))}; {message[0].lower() + message[1:]}"


def elide(value: Any) -> str:
    """Returns the beginning of `repr(value)`. The whole text of a large value is never made."""
    text = _SHORT.repr(value[:MAX_SHOWN_CHARS] if isinstance(value, bytes) else value)
    text = without_password(text)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = 20
        self.maxstring = self.maxlong = self.maxother = 5 * MAX_SHOWN_CHARS


_SHORT = _Short()


def _expected(fault: dict[str, Any]) -> str | None:
    """Returns what was expected, where pydantic would name a type of Python."""
    match fault["type"]:
        case "tuple_type" | "list_type":
            return "expected a list"
        case "model_type" | "dict_type":
            return "expected a table (in JSON, an object)"
        case "string_pattern_mismatch" if fault["ctx"]["pattern"] == JOB_NAME:
            return JOB_NAME_RULE
        case "too_short":
            return f"expected at least {fault['ctx']['min_length']} in the list"
        case "too_long":
            most, length = fault["ctx"]["max_length"], fault["ctx"]["actual_length"] or "more"
            if fault["ctx"]["field_type"] == "Dictionary":
                return f"expected at most {most} keys"
            return f"expected at most {most} in the list, not {length}"
        case _:
            return None


def _followed(model: Any, loc: tuple[int | str, ...]) -> tuple[list[int | str], Any]:
    """Returns the path into the body for pydantic's `loc`, and the type there (None inside free
    data). `loc` itself also names which type of a union was tried."""
    path: list[int | str] = []
    annotation = model
    for part in loc:
        kinds = _kinds(annotation)
        if isinstance(part, str) and len(kinds) > 1:
            annotation = next((kind for kind in kinds if _is_called(kind, part)), None)
            continue
        path.append(part)
        annotation = _part_of(kinds[0], part) if kinds else None
    return path, annotation


def _kinds(annotation: Any) -> list[Any]:
    """Returns the types that a value may have, without None."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    if isinstance(annotation, type) and issubclass(annotation, RootModel):
        return _kinds(annotation.model_fields["root"].annotation)
    return [] if annotation in (None, type(None)) else [annotation]


def _part_of(kind: Any, part: int | str) -> Any:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = kind.model_fields.get(str(part))
        return field.annotation if field else None
    arguments = get_args(kind)
    if not arguments:
        return None
    return arguments[1] if get_origin(kind) is dict else arguments[0]


def _is_called(kind: Any, name: str) -> bool:
    """Whether pydantic calls the type `name`: by its class, or by its discriminator's value."""
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return False
    literals = [f.annotation for f in kind.model_fields.values()]
    return kind.__name__ == name or any(
        get_origin(literal) is Literal and name in get_args(literal) for literal in literals
    )


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    """Returns `model` and every model in its fields, at any depth, each once."""
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
