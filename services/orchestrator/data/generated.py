"""Problems that the package reasoning-gym generates: `data.train = "reasoning_gym:chain_sum"`.

They depend on task, options, levels, seed and size alone. A process of its own generates them, with
a fixed hash seed, into a file below `<runs_dir>/.generated`, which is then read as any file is. A
lost file is generated again, with the same content.

Each row has the columns `prompt`, `answer`, `task`, `level` and `entry`. The grader `reasoning_gym`
reads `entry`, which is a literal of Python, because JSON would make lists of tuples.
"""

# Packages of extras may be missing.
# pyright: reportMissingImports=false

from __future__ import annotations

import ast
import asyncio
import contextlib
import hashlib
import importlib.metadata
import json
import os
import resource
import tempfile
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.orchestrator.data.subprocesses import SubprocessTimeout, run_in_subprocess
from services.orchestrator.data.tables import MAX_ROW_BYTES, JsonTable, check_version, check_wanted
from services.orchestrator.errors import OperatorActionNeeded
from services.orchestrator.writable import writing
from shared.errors import BadRequest
from shared.explain import nearest
from shared.host import disk
from shared.job.data import MAX_GENERATED, ReasoningGymSpec
from shared.weights.folders import digest_of_file

PACKAGE = "reasoning-gym"

GENERATE_S = 600.0
"""Seconds that generating one source may take."""

MAX_BYTES = 256 << 20
"""Most bytes of one source's rows."""

MAX_FILES = 64
"""Most files that are kept: the ones used last."""

MEMORY_BYTES = 4 << 30
"""Address space of the process that generates."""

FILE_ENDINGS = ("_file", "_path")
"""Endings of the package's options that name files."""

POLL_S = 0.2

NOT_INSTALLED = "which is not installed where {where} runs: pip install 'hone-rl[reasoning-gym]'"

SEEDS = 1 << 30
"""Seeds of training problems are below this, and seeds of held-out ones from it on: a problem is
made of the source's seed plus its number, so that near seeds would share problems."""


@dataclass(frozen=True)
class ProblemSet:
    """The inputs that decide the problems of one source. Messages call the source `key`."""

    key: str
    task: str
    spec: ReasoningGymSpec
    seed: int
    is_held_out: bool

    @property
    def size(self) -> int:
        return self.spec.eval_size if self.is_held_out else self.spec.size

    @property
    def first_seed(self) -> int:
        """Returns the seed of problem 0; problem n is made with n more."""
        digest = hashlib.sha256(f"{self.seed}:{self.key}".encode()).digest()
        within = int.from_bytes(digest[:8]) % (SEEDS - MAX_GENERATED)
        return within + SEEDS * self.is_held_out

    def level(self, index: int) -> int | None:
        """Returns the level of a problem. Training problems are sorted from the first level to the
        last; held-out problems take them in turn, so that any number of the first has all."""
        levels = self.spec.levels
        if not levels:
            return None
        place = index % len(levels) if self.is_held_out else index * len(levels) // self.size
        return levels[place]


def open_generated(source: ProblemSet, runs_dir: Path, wanted: str | None) -> JsonTable:
    """Returns the table of the problems, which are generated where their file is missing. Raises
    BadRequest for a task or options that the package does not have, OperatorActionNeeded if another
    version of the package makes other problems than `wanted`."""
    release = _release(source)
    name = f"{source.key} ({PACKAGE} {release}, task {source.task!r})"
    made_of = json.dumps(asdict(source), sort_keys=True, default=str)
    digest = hashlib.sha256(f"{release}:{made_of}".encode()).hexdigest()[:32]
    path = runs_dir / ".generated" / f"{digest}.jsonl"
    if not path.exists():
        with writing("folder", path.parent):
            disk.make_folder(path.parent)
            _generate(source, path)
            made = sorted(path.parent.glob("*.jsonl"), key=lambda each: each.stat().st_mtime)
            for oldest in made[:-MAX_FILES]:
                oldest.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the folder is read-only
        os.utime(path)
    version = digest_of_file(path)
    try:
        check_version(name, version, wanted)
    except OperatorActionNeeded as error:
        raise OperatorActionNeeded(
            f"{name} has other problems than when the job was submitted; expected the version of "
            f"{PACKAGE} that was installed then: install it, or submit a new job"
        ) from error
    return JsonTable(name, path, version)


