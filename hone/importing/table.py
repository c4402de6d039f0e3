"""A trainer's keys as rows: the job's key that each becomes, or why there is none. Below are the
conversions that several trainers share."""

from __future__ import annotations

import ast
import fnmatch
import functools
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from pydantic import BaseModel

from shared.errors import BadRequest
from shared.explain import elide, sections
from shared.job import Job
from shared.job.running import TrackerName

Values = Mapping[str, Any]
"""A configuration: values by dotted key."""

Convert = Callable[[Any, Values], Any]
"""Returns the job's value for a value, given all of the configuration; a tuple for several keys of
the job. None: the job's default."""

UNRESOLVED = re.compile(r"\$[{(]|^\$\w+$|`")
"""A variable or command that a shell or OmegaConf would replace."""
NOT_REPLACED = "the variable was not replaced; write its value"


class NoCounterpart(Exception):
    """A value has no counterpart. Its text is the reason."""


@dataclass(frozen=True)
class FillIn:
    """Stands for a value that the user must give."""

    why: str


@dataclass(frozen=True)
class ConvertedValue:
    """A value of the job, and what differs with just this value."""

    value: Any
    note: str


@dataclass(frozen=True)
class Row:
    """`here`: the job's keys, with commas; "HONE_...": a setting of the stack; "": none, and `why`.
    A value in `neutral` changes nothing."""

    here: str
    convert: Convert
    why: str = ""
    neutral: tuple[Any, ...] = ()


class TrackedConfig(dict[str, Any]):
    """A configuration that records which of its keys a conversion looked up."""

    def __init__(self, values: Values) -> None:
        super().__init__(values)
        self.read = set[str]()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


@dataclass(frozen=True)
class Framework:
    """A trainer's table. `rows` are by its keys; where two become one key of the job, the later
    counts. `ignored` are patterns of keys that change nothing of what is learned. `defaults` are
    the trainer's where they are not the job's. `older` are former names of keys, or beginnings of
    names that end with a dot. `marks` are parts of its command lines."""

    title: str
    rows: Mapping[str, Row]
    ignored: tuple[str, ...]
    defaults: Values
    older: Mapping[str, str]
    marks: tuple[str, ...]

    def current(self, name: str) -> str:
        """Returns the present name of a key."""
        for old, new in self.older.items():
            if name == old or (old.endswith(".") and name.startswith(old)):
                return new + name[len(old) :]
        return name

    def ignores(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored)

    def knows(self, name: str) -> bool:
        name = self.current(name)
        return name in self.rows or name in self.defaults or self.ignores(name)


def framework(
    title: str,
    table: Mapping[Convert | str, str],
    ignored: str,
    defaults: str,
    older: str,
    *marks: str,
) -> Framework:
    """Returns a table. `table` has, by a conversion, words "their.key=our.key", or "=ours,ours";
    by the reason, keys without a counterpart: "their.key", or "their.key=neutral" with values that
    change nothing, by "/". A key "new|old" has a former name; `older` has "old=new" for keys that
    have no row."""
    rows: dict[str, Row] = {}
    former = dict(map(_pair, older.split()))
    for by, text in table.items():
        for names, value in map(_pair, text.split()):
            name, *olds = names.split("|")
            former |= dict.fromkeys(olds, name)
            if isinstance(by, str):
                neutral = tuple(map(value_of, value.split("/"))) if value else ()
                rows[name] = Row("", same, by, neutral)
            else:
                rows[name] = Row(value, by)
    given = parse_words(defaults.split())
    return Framework(title, rows, tuple(ignored.split()), given, former, marks)


