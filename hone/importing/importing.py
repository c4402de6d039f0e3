"""From a file or arguments to a job and what has no counterpart. READ FIRST."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hone.importing import reading, scripts, trl, writing
from hone.importing.openrlhf import OPENRLHF
from hone.importing.prime_rl import PRIME_RL
from hone.importing.table import UNREAD, Draft, Framework, Lacking, convert
from hone.importing.verl import VERL
from shared.errors import BadRequest
from shared.job import name_of
from shared.job.file import parse_job

FRAMEWORKS: Mapping[str, Framework] = {
    framework.name: framework for framework in (trl.TRL, OPENRLHF, VERL, PRIME_RL)
}

MISSING = {
    "model": "a folder or a Hugging Face id",
    "data.train": "a file or a Hugging Face dataset",
    "rewards": "`hone explain graders`, or a function of your own: docs/rewards.md",
    "steps": "or data.epochs",
}
"""Keys that every job needs."""

PLACEHOLDERS: dict[str, Any] = {
    "model": "any/model",
    "data.train": "any/data",
    "steps": 1,
    "rewards": [{"grader": "length", "params": {"max": 1}}],
}


class Imported(BaseModel):
    """A job made of another trainer's configuration. `fill_in` are keys that the user must say,
    `faults` what else keeps the job from being accepted, `settings` are the stack's. `lacking` has
    no counterpart, `inside` needs none, and `unknown` is not in the table. `conditional` are
    variables of the shell script that a condition sets anew: the value before it was taken."""

    framework: str
    toml: str
    job: dict[str, Any]
    fill_in: dict[str, str]
    faults: tuple[str, ...]
    settings: dict[str, Any]
    lacking: tuple[Lacking, ...]
    inside: tuple[Lacking, ...]
    unknown: dict[str, Any]
    conditional: tuple[str, ...]


def imported(
    source: Sequence[str], name: str | None = None, processes: int | None = None
) -> Imported:
    """Returns the job for a file or a command line; `name` is the trainer's, else it is recognized.
    `processes` multiply TRL's batches. Raises BadRequest for what cannot be read."""
    try:
        found = _imported(source, name, processes)
        found.toml.encode()
    except (RecursionError, MemoryError) as error:  # of nested lists or of their parser
        raise BadRequest(f"{source[0]!r:.200} is nested too deeply, or refers to itself") from error
    except UnicodeEncodeError as error:
        raise BadRequest(f"{source[0]!r:.200} has text that is no Unicode: {error}") from error
    return found


def _imported(source: Sequence[str], name: str | None, processes: int | None) -> Imported:
    conditional: set[str] = set()
    framework, given = _read(source, name, conditional)
    if processes is not None:
        given["num_processes"] = processes
    draft = trl.translated(given) if framework is trl.TRL else convert(framework, given)
    _complete(draft)
    document, faults = _checked(draft)
    return Imported(
        framework=framework.name,
        toml=writing.text(draft, framework.title),
        job=document,
        fill_in=draft.fill_in,
        faults=tuple(faults),
        settings=draft.settings,
        lacking=tuple(draft.lacking),
        inside=tuple(draft.inside),
        unknown=draft.unknown,
        conditional=tuple(sorted(conditional)),
    )


def _read(
    source: Sequence[str], name: str | None, conditional: set[str]
) -> tuple[Framework, dict[str, Any]]:
    path = Path(source[0])
    if len(source) == 1 and path.is_dir():
        raise BadRequest(f"{source[0]!r} is a folder; expected a file or a command line")
    if len(source) > 1 or not path.suffix or path.suffix == source[0]:
        return _of_command(list(source), name, Path())
    text = reading.read(path)
    if path.suffix == ".py":
        return trl.TRL, scripts.arguments(path, text)
    if path.suffix in (".yaml", ".yml"):
        return _recognized(reading.of_yaml(text), name, "")
    if path.suffix == ".toml":
        return _recognized(reading.of_toml(text), name, "")
    commands = reading.of_script(text, conditional)
    found = [_of_command(words, name, path.parent) for words in commands if _trains(words)]
    if not found:
        raise BadRequest(f"{str(path)!r} has no command that trains with {', '.join(FRAMEWORKS)}")
    return max(found, key=lambda each: len(each[1]))


