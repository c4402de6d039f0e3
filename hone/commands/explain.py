"""`hone explain`: what a key of a job, a setting or a param of a grader means, its type, bounds and
default. It is read from the models' JSON schema, so OpenAPI says the same."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from hone import reward_service
from hone.shell import Output, OutputOption, command, show
from shared.errors import NotFound
from shared.explain import called_here, closest
from shared.job import Job
from shared.settings import PREFIX, Settings
from shared.wire import GraderInfo

JOB, SETTINGS, GRADERS = "job", "settings", "graders"
"""The arguments that ask for all keys of each."""

TYPES = {"string": "text", "boolean": "true or false", "object": "table"}
FORMATS = {"path": "path", "password": "secret text"}
BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minItems": "at least {} of them",
    "maxLength": "at most {} characters",
    "pattern": "of the form {}",
}

Schema = dict[str, Any]


class Explanation(BaseModel):
    """The explanation of a key. `default` is None if there is none (`required`), or if None is the
    default. `fields` are a section's."""

    key: str
    type: str
    bounds: str
    default: Any
    required: bool
    text: str
    fields: tuple[Explanation, ...] = ()


@command
def explain(
    key: Annotated[
        str,
        typer.Argument(
            help="a key, section, setting or grader: sampling.top_p, sampling, HONE_HOST, math"
        ),
    ] = JOB,
    output: OutputOption = Output.table,
) -> None:
    """Explain a key of a job, a setting or a grader.

    Without a key, all of a job; `settings` for all settings, `graders` for all graders."""
    found = find(key)
    show(output, found, lambda: _shown(found))


def find(key: str) -> Explanation:
    """Returns the explanation of `key`: dotted, or its last part if no other key ends so; positions
    in lists are skipped. Graders are searched after the job's keys and the settings. Raises
    NotFound with the key for which other trainers use this name, else the nearest."""
    known = _all_keys()
    name = ".".join(part for part in key.strip().split(".") if not part.isdecimal())
    if found := known.get(name) or known.get(name.upper()) or known.get(PREFIX + name.upper()):
        return found
    if not (same := _ending(name, known)):
        known = known | {found.key: found for found in _with_fields(_graders())}
        if found := known.get(name):
            return found
        same = _ending(name, known)
    if len(same) == 1:
        return known[same[0]]
    if same:
        raise NotFound(f"several keys are called {name!r}: {', '.join(sorted(same))}")
    ends = {full.rpartition(".")[2]: full for full in known}
    near = closest(name, list(known)) or ends.get(closest(name, list(ends)) or "")
    *section, last = name.split(".")
    hint = called_here(last, Job, tuple(section)) or (
        f"did you mean {near!r}?" if near else "`hone explain` lists the keys of a job"
    )
    raise NotFound(f"no key {key!r}; {hint}")


def _ending(name: str, known: Iterable[str]) -> list[str]:
    return [full for full in known if full.endswith(f".{name}")]


@functools.cache
def _all_keys() -> dict[str, Explanation]:
    """Returns the keys of a job and the settings, and the two as a whole."""
    found: dict[str, Explanation] = {}
    settings = Settings.model_json_schema()
    for name, title, schema in ((JOB, "", Job.model_json_schema()), (SETTINGS, PREFIX, settings)):
        whole = _explanation(name, schema, schema, required=True, prefix=title)
        found |= {each.key: each for each in _with_fields(whole)}
    return found


@functools.cache
def _graders() -> Explanation:
    """Returns the graders of this version of Hone; their params are the fields of each."""
    listed = tuple(map(_grader, reward_service.graders_here()))
    text = "What `grader` of a [[rewards]] can name; their keys are the keys of `params`."
    return Explanation(
        key=GRADERS, type="", bounds="", default=None, required=True, text=text, fields=listed
    )


def _grader(info: GraderInfo) -> Explanation:
    key = f"{GRADERS}.{info.name}"
    found = _explanation(key, info.params, info.params, required=False, prefix=f"{key}.")
    texts = [
        " ".join(info.description.split()),
        found.text if found.fields else "It has no params.",
    ]
    return found.model_copy(update={"type": "grader", "text": "\n".join(texts)})


def _with_fields(found: Explanation) -> Iterator[Explanation]:
    yield found
    for field in found.fields:
        yield from _with_fields(field)


def _explanation(
    key: str, schema: Schema, root: Schema, *, required: bool, prefix: str
) -> Explanation:
    """Returns the explanation of a schema within `root`. `prefix` begins the keys of its fields."""
    inner = _without_null(schema)
    section = _section(inner, root)
    fields: tuple[Explanation, ...] = ()
    if section is not None:
        fields = tuple(
            _explanation(
                f"{prefix}{name.upper() if prefix == PREFIX else name}",
                field,
                root,
                required=name in section.get("required", ()),
                prefix=f"{prefix}{name}.",
            )
            for name, field in section["properties"].items()
        )
    texts = [schema.get("description"), section.get("description") if section else None]
    return Explanation(
        key=key,
        type=_type(inner, root),
        bounds=", ".join(
            text.format(inner[name]) for name, text in BOUNDS.items() if name in inner
        ),
        default=None if section else schema.get("default"),
        required=required,
        text="\n".join(dict.fromkeys(" ".join(text.split()) for text in texts if text)),
        fields=fields,
    )


def _without_null(schema: Schema) -> Schema:
    """Returns the schema without null."""
    branches = [branch for branch in schema.get("anyOf", ()) if branch.get("type") != "null"]
    return branches[0] if len(branches) == 1 else schema


def _section(schema: Schema, root: Schema) -> Schema | None:
    """Returns the schema of the section if a value is one, or a list of sections; else None."""
    target = _target(schema.get("items") or schema, root)
    return target if "properties" in target else None


def _target(schema: Schema, root: Schema) -> Schema:
    reference = schema.get("$ref")
    return root["$defs"][reference.rpartition("/")[2]] if reference else schema


def _type(schema: Schema, root: Schema) -> str:
    target = _target(schema, root)
    if "properties" in target:
        return "section"
    if branches := [branch for branch in target.get("anyOf", ()) if branch.get("type") != "null"]:
        return " or ".join(_type(branch, root) for branch in branches)
    if choices := target.get("enum") or ([target["const"]] if "const" in target else []):
        return " or ".join(json.dumps(choice) for choice in choices)
    if target.get("type") == "array":
        inner = _type(target.get("items") or target.get("prefixItems", [{}])[0], root)
        return "list of sections" if inner == "section" else f"list of {inner}"
    kind = str(target.get("type", "any value"))
    return FORMATS.get(str(target.get("format"))) or TYPES.get(kind, kind)


def _shown(found: Explanation) -> Group:
    lines = [_entry(found)] if found.key not in (JOB, SETTINGS, GRADERS) else []
    return Group(*lines, *map(_entry, found.fields))


def _entry(found: Explanation) -> Group:
    facts = [found.type, found.bounds, "required" if found.required else _default(found)]
    heading = Text.assemble((found.key, "bold"), "  ", "; ".join(fact for fact in facts if fact))
    return Group(heading, Padding(Text(found.text), (0, 0, 1, 4), expand=False))


def _default(found: Explanation) -> str:
    if found.type in ("section", "list of sections", "grader"):
        return ""
    return f"default {'none' if found.default is None else json.dumps(found.default)}"