def _pair(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value


class UnsupportedKey(BaseModel):
    """A key without a counterpart, and why."""

    name: str
    value: Any
    why: str


@dataclass
class Entry:
    """A value of the job, the keys that it comes from, and what differs."""

    value: Any
    origin: str
    note: str = ""


@dataclass
class Draft:
    """A job that is being made. `fill_in` are keys that the user must give; `lacking` have no
    counterpart, `ignored` need none."""

    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    rewards: list[Entry] = field(default_factory=list[Entry])
    fill_in: dict[str, str] = field(default_factory=dict[str, str])
    lacking: list[UnsupportedKey] = field(default_factory=list[UnsupportedKey])
    ignored: list[str] = field(default_factory=list[str])
    settings: dict[str, Any] = field(default_factory=dict[str, Any])

    def set(self, key: str, value: Any, origin: str, note: str = "") -> None:
        """Sets a key of the job; adds to `rewards`. What TOML cannot say is to be filled
        in."""
        if not _is_toml(value):
            self.fill_in[key] = f"{origin}: {value!r:.80} cannot be converted"
            return
        if key == "rewards":
            several = cast(list[Any], value) if isinstance(value, list) else [value]
            self.rewards += [Entry(each, origin, note) for each in several]
        else:
            self.entries[key] = Entry(value, origin, note)
        self.fill_in.pop(key, None)

    def lacks(self, name: str, value: Any, why: str) -> None:
        self.lacking.append(UnsupportedKey(name=name, value=value, why=why))


def _is_toml(value: Any) -> bool:
    if isinstance(value, dict):
        table = cast(dict[Any, Any], value)
        return all(isinstance(key, str) and _is_toml(table[key]) for key in table)
    if isinstance(value, list | tuple):
        return all(map(_is_toml, cast(list[Any], value)))
    return isinstance(value, str | int | float)


def convert(framework: Framework, given: Values) -> Draft:
    """Returns the job for a configuration, with the trainer's defaults where it has no value.
    Raises BadRequest where two names of one key have different values."""
    own: dict[str, Any] = {}
    for name, value in given.items():
        key = framework.current(name)
        if own.get(key) not in (None, value) and value is not None:
            raise BadRequest(
                f"{name} is {elide(value)}, and {elide(own[key])} by another name of {key}; "
                "expected one value"
            )
        own[key] = own.get(key) if value is None else value
    values, draft = TrackedConfig({**framework.defaults, **own}), Draft()
    for name, row in framework.rows.items():
        if name in values and values[name] is not None:
            _convert_one(row, name, values, draft, is_default=name not in own)
    for name, value in own.items():
        if name in framework.rows or name in values.read or value is None:
            continue
        if framework.ignores(name):
            draft.ignored.append(name)
        else:
            is_teacher = "teacher" in name or name.startswith("distillation.")
            why = TEACHER if is_teacher else f"not in the table of {framework.title}"
            draft.lacks(name, value, why)
    return draft


def _convert_one(row: Row, name: str, values: Values, draft: Draft, *, is_default: bool) -> None:
    value, key = values[name], row.here.partition(",")[0]
    if UNRESOLVED.search(str(value)):
        draft.lacks(name, value, NOT_REPLACED)
        if key and not key.startswith("HONE_"):
            draft.fill_in[key] = f"{name} is {elide(value)}; expected the variable's value"
    elif key.startswith("HONE_"):
        draft.settings[key] = value
    elif not key:
        if value not in row.neutral:
            draft.lacks(name, value, row.why)
    else:
        try:
            found = row.convert(value, values)
        except NoCounterpart as why:
            draft.lacks(name, value, str(why))
        except Exception:
            # the value, or another one that it is converted with, is of another kind than there
            draft.fill_in[key] = (
                f"{name}: {elide(value)} cannot be converted with the values beside it"
            )
        else:
            _set(row, name, found, draft, is_default=is_default)


def _set(row: Row, name: str, found: Any, draft: Draft, *, is_default: bool) -> None:
    several = cast(tuple[Any, ...], found) if isinstance(found, tuple) else (found,)
    for key, value in zip(row.here.split(","), several, strict=False):
        said = value if isinstance(value, ConvertedValue) else ConvertedValue(value, "")
        if isinstance(said.value, FillIn):
            draft.fill_in[key] = f"{name}: {said.value.why}"
        elif said.value not in (None, {}) and not (is_default and said.value == default(key)):
            origin = f"the default of {name}" if is_default else name
            draft.set(key, said.value, origin, said.note)


def default(key: str) -> Any:
    """Returns the job's default of a key such as "training.beta"."""
    section, _, name = key.rpartition(".")
    if not section:
        return Job.model_fields[name].get_default()
    annotation = Job.model_fields[section].annotation
    kinds = getattr(annotation, "__args__", (annotation,))
    owner = next(each for each in sections(Job) if each in kinds)
    return owner.model_fields[name].get_default()


CRITIC = "there is no value model: a completion is compared with its group"
SINGLE_TURN = "more than one completion for a prompt is an [environment]: docs/environments.md"
NO_ENTROPY = "there is no entropy bonus; training.clip_high keeps entropy up"
KL_IN_REWARD = (
    "in the reward there, so that a token answers for the KL of all later tokens too; here in the "
    "loss, for its own alone"
)
KL_OF_TOKENS = "there the KL in the loss is a mean over tokens, here as the loss is"
BATCH_STD = "there the advantages of all tokens are divided, here by the rewards' deviation"
ACCEPTED = 'there the trainer\'s log-probs are over the whole vocabulary too, hence "accept"'
NO_MODEL = "no reward model is hosted; the grader `score_model` asks one"
TEACHER = (
    "a teacher's log-probs of the sampled tokens are a reward here: see [teacher], and "
    "HONE_TEACHER_URL for its server"
)
TRACKERS: tuple[str, ...] = get_args(TrackerName)

NO_SIGNAL = "a group without signal is one whose rewards are all equal"
MOST_REFILLS = 10


def same(value: Any, _: Values) -> Any:
    return value


def loggers(values: Values) -> list[str]:
    """Returns the trackers that verl's `trainer.logger` names."""
    given: Any = values.get("trainer.logger") or []
    listed = (
        cast(list[Any], given) if isinstance(given, list) else str(given).strip("[]").split(",")
    )
    return [str(each).strip(" '\"") for each in listed if each]


def both(value: Any, _: Values) -> Any:
    return value, value


def number(value: Any, _: Values) -> float:
    return float(value)


def pair(value: Any, _: Values) -> Any:
    return tuple(value)


def positive(value: Any, _: Values) -> Any:
    return value if value > 0 else None


def minibatches(sampled: float, trained: float, what: str) -> Any:
    """Returns how many optimizer steps a batch is cut into, if one takes `trained` of `sampled`."""
    count = max(round(sampled / trained), 1)
    if count * trained == sampled or count == 1 == sampled:
        return count
    return ConvertedValue(count, f"{sampled:g} {what} in batches of {trained:g} there")


def token_mean(num_minibatches: Any) -> str:
    """Returns the loss that is a mean over an optimizer step's tokens. With one step per batch
    "dapo" is the same."""
    count = (
        num_minibatches.value if isinstance(num_minibatches, ConvertedValue) else num_minibatches
    )
    return "dapo" if count == 1 else "bnpo"


def one_source(value: Any, _: Values) -> Any:
    """Returns the data set, if it is one."""
    names = [value] if isinstance(value, str) else list(value)
    if len(names) == 1 and "," not in names[0]:
        return names[0]
    return FillIn(f"{value!r} are several; join them in one file, or take evaluation.sets")


def own_reward(path: Any, name: str, signature: str) -> Any:
    """Returns the reward of a file with a function of another signature."""
    if not str(path).endswith(".py"):
        raise NoCounterpart("a reward is a grader or Python code; a grader may ask an endpoint")
    why = f"write it as `reward(completions, **columns)`; there it is {signature}"
    return ConvertedValue({"file": path, "function": name}, why)


def overlong(buffer: Any, max_tokens: Any, penalty: Any) -> Any:
    """Returns the reward that takes DAPO's overlong penalty from long completions."""
    if None in (buffer, max_tokens, penalty):
        return FillIn("the grader `overlong` needs max_tokens, buffer_tokens and penalty")
    sizes = {"max_tokens": int(max_tokens), "buffer_tokens": int(buffer)}
    return {"grader": "overlong", "shaping": True, "params": sizes | {"penalty": float(penalty)}}


def prompt_column(name: Any, _: Values) -> Any:
    """Returns `data.columns` for the column of the prompts."""
    return None if name == "prompt" else {"prompt": name}


def one_of(*names: str, **known: str) -> Convert:
    """Returns the conversion of a value that must be one of these, or of the names there."""
    table = {name: name for name in names} | known

    def convert(value: Any, _: Values) -> Any:
        if value not in [*table]:
            raise NoCounterpart(f"expected one of {', '.join(table)}")
        return table[value]

    return convert


attention = one_of("auto", "eager", "sdpa", "flash_attention_2")
dtype = one_of("bfloat16", "float32", bf16="bfloat16", fp32="float32")


def modules(targets: Any) -> Any:
    """Returns LoRA's targets: a list, or "all-linear"."""
    return [targets] if isinstance(targets, str) and targets != "all-linear" else targets


def accepted(value: Any, _: Values) -> Any:
    """Returns a bound on sampled tokens, such as top_p, and that the trainer does not follow it."""
    value = max(value, 0)
    return value, ConvertedValue("accept", ACCEPTED) if value not in (0, 1) else None


def every(value: Any, _: Values) -> Any:
    """Returns the steps between two evaluations. Less than 1 means never, and has no key."""
    if value < 1:
        raise NoCounterpart("leave data.eval out for no evaluation")
    return value


def only_last(value: Any, _: Values) -> int:
    """Returns the steps between two checkpoints; 0, only the last, for less than 1."""
    return max(int(value), 0)


def warmup_share(value: Any, steps: Any) -> Any:
    """Returns a share of the steps, rounded down as verl does, if their number is known."""
    if not value:
        return None
    why = "here a number of steps, and `hone submit --dry-run` says how many steps the job has"
    return int(value * steps) if steps else FillIn(f"{value:g} of the steps there; {why}")


# --- configurations as values by dotted keys -----------------------------------------------------

MAX_BYTES, MAX_VALUES = 1 << 20, 10_000
"""The longest file, and the most values of a YAML file; a configuration is far below both."""


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


def read_values(path: Path) -> dict[str, Any]:
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
