"""From a file or arguments to a job as TOML, and what has no counterpart. READ FIRST."""

from __future__ import annotations

import itertools
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

from hone.importing import trl
from hone.importing.openrlhf import OPENRLHF
from hone.importing.prime_rl import PRIME_RL
from hone.importing.table import Draft, Framework, UnsupportedKey, convert, parse_words, read_values
from hone.importing.verl import VERL
from shared.errors import BadRequest
from shared.job import name_of
from shared.job.file import parse_job

FRAMEWORKS = {"trl": trl.TRL, "openrlhf": OPENRLHF, "verl": VERL, "prime-rl": PRIME_RL}

REQUIRED: dict[str, tuple[str, Any]] = {
    "model": ("a folder or a Hugging Face id", "any/model"),
    "data.train": ("a file or a Hugging Face dataset", "any/data"),
    "steps": ("or data.epochs", 1),
    "rewards": (
        "`hone explain graders`, or a function of your own: docs/rewards.md",
        [{"grader": "length", "params": {"max": 1}}],
    ),
}
"""Keys that every job needs: what to write, and a value with which the others are checked."""


class ImportResult(BaseModel):
    """A job made of another trainer's configuration. `fill_in` are keys that the user must give,
    `faults` what else keeps the job from being accepted, `settings` are the stack's. `lacking` has
    no counterpart, and `ignored` needs none."""

    framework: str
    toml: str
    job: dict[str, Any]
    fill_in: dict[str, str]
    faults: tuple[str, ...]
    settings: dict[str, Any]
    lacking: tuple[UnsupportedKey, ...]
    ignored: tuple[str, ...]


def import_config(
    source: Sequence[str], name: str | None = None, processes: int | None = None
) -> ImportResult:
    """Returns the job for a file or arguments; `name` is the trainer's, else it is recognized.
    `processes` multiply TRL's batches. Raises BadRequest for what cannot be read."""
    try:
        found = _imported(source, name, processes)
        found.toml.encode()
    except (RecursionError, MemoryError) as error:  # of nested lists or of their parser
        raise BadRequest(f"{source[0]!r:.200} is nested too deeply, or refers to itself") from error
    except UnicodeEncodeError as error:
        raise BadRequest(f"{source[0]!r:.200} has text that is no Unicode: {error}") from error
    return found


def _imported(source: Sequence[str], name: str | None, processes: int | None) -> ImportResult:
    framework, given = _read(source, name)
    if processes is not None:
        given["num_processes"] = processes
    draft = trl.translate_arguments(given) if framework is trl.TRL else convert(framework, given)
    _complete(draft)
    document, faults = _checked(draft)
    return ImportResult(
        framework=framework.title.lower(),
        toml=_text(draft, framework.title, document),
        job=document,
        fill_in=draft.fill_in,
        faults=tuple(faults),
        settings=draft.settings,
        lacking=tuple(draft.lacking),
        ignored=tuple(draft.ignored),
    )


def _read(source: Sequence[str], name: str | None) -> tuple[Framework, dict[str, Any]]:
    path = Path(source[0])
    is_word = len(source) == 1 and not re.search(r"[\s=]", source[0])
    if is_word and (path.suffix or path.exists()):
        return _recognized(read_values(path), name, "")
    words = shlex.split(source[0]) if len(source) == 1 else list(source)
    if "--" in words:  # as after `ray job submit`
        words = words[words.index("--") + 1 :]
    command = " ".join(words[:12])
    modules = [each for each in words if each.startswith(("openrlhf.", "verl.trainer"))]
    given = parse_words(words[words.index(modules[0]) :] if modules else words)
    after_at = next((word for sign, word in itertools.pairwise(words) if sign == "@"), None)
    for key, file in (("config", given.get("config")), ("@", after_at)):  # prime-rl's `rl @ FILE`
        if isinstance(file, str):
            given.pop(key, None)
            given = read_values(Path(file)) | given
    return _recognized(given, name, command)


def _recognized(
    given: dict[str, Any], name: str | None, command: str
) -> tuple[Framework, dict[str, Any]]:
    """Returns the trainer whose table has most of the names, and resolved values."""
    given = {key: _resolved(value, given) for key, value in given.items()}
    if name is not None and name not in FRAMEWORKS:
        raise BadRequest(f"--trainer is {name!r}; expected one of {', '.join(FRAMEWORKS)}")

    def known(framework: Framework) -> int:
        knows = trl.knows if framework is trl.TRL else framework.knows
        return sum(map(knows, given)) + any(mark in command for mark in framework.marks)

    best = FRAMEWORKS[name] if name else max(FRAMEWORKS.values(), key=known)
    if name is None and not known(best):
        raise BadRequest(
            f"no trainer is known with {', '.join(list(given)[:5]) or 'no arguments'}; expected "
            f"arguments of {', '.join(FRAMEWORKS)}, or --trainer"
        )
    return best, given


def _resolved(value: Any, values: Mapping[str, Any]) -> Any:
    """Returns the value with OmegaConf's `${a.b}` looked up; unchanged where it calls a resolver,
    or refers to what is not there."""
    found = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
    return _resolved(values[found[1]], values) if found and found[1] in values else value


def _complete(draft: Draft) -> None:
    """Names the job, and says which keys are missing."""
    named = draft.entries.get("name") or draft.entries.get("model")
    whole = str(named.value if named else "imported")
    short = name_of(whole.rstrip("/").rpartition("/")[2], "imported")
    draft.fill_in.pop("name", None)
    draft.set("name", short, named.origin if named else "")
    for key, (why, _) in REQUIRED.items():
        has = draft.rewards if key == "rewards" else draft.entries.get(key)
        if key == "rewards" and "environment.kind" in draft.entries:
            continue  # the environment has its own
        if not has and not (key == "steps" and "data.epochs" in draft.entries):
            draft.fill_in.setdefault(key, why)
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
    for key in draft.fill_in.keys() & REQUIRED.keys():
        _put(whole, key, REQUIRED[key][1])
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


def _text(draft: Draft, title: str, job: dict[str, Any]) -> str:
    """Returns the job as TOML. Comments before it say what must be filled in, and for each key the
    name that it had, and what differs."""
    lines = [f"From {title}, by `hone import`."]
    lines += [f"fill in {key}: {why}" for key, why in draft.fill_in.items()]
    rewards = [("rewards", entry) for entry in draft.rewards]
    for key, entry in (*draft.entries.items(), *rewards):
        if entry.origin or entry.note:
            lines.append(f"{key}: {'; '.join(filter(None, (entry.origin, entry.note)))}")
    comments = [part for line in lines for part in _comment(line)]
    return "\n".join(comments) + f"\n\n{tomli_w.dumps(job)}"


def _comment(text: str) -> list[str]:
    printable = re.sub(r"[\x00-\x1f\x7f]", "?", " ".join(text.split()))
    return textwrap.wrap(printable, 100, initial_indent="# ", subsequent_indent="#   ")