def _release(source: ProblemSet) -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise BadRequest(
            f"{source.key} is 'reasoning_gym:{source.task}', a task of the package {PACKAGE}, "
            + NOT_INSTALLED.format(where="the orchestrator")
        ) from error


def _generate(source: ProblemSet, path: Path) -> None:
    """Writes the file in a process, which is killed at its deadline or with the caller's task."""
    with tempfile.TemporaryDirectory(dir=path.parent) as aside:
        written = Path(aside) / path.name
        generating = run_in_subprocess(
            write,
            source,
            str(written),
            deadline_s=GENERATE_S,
            what=f"generating the problems of {source.key} in {MEMORY_BYTES >> 30} GiB of memory",
            environment={"PYTHONHASHSEED": "0"},  # some tasks depend on the iteration order of sets
        )
        try:
            asyncio.run(_while_wanted(generating))
        except SubprocessTimeout as error:
            raise BadRequest(
                f"{source.key}: generating {source.size} problems of {source.task!r} took more "
                f"than {GENERATE_S:g} s; expected fewer or easier ones: lower "
                "data.reasoning_gym.size or eval_size"
            ) from error
        disk.write_file(path, written.read_bytes())


async def _while_wanted(work: Coroutine[Any, Any, None]) -> None:
    """Awaits the work. Cancels it and raises Failed when the caller is cancelled."""
    running = asyncio.ensure_future(work)
    try:
        while not running.done():
            check_wanted()
            await asyncio.wait([running], timeout=POLL_S)
    finally:
        running.cancel()
    await running


# --- in the process that generates ----------------------------------------------------------------


def write(source: ProblemSet, path: str) -> None:
    """Writes the rows to a file. Raises BadRequest for a task or option unknown to the package."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    num_bytes = 0
    with Path(path).open("w", encoding="utf-8") as file:
        for row in rows_of(source):
            num_bytes += file.write(json.dumps(row) + "\n")
            if num_bytes > MAX_BYTES:
                raise BadRequest(
                    f"{source.key}: the problems of {source.task!r} take more than {MAX_BYTES} "
                    "bytes; expected fewer or smaller ones"
                )


def rows_of(source: ProblemSet) -> Iterator[dict[str, Any]]:
    """Yields the rows in order. Raises BadRequest as `write`."""
    datasets: dict[int | None, tuple[Any, dict[str, Any]]] = {}
    for index in range(source.size):
        level = source.level(index)
        if level not in datasets:
            datasets[level] = _dataset(source, level)
        dataset, config = datasets[level]
        try:
            entry = dataset[index]
        except Exception as error:  # the package raises any class for unusable options
            raise BadRequest(
                f"{source.key}: the task {source.task!r} made no problem {index} with these "
                f"options: {type(error).__name__}: {str(error)[:300]}"
            ) from error
        yield _row(source, index, level, config, entry)


def _row(
    source: ProblemSet, index: int, level: int | None, config: Any, entry: Mapping[str, Any]
) -> dict[str, Any]:
    kept = {key: _plain(entry[key]) for key in ("question", "answer", "metadata")}
    text = repr({"task": source.task, "config": config} | kept)
    try:
        is_whole = ast.literal_eval(text)["metadata"] == kept["metadata"]
    except (ValueError, SyntaxError):
        is_whole = False
    if not is_whole or len(text) > MAX_ROW_BYTES:
        raise BadRequest(
            f"{source.key}: problem {index} of the task {source.task!r} cannot be written to a "
            "file; expected a task whose problems are numbers, texts, lists and tables"
        )
    answer = None if entry["answer"] is None else str(entry["answer"])
    shown = {"prompt": entry["question"], "answer": answer, "task": source.task}
    return shown | ({} if level is None else {"level": level}) | {"entry": text}


def _plain(value: Any) -> Any:
    """Returns a value with Python's numbers and texts in place of numpy's."""
    if type(value).__module__ == "numpy":
        return value.tolist()
    if isinstance(value, dict):
        return {_plain(key): _plain(one) for key, one in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple, set) else value


def _dataset(source: ProblemSet, level: int | None) -> tuple[Any, dict[str, Any]]:
    """Returns the package's data set at a level, and its configuration in plain data, without seed
    and size, as far as it differs from the task's own."""
    import reasoning_gym  # noqa: F401  (registers the tasks)
    from pydantic import TypeAdapter
    from reasoning_gym.factory import DATASETS

    if source.task not in DATASETS:
        raise BadRequest(
            f"{source.key}: {PACKAGE} has no task {source.task!r}; "
            f"{nearest(source.task, sorted(DATASETS), 'its tasks')}"
        )
    kind, config_type = DATASETS[source.task]
    adapter = TypeAdapter(config_type)
    options = _options(source, adapter, config_type)
    options |= {"seed": source.first_seed, "size": max(source.size, 1)}
    try:
        values = options if level is None else _of_level(source, level) | options
        config = config_type(**values)
        dataset = kind(config=config)
    except Exception as error:  # the package raises AssertionError, and its tasks other classes
        at = "" if level is None else f" at level {level}"
        raise BadRequest(
            f"{source.key}: {PACKAGE} refuses the options of {source.task!r}{at}: "
            f"{str(error)[:300] or type(error).__name__}"
        ) from error
    plain = adapter.dump_python(config, mode="json", exclude_defaults=True, warnings=False)
    return dataset, {key: plain[key] for key in plain if key not in ("seed", "size")}


