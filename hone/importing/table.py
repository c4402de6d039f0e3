"""A trainer's keys as rows: the job's key that each becomes, or why there is none."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from pydantic import BaseModel

from shared.explain import sections, shown
from shared.job import Job

Values = Mapping[str, Any]
"""A configuration: values by dotted key, with the trainer's defaults."""

UNREAD = "${?}"
"""Stands in a value for a part that only a shell could know."""

Convert = Callable[[Any, Values], Any]
"""Returns the job's value for a value, given all of the configuration; a tuple for several keys of
the job. None: the job's default."""


class LacksError(Exception):
    """A value has no counterpart. Its text is the reason."""


@dataclass(frozen=True)
class FillIn:
    """Stands for a value that the user must say."""

    why: str


@dataclass(frozen=True)
class Said:
    """A value of the job, and what differs with just this value."""

    value: Any
    note: str


@dataclass(frozen=True)
class Row:
    """`here`: the job's keys, with commas; a setting; or "". `note`: what differs, or why there is
    no key. A value in `neutral` changes nothing, so it needs no counterpart."""

    kind: Literal["key", "setting", "none", "inside"]
    here: str = ""
    note: str = ""
    convert: Convert = lambda value, _: value
    neutral: tuple[Any, ...] = ()


def to(key: str, convert: Convert | None = None, note: str = "") -> Row:
    """Returns the row of a key with a counterpart."""
    return Row("key", key, note, convert or (lambda value, _: value))


def setting(name: str, note: str = "") -> Row:
    """Returns the row of a key that is a setting of the stack here, not of the job."""
    return Row("setting", name, note)


def none(why: str, *neutral: Any) -> Row:
    """Returns the row of a key whose values, neutral ones apart, change a run and cannot be had."""
    return Row("none", "", why, neutral=neutral)


def inside(why: str) -> Row:
    """Returns the row of a key that says how the other trainer works, not what is learned."""
    return Row("inside", "", why)


@dataclass(frozen=True)
class Framework:
    """A trainer's table. `rows` go by dotted keys, or patterns such as `critic.*`; where two become
    one key of the job, the later counts. `defaults` are the trainer's where they are not the job's.
    `aliases` are older names of keys. `marks` are texts by which a command line is recognized."""

    name: str
    title: str
    rows: Mapping[str, Row]
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    marks: tuple[str, ...] = ()

    def row(self, name: str) -> Row | None:
        """Returns the row of a key, else of the first pattern that fits it."""
        if name in self.rows:
            return self.rows[name]
        patterns = (key for key in self.rows if fnmatch.fnmatchcase(name, key))
        return next((self.rows[key] for key in patterns), None)

    def known(self, name: str) -> str:
        """Returns today's name of a key."""
        return self.aliases.get(name, name)


class Lacking(BaseModel):
    """A key without a counterpart, and why."""

    name: str
    value: Any
    why: str


@dataclass
class Entry:
    """A value of the job, the keys that it comes from, and what differs."""

    value: Any
    origin: str
    notes: list[str] = field(default_factory=list[str])


@dataclass
class Draft:
    """A job that is being made."""

    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    rewards: list[Entry] = field(default_factory=list[Entry])
    fill_in: dict[str, str] = field(default_factory=dict[str, str])
    lacking: list[Lacking] = field(default_factory=list[Lacking])
    inside: list[Lacking] = field(default_factory=list[Lacking])
    unknown: dict[str, Any] = field(default_factory=dict[str, Any])
    settings: dict[str, Any] = field(default_factory=dict[str, Any])

    def set(self, key: str, value: Any, origin: str, *notes: str) -> None:
        """Sets a key of the job. `rewards` are added to. What TOML cannot say is to be filled
        in."""
        if _lacks_values(value):
            self.fill_in[key] = f"{origin}: {value!r:.80} cannot be converted"
            return
        said = [note for note in notes if note]
        if key == "rewards":
            several = cast(list[Any], value) if isinstance(value, list) else [value]
            self.rewards += [Entry(each, origin, said) for each in several]
        else:
            self.entries[key] = Entry(value, origin, said)
        self.fill_in.pop(key, None)


def convert(framework: Framework, given: Values) -> Draft:
    """Returns the job for a configuration, whose values that differ from the job's are taken from
    the trainer's defaults where it has none."""
    own = {framework.known(name): value for name, value in given.items()}
    unread = {name for name, value in own.items() if UNREAD in str(value)}
    values = {**framework.defaults, **{key: own[key] for key in own if key not in unread}}
    draft = Draft()
    names = [name for name in framework.rows if name in values]
    for name in (*names, *(name for name in values if name not in framework.rows)):
        if values[name] is not None and name not in unread:
            _convert_one(framework, name, values, draft, is_default=name not in own)
    for name in sorted(unread):
        say_unread(name, framework.row(name), draft)
    return draft


def say_unread(name: str, row: Row | None, draft: Draft) -> None:
    """Says that the value of a key is not known, as a key to be filled in where it has one."""
    why = "the script computes it, or takes it from the environment"
    if row is not None and row.kind == "key":
        draft.fill_in[row.here.partition(",")[0]] = f"{name}: {why}"
    elif row is None or row.kind != "inside":
        draft.lacking.append(Lacking(name=name, value=None, why=why))


def _convert_one(
    framework: Framework, name: str, values: Values, draft: Draft, *, is_default: bool
) -> None:
    row, value = framework.row(name), values[name]
    if row is None:
        draft.unknown[name] = value
    elif row.kind == "setting":
        draft.settings[row.here] = value
    elif row.kind == "inside":
        if not is_default:
            draft.inside.append(Lacking(name=name, value=value, why=row.note))
    elif row.kind == "none":
        if value not in row.neutral:
            draft.lacking.append(Lacking(name=name, value=value, why=row.note))
    else:
        _set(row, name, values, draft, is_default=is_default)


def _set(row: Row, name: str, values: Values, draft: Draft, *, is_default: bool) -> None:
    keys = row.here.split(", ")
    try:
        found = row.convert(values[name], values)
    except LacksError as why:
        draft.lacking.append(Lacking(name=name, value=values[name], why=str(why)))
        return
    except Exception:
        # the value, or another one that it is converted with, is of another kind than there
        draft.fill_in[keys[0]] = (
            f"{name}: {shown(values[name])} cannot be converted with the values beside it"
        )
        return
    several = cast(tuple[Any, ...], found) if isinstance(found, tuple) else (found,)
    for key, value in zip(keys, several, strict=False):
        said = value if isinstance(value, Said) else Said(value, "")
        if isinstance(said.value, FillIn):
            draft.fill_in[key] = f"{name}: {said.value.why}"
        elif said.value in (None, {}) or (is_default and said.value == default(key)):
            continue
        else:
            origin = f"the default of {name}" if is_default else name
            draft.set(key, said.value, origin, row.note, said.note)


def _lacks_values(value: Any) -> bool:
    """Whether a list or table has a None inside, which TOML cannot say."""
    parts: Any = [*cast(dict[str, Any], value).values()] if isinstance(value, dict) else value
    return isinstance(parts, list | tuple) and any(
        part is None or _lacks_values(part) for part in cast(Sequence[Any], parts)
    )


def default(key: str) -> Any:
    """Returns the job's default of a key such as "training.beta"."""
    section, _, name = key.rpartition(".")
    if not section:
        return Job.model_fields[name].get_default()
    annotation = Job.model_fields[section].annotation
    kinds = getattr(annotation, "__args__", (annotation,))
    owner = next(each for each in sections(Job) if each in kinds)
    return owner.model_fields[name].get_default()
