"""A trainer's keys as rows: the job's key that each becomes, or why there is none. Below are the
conversions that several trainers share, and the reading of files and arguments."""

from __future__ import annotations

import contextlib
import fnmatch
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tomli_w
import yaml
from pydantic import BaseModel, computed_field

from shared.errors import BadRequest
from shared.explain import elide

Values = Mapping[str, Any]
"""A configuration: values by dotted key."""

Convert = Callable[[Any, Values], Any]
"""Returns the job's value for a value, given all of the configuration; several for several keys of
the job. None: the job's default."""

UNRESOLVED = re.compile(r"\$[{(A-Za-z_]|`")
"""A variable or command that a shell or OmegaConf would replace."""
NOT_REPLACED = "the variable was not replaced; write its value"


class NoCounterpart(Exception):
    """A value has no counterpart. Its text is the reason."""


def same(value: Any, _: Values) -> Any:
    return value


@dataclass(frozen=True)
class Row:
    """What becomes of a key. `here`: the job's keys, with commas; `note`: what differs there. If
    `here` is "" there is none, and `note` says why; a value in `neutral` changes nothing."""

    here: str
    convert: Convert = same
    note: str = ""
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Framework:
    """A trainer's table. `rows` are by its keys; where two become one key of the job, the later
    counts. `ignored` are patterns of keys that change nothing of what is learned. `defaults` are
    the trainer's where they are not the job's, and of keys that others are converted with. `older`
    has the present names by former ones. `others` are names that another translation has."""

    title: str
    rows: dict[str, Row]
    ignored: list[str]
    defaults: dict[str, Any]
    older: dict[str, str]
    others: frozenset[str] = frozenset()

    def ignores(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored)

    def knows(self, name: str) -> bool:
        name = self.older.get(name, name)
        tables = (self.rows, self.defaults, self.others)
        return any(name in table for table in tables) or self.ignores(name)


def framework(
    title: str,
    *,
    unchanged: str,
    converted: Mapping[str, Row],
    missing: Mapping[str, str],
    ignored: str,
    defaults: str,
    older: str = "",
    others: frozenset[str] = frozenset(),
) -> Framework:
    """Returns a table. `unchanged` has words "their.key=our.key". `missing` has, by the reason,
    keys without a counterpart: "their.key", or "their.key=neutral" with values that change nothing,
    by "/". A key "new|old" has a former name; `older` has "old=new" for keys without a row."""
    rows = {name: Row(here) for name, here in _pairs(unchanged)} | dict(converted)
    for why, words in missing.items():
        for name, values in _pairs(words):
            neutral = tuple(map(value_of, values.split("/"))) if values else ()
            rows[name] = Row("", note=why, neutral=neutral)
    names = {name: name.split("|") for name in rows}
    former = {old: new for new, *olds in names.values() for old in olds} | dict(_pairs(older))
    present = {names[name][0]: row for name, row in rows.items()}
    given = parse_words(defaults.split())
    return Framework(title, present, ignored.split(), given, former, others)


def _pairs(words: str) -> Iterator[tuple[str, str]]:
    for word in words.split():
        key, _, value = word.partition("=")
        yield key, value


# --- from a configuration to a job ---------------------------------------------------------------