def _options(source: ProblemSet, adapter: Any, config_type: Any) -> dict[str, Any]:
    """Returns the job's options with the types that the task's configuration has."""
    from pydantic import ValidationError

    options = source.spec.options
    fields = dict(config_type.__dataclass_fields__)
    for reserved in ("seed", "size", *(name for name in fields if name.endswith(FILE_ENDINGS))):
        fields.pop(reserved, None)
    for name in options:
        if name not in fields:
            raise BadRequest(
                f"data.reasoning_gym.options has {name!r}, which {source.task!r} does not take; "
                f"{nearest(name, sorted(fields), 'its options')}"
            )
    check_no_files(options)
    try:
        config = adapter.validate_json(json.dumps(options), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        wanted = getattr(fields.get(str(first["loc"][0])), "type", "") if first["loc"] else ""
        wanted = getattr(wanted, "__name__", str(wanted))
        raise BadRequest(
            f"data.reasoning_gym.options.{where} is {first['input']!r:.80}; expected "
            f"{wanted or 'another value'} ({first['msg']})"
        ) from error
    except Exception as error:  # the package raises AssertionError
        raise BadRequest(
            f"data.reasoning_gym.options: {PACKAGE} refuses them: {str(error)[:300]}"
        ) from error
    return {name: getattr(config, name) for name in options}


def check_no_files(options: object, at: str = "data.reasoning_gym.options") -> None:
    """Raises BadRequest for an option, at any depth, that names a file of the orchestrator's
    machine: tasks that contain other tasks pass options on to them unchecked."""
    if isinstance(options, Mapping):
        for name, value in options.items():
            if str(name).endswith(FILE_ENDINGS):
                raise BadRequest(f"{at} has {name!r}; expected no files of the machine")
            check_no_files(value, f"{at}.{name}")
    elif isinstance(options, list | tuple):
        for index, value in enumerate(options):
            check_no_files(value, f"{at}[{index}]")


def _of_level(source: ProblemSet, level: int) -> dict[str, Any]:
    """Returns the options that the task's curriculum sets at a level."""
    from reasoning_gym.factory import CURRICULA, create_curriculum

    if source.task not in CURRICULA:
        raise BadRequest(
            f"data.reasoning_gym.levels is {list(source.spec.levels)}, and {source.task!r} has no "
            "curriculum; expected no levels, and options in their place"
        )
    curriculum: Any = create_curriculum(source.task)
    highest = max((len(each.levels) - 1 for each in curriculum.attributes.values()), default=0)
    if level > highest:
        raise BadRequest(
            f"data.reasoning_gym.levels has {level}; expected 0 to {highest} for {source.task!r}"
        )
    curriculum.set_global_level(level)
    config = curriculum.generate_configuration({"seed": 0, "size": 1})
    return {name: getattr(config, name) for name in config.__dataclass_fields__}
