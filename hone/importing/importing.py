"""From a file or arguments to a job as TOML, and what has no counterpart. READ FIRST."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hone.importing import trl
from hone.importing.openrlhf import OPENRLHF
from hone.importing.prime_rl import PRIME_RL
from hone.importing.table import Framework, ImportedJob, convert, parse_words, read_values
from hone.importing.verl import VERL
from shared.errors import BadRequest
from shared.job import name_of

FRAMEWORKS = {"trl": trl.TRL, "openrlhf": OPENRLHF, "verl": VERL, "prime-rl": PRIME_RL}


def import_config(
    source: Sequence[str], name: str | None = None, processes: int | None = None
) -> ImportedJob:
    """Returns the job for a file or arguments; `name` is the trainer's, else it is recognized.
    `processes` multiply TRL's batches. Raises BadRequest for what cannot be read."""
    framework, given = _read(source, name)
    if processes is not None:
        given["num_processes"] = processes
    job = trl.translate_arguments(given) if framework is trl.TRL else convert(framework, given)
    _complete(job)
    return job


def _read(source: Sequence[str], name: str | None) -> tuple[Framework, dict[str, Any]]:
    path = Path(source[0])
    is_word = len(source) == 1 and not re.search(r"[\s=]", source[0])
    if is_word and (path.suffix or path.exists()):
        return _recognized(read_values(path), name, "")
    words = shlex.split(source[0]) if len(source) == 1 else list(source)
    if "--" in words:  # as after `ray job submit`
        words = words[words.index("--") + 1 :]
    given = parse_words(words)
    if isinstance(file := given.pop("config", None), str):
        given = read_values(Path(file)) | given
    return _recognized(given, name, " ".join(words[:12]))


def _recognized(
    given: dict[str, Any], name: str | None, command: str
) -> tuple[Framework, dict[str, Any]]:
    """Returns the trainer whose table has most of the names, and the values."""
    if name is not None and name not in FRAMEWORKS:
        raise BadRequest(f"--trainer is {name!r}; expected one of {', '.join(FRAMEWORKS)}")

    def known(framework: Framework) -> int:
        return sum(map(framework.knows, given)) + (framework.title.lower() in command)

    best = FRAMEWORKS[name] if name else max(FRAMEWORKS.values(), key=known)
    if name is None and not known(best):
        raise BadRequest(
            f"no trainer is known with {', '.join(list(given)[:5]) or 'no arguments'}; expected "
            f"arguments of {', '.join(FRAMEWORKS)}, or --trainer"
        )
    return best, given


def _complete(job: ImportedJob) -> None:
    """Names the job, and leaves out the defaults of an evaluation that it has not."""
    named = "name" if "name" in job.keys else "model"
    last = str(job.keys.get(named, "")).rstrip("/").rpartition("/")[2]
    job.set("name", name_of(last, "imported"), job.origins.get(named, "made up"))
    for key, origin in job.origins.items():
        is_unused = key.startswith("evaluation.") and origin.startswith("the default of")
        if is_unused and "data.eval" not in job.keys:
            del job.keys[key]
