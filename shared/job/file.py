"""Reads a job file, applies `--set a.b=c`, inlines the reward files that it names, and explains
every mistake.

A mistake is reported with the key, the value and the nearest valid key.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import stat
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import ValidationError

from shared.errors import BadRequest
from shared.explain import elide, sentences
from shared.job import RESUMED_WITH, Job

MAX_FILE_MIB = 64
"""Largest job file or reward file. A job may hold its problems."""


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Returns the job in the TOML file `path` with `overrides` ("a.b=c") applied and paths made
    absolute.

    Paths of data and model that exist relative to the working directory become absolute; others are
    taken as Hugging Face ids. Raises BadRequest with one sentence per fault. It begins with the
    file or override that has the fault.
    """
    if not isinstance(path, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadRequest(f"the job file is {elide(path)}; expected a path")
    check_overrides(overrides)
    path = Path(path)
    try:
        document = tomllib.loads(_text(path))
    except FileNotFoundError as error:
        raise BadRequest(f"no job file at {str(path)!r}") from error
    except OSError as error:
        raise BadRequest(f"the job file {str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:  # invalid TOML or UTF-8, or a path with a null byte
        raise BadRequest(f"{path}: not valid TOML: {error}") from error
    of_file = copy.deepcopy(document)
    for override in overrides:
        _apply(document, override)
    try:
        return _in_file(document, path)
    except BadRequest as error:
        raise _attributed(error, of_file, path, overrides) from error


def make_job(document: dict[str, Any], overrides: Sequence[str], where: str) -> Job:
    """Returns the job in `document` with `overrides` applied. Paths are relative to the working
    directory."""
    for override in overrides:
        _apply(document, override)
    return _in_file(document, Path(where))


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises BadRequest unless the overrides are a list of texts; a single text is a mistake."""
    is_list = isinstance(overrides, list | tuple)
    if not is_list or not all(isinstance(each, str) for each in overrides):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadRequest(
            f"the overrides are {elide(overrides)}; expected a list, for example ['steps=2']"
        )


def _in_file(document: dict[str, Any], path: Path) -> Job:
    rewards: Any = document.get("rewards")
    for code in [*(rewards if _is_list(rewards) else []), document.get("environment")]:
        if _is_table(code) and code.get("file") and code.get("source") is None:
            code["source"] = _source(Path(str(code["file"])), path.parent)
    _absolute(document)
    return parse_job(document, where=str(path))


def parse_job(document: dict[str, Any], where: str = "job") -> Job:
    """Returns the job that `document` describes; raises BadRequest naming each fault and the
    nearest valid key."""
    try:
        return Job.model_validate(document)
    except ValidationError as error:
        faults = sentences(error, Job, where)
        raise BadRequest("; ".join(fault["detail"] for fault in faults), errors=faults) from error


def _attributed(
    error: BadRequest, of_file: dict[str, Any], path: Path, overrides: Sequence[str]
) -> BadRequest:
    """Returns the error with each fault attributed: a fault that the file alone does not have comes
    from an override."""
    if not overrides or not error.errors:
        return error
    alone: set[str] = set()
    try:
        _in_file(of_file, path)
    except BadRequest as own:
        alone = {fault["detail"] for fault in own.errors}
    faults = [
        fault if fault["detail"] in alone else _as_override(fault, f"{path}: ", overrides)
        for fault in error.errors
    ]
    return BadRequest("; ".join(fault["detail"] for fault in faults), errors=faults)


def _as_override(fault: dict[str, str], where: str, overrides: Sequence[str]) -> dict[str, str]:
    """Returns the fault, attributed to the override nearest to its key, if there is one."""
    at = fault["pointer"].strip("/").split("/")

    def nearness(override: str) -> int:
        pairs = zip(override.partition("=")[0].split("."), at, strict=False)
        return len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])

    override = max(overrides, key=nearness)
    if not nearness(override):
        return fault
    detail = fault["detail"].removeprefix(where)
    return fault | {"detail": f"--set {override!r}: {detail}"}


def changed(job: Job, overrides: Sequence[str]) -> Job:
    """Returns the job with `overrides` ("a.b=c") applied, to resume it. Raises BadRequest for a key
    that changes what is learned, which would make another job."""
    document = job.model_dump(mode="json")
    for override in overrides:
        section, dot, _ = override.partition("=")[0].partition(".")
        if section in Job.model_fields and section not in RESUMED_WITH:
            raise BadRequest(
                f"{override!r} changes what is learned, which makes another job: submit it as a "
                f"new one; a paused job can continue with other {', '.join(sorted(RESUMED_WITH))}"
            )
        if dot and document.get(section) is None:
            document[section] = {}
        _apply(document, override)
    return parse_job(document)


def _apply(document: dict[str, Any], override: str) -> None:
    """Sets `a.b=c` in the document. The value is read as TOML (1e-4, true, [1, 2]), or else as
    text. A whole-number key indexes a list (`rewards.0.weight=2`)."""
    key, separator, text = override.partition("=")
    if not separator or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise BadRequest(
            f"--set {override!r}: expected KEY=VALUE, for example --set training.learning_rate=1e-5"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.split(".")
    target: Any = document
    for part in parents:
        target = _child(target, part, override)
    if _is_list(target):
        target[_position(target, last, override)] = value
    else:
        target[last] = value


def _child(target: Any, part: str, override: str) -> Any:
    child: Any = (
        target[_position(target, part, override)]
        if _is_list(target)
        else target.setdefault(part, {})
    )
    if not _is_table(child) and not _is_list(child):
        raise BadRequest(
            f"--set {override!r}: {part!r} is {json.dumps(child, default=str)}, not a section"
        )
    return child


def _position(items: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise BadRequest(
            f"--set {override!r}: {part!r} is not a position in a list of {len(items)}"
        )
    return int(part)


def _is_table(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _source(file: Path, folder: Path) -> str:
    for candidate in (folder / file, file):
        if candidate.is_file():
            return read_source(candidate)
    raise BadRequest(
        f"no Python file at {str(file)!r}, looked for it in {str(Path.cwd())!r} and {str(folder)!r}"
    )


def read_source(path: Path) -> str:
    """Returns the code in a reward file. Raises BadRequest if it cannot be read as text."""
    try:
        return _text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(
            f"the reward file {str(path)!r} cannot be read as text: {error}"
        ) from error


def _text(path: Path) -> str:
    """Returns the text of a file or pipe. Raises BadRequest for a device, which may be endless, and
    for more than `MAX_FILE_MIB`."""
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise BadRequest(f"{str(path)!r} is a device; expected a text file")
        data = file.read((MAX_FILE_MIB << 20) + 1)
    if len(data) > MAX_FILE_MIB << 20:
        raise BadRequest(f"{str(path)!r} is larger than {MAX_FILE_MIB} MiB; expected a text file")
    return data.decode("utf-8-sig")  # an editor may have written a byte order mark


def _absolute(document: dict[str, Any]) -> None:
    data, evaluation = document.get("data"), document.get("evaluation")
    sets: Any = evaluation.get("sets") if _is_table(evaluation) else None
    held_out = [(each, "source") for each in sets.values()] if _is_table(sets) else []
    models: Any = evaluation.get("models") if _is_table(evaluation) else None
    compared = [(each, "model") for each in models] if _is_list(models) else []
    named = ((document, "model"), (data, "train"), (data, "eval"), *held_out, *compared)
    for section, key in named:
        value: Any = section.get(key) if _is_table(section) else None
        if _is_table(section) and isinstance(value, str) and value and Path(value).exists():
            section[key] = str(Path(value).resolve())