class ImportedJob(BaseModel):
    """A job of another trainer's configuration, by its keys. `origins`: their names there, and what
    differs. `lacking` has by its name there what has no counterpart, and why; `ignored` keys need
    none."""

    framework: str
    keys: dict[str, Any] = {}
    origins: dict[str, str] = {}
    lacking: dict[str, str] = {}
    ignored: list[str] = []

    def set(self, key: str, value: Any, origin: str) -> None:
        """Sets a key of the job. What TOML cannot say has no counterpart."""
        try:
            tomli_w.dumps({key: value})
        except TypeError:
            self.lacks(origin, value, f"it cannot be written as {key}")
        else:
            self.keys[key] = value
            self.origins[key] = origin

    def lacks(self, name: str, value: Any, why: str) -> None:
        self.lacking[name] = f"{elide(value)}: {why}"

    @computed_field
    @property
    def fill_in(self) -> dict[str, str]:
        """The keys that the user must give, and what they are."""
        given = {*self.keys, *(["steps"] if "data.epochs" in self.keys else [])}
        return {key: why for key, why in REQUIRED.items() if key not in given}

    @computed_field
    @property
    def job(self) -> dict[str, Any]:
        """The job as a document."""
        document: dict[str, Any] = {}
        for key, value in self.keys.items():
            section, dot, name = key.partition(".")
            (document.setdefault(section, {}) if dot else document)[name or key] = value
        return document

    @computed_field
    @property
    def toml(self) -> str:
        """The job as a file. Comments before it say what must be filled in, what was not
        translated, and for each key the name that it had, and what differs."""
        lines = [f"From {self.framework}, by `hone import`."]
        lines += [f"fill in {key}: {why}" for key, why in self.fill_in.items()]
        lines += [f"not translated: {name} = {why}" for name, why in self.lacking.items()]
        lines += [f"{key}: {self.origins[key]}" for key in self.keys]
        wrapper = textwrap.TextWrapper(100, initial_indent="# ", subsequent_indent="#   ")
        comments = [wrapper.fill(re.sub(r"[\x00-\x1f\x7f]", "?", line)) for line in lines]
        return "\n".join(comments) + f"\n\n{tomli_w.dumps(self.job)}"


REQUIRED = {
    "model": "a folder or a Hugging Face id",
    "data.train": "a file or a Hugging Face dataset",
    "steps": "or data.epochs",
    "rewards": "`hone explain graders`, or a function of your own: docs/rewards.md",
}
"""Keys that every job needs, and what to write."""


def convert(framework: Framework, given: Values) -> ImportedJob:
    """Returns the job for a configuration, with the trainer's defaults where it has no value."""
    own, job = dict[str, Any](), ImportedJob(framework=framework.title)
    for name, value in given.items():
        key = framework.older.get(name, name)
        if value is not None and own.setdefault(key, value) != value:
            job.lacks(name, value, f"another name of {key} is {elide(own[key])}")
    values = framework.defaults | own
    for name, row in framework.rows.items():
        if values.get(name) is not None:
            origin = name if name in own else f"the default of {name}"
            _convert_one(row, name, values, job, origin)
    known = {*framework.rows, *framework.defaults, *framework.others}
    for name in [name for name in own if name not in known]:
        if framework.ignores(name):
            job.ignored.append(name)
        else:
            job.lacks(name, own[name], f"not in the table of {framework.title}")
    return job


def _convert_one(row: Row, name: str, values: Values, job: ImportedJob, origin: str) -> None:
    value = values[name]
    if UNRESOLVED.search(str(value)):
        job.lacks(origin, value, NOT_REPLACED)
    elif not row.here:
        if value not in row.neutral:
            job.lacks(origin, value, row.note)
    else:
        try:
            found = row.convert(value, values)
            several = [*found] if "," in row.here and found is not None else [found]
        except NoCounterpart as why:
            job.lacks(origin, value, str(why))
        except Exception:
            # the value, or another one that it is converted with, is of another kind than there
            job.lacks(origin, value, "it cannot be converted with the values beside it")
        else:
            keys = row.here.split(",")
            for key, each in zip(keys, several, strict=False):
                if each is not None:
                    job.set(key, each, origin)
            if row.note and keys[0] in job.keys:
                job.origins[keys[0]] += f"; {row.note}"


# --- conversions and reasons that trainers share -------------------------------------------------