def _trains(words: list[str]) -> bool:
    command = " ".join(words)
    return bool(reading.of_words(words)) and any(
        mark in command for each in FRAMEWORKS.values() for mark in each.marks
    )


def _of_command(
    words: list[str], name: str | None, folder: Path
) -> tuple[Framework, dict[str, Any]]:
    if len(words) == 1:
        words = shlex.split(words[0])
    if "--" in words:  # as after `ray job submit`
        words = words[words.index("--") + 1 :]
    given = reading.of_words(_own(words))
    after_at = next((word for sign, word in itertools.pairwise(words) if sign == "@"), None)
    for key, file in (("config", given.get("config")), ("@", after_at)):  # prime-rl's `rl @ FILE`
        if isinstance(file, str) and UNREAD not in file:
            given.pop(key, None)
            path = folder / file if not Path(file).exists() else Path(file)
            reader = reading.of_toml if path.suffix == ".toml" else reading.of_yaml
            given = reader(reading.read(path)) | given
    return _recognized(given, name, " ".join(words[:12]))


def _own(words: list[str]) -> list[str]:
    """Returns the words from a module of OpenRLHF or verl on, without a launcher's words."""
    modules = ("openrlhf.", "verl.trainer")
    starts = [number for number, word in enumerate(words) if word.startswith(modules)]
    return words[starts[0] :] if starts else words


def _recognized(
    given: dict[str, Any], name: str | None, command: str
) -> tuple[Framework, dict[str, Any]]:
    """Returns the trainer whose table has most of the names."""
    if name is not None:
        if name not in FRAMEWORKS:
            raise BadRequest(f"--trainer is {name!r}; expected one of {', '.join(FRAMEWORKS)}")
        return FRAMEWORKS[name], given

    def known(framework: Framework) -> int:
        is_named = any(mark in command for mark in framework.marks)
        return sum(map(_knows(framework), given)) + is_named

    best = max(FRAMEWORKS.values(), key=known)
    if not known(best):
        raise BadRequest(
            f"no trainer is known with {', '.join(list(given)[:5]) or 'no arguments'}; expected "
            f"arguments of {', '.join(FRAMEWORKS)}, or --trainer"
        )
    return best, given


def _knows(framework: Framework) -> Callable[[str], bool]:
    if framework is trl.TRL:
        return trl.knows
    return lambda name: framework.row(framework.known(name)) is not None


def _complete(draft: Draft) -> None:
    """Names the job, and says which keys are missing."""
    named = draft.entries.get("name") or draft.entries.get("model")
    whole = str(named.value if named else "imported")
    short = name_of(whole.rstrip("/").rpartition("/")[2], "imported")
    draft.fill_in.pop("name", None)
    draft.set("name", short, named.origin if named else "")
    for key, why in MISSING.items():
        had = draft.rewards if key == "rewards" else draft.entries.get(key)
        if key == "steps" and "data.epochs" in draft.entries:
            continue
        if not had and key not in draft.fill_in:
            draft.fill_in[key] = why
    if "data.eval" not in {*draft.entries, *draft.fill_in}:
        draft.entries = {
            key: entry
            for key, entry in draft.entries.items()
            if not (key.startswith("evaluation.") and entry.origin.startswith("the default of"))
        }


def _checked(draft: Draft) -> tuple[dict[str, Any], list[str]]:
    """Returns the job as a document, and what is wrong with it but the keys to be filled in."""
    document: dict[str, Any] = {}
    for key, entry in draft.entries.items():
        _put(document, key, entry.value)
    if draft.rewards:
        document["rewards"] = [entry.value for entry in draft.rewards]
    whole = {**document, "data": dict(document.get("data", {}))}
    for key in draft.fill_in.keys() & PLACEHOLDERS.keys():
        _put(whole, key, PLACEHOLDERS[key])
    try:
        parse_job(whole)
    except BadRequest as error:
        return document, [fault["detail"].removeprefix("job: ") for fault in error.errors]
    return document, []


def _put(document: dict[str, Any], key: str, value: Any) -> None:
    section, dot, name = key.partition(".")
    if dot:
        document.setdefault(section, {})[name] = value
    else:
        document[key] = value