CRITIC = "there is no value model: a completion is compared with its group"
SINGLE_TURN = "more than one completion for a prompt is an [environment]: docs/environments.md"
NO_ENTROPY = "there is no entropy bonus; training.clip_high keeps entropy up"
NO_MODEL = "no reward model is hosted; the grader `score_model` asks one"
OVERLONG = "set the grader `overlong`, with max_tokens, buffer_tokens and penalty: docs/graders.md"
OWN_REWARD = "write it as `reward(completions, **columns)`, or set a grader: docs/rewards.md"
OF_STACK = "settings of the stack: HONE_TENSOR_PARALLEL_SIZE and HONE_GPU_MEMORY_UTILIZATION"
NO_RESERVE = "a completion may take what its prompt leaves there, here sampling.max_tokens"
KL_IN_REWARD = "there a token answers for the KL of later tokens too; training.beta is in the loss"
REFILLS = {True: 10, False: 0}
"""Of a switch for sampling until every group has a signal: the most refills that a job can have."""


def plus(key: str) -> Convert:
    """Returns the conversion to the sum with another key."""
    return lambda value, values: value + values[key]


def where(key: str, convert: Convert = same) -> Convert:
    """Returns the conversion of a value that counts only where another key is set."""
    return lambda value, values: convert(value, values) if values.get(key) else None


def one_of(known: Mapping[Any, Any]) -> Convert:
    """Returns the conversion of a value by a table."""

    def convert(value: Any, _: Values) -> Any:
        if value not in [*known]:  # a list has no hash
            raise NoCounterpart(f"expected one of {', '.join(map(str, known))}")
        return known[value]

    return convert


def num_batches(sampled: float, trained: float) -> int:
    """Returns how many batches of `trained` a step's `sampled` are cut into."""
    if trained < sampled and sampled % trained:
        raise NoCounterpart(f"a step of {sampled:g} cannot be cut into equal batches of it")
    return max(int(sampled // trained), 1)


def one_source(value: Any, _: Values) -> Any:
    """Returns the data set, if it is one."""
    names = [value] if isinstance(value, str) else list(value)
    if len(names) > 1 or "," in names[0]:
        raise NoCounterpart("a job has one data set: join them in one file, or set evaluation.sets")
    return names[0]


def every(value: Any, _: Values) -> Any:
    """Returns the steps between two evaluations. Less than 1 means never, and has no key."""
    if value < 1:
        raise NoCounterpart("leave data.eval out for no evaluation")
    return value


# --- configurations as values by dotted keys -----------------------------------------------------


def parse_words(words: Sequence[str]) -> dict[str, Any]:
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
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(text)
    with contextlib.suppress(yaml.YAMLError):  # then it is text that begins with a bracket
        return yaml.safe_load(text) if text[0] in "[{" else text
    return text


def read_values(path: Path) -> dict[str, Any]:
    """Returns the values of a YAML, TOML or JSON file by dotted keys."""
    if path.suffix not in (".yaml", ".yml", ".toml", ".json"):
        raise BadRequest(
            f"{str(path)!r} is not a .yaml, .toml or .json file: write the trainer's command after "
            "--, its variables replaced, as in `hone import -- trl grpo --learning_rate 1e-6`; a "
            "Python script of TRL's runs with hone.Trainer (docs/trainer.md)"
        )
    try:
        text = path.read_text("utf-8-sig")
        document = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BadRequest(f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise BadRequest(f"{str(path)!r} is {type(document).__name__}, expected keys and values")
    values = dict(flat(cast(dict[str, Any], document)))
    if path.suffix == ".toml":
        return values  # YAML 1.1 takes 1e-6 for text
    return {key: value_of(each) if isinstance(each, str) else each for key, each in values.items()}


WHOLE = (
    *("apply_chat_template_kwargs", "chat_template_kwargs", "lr_scheduler_kwargs", "columns"),
    *("generation_kwargs", "model_init_kwargs", "template_args"),
)
"""Keys whose values are tables."""


def flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields values by dotted keys. Tables in lists are unchanged."""
    for name, value in document.items():
        if isinstance(value, dict) and value and name not in WHOLE:
            yield from flat(cast(dict[str, Any], value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
