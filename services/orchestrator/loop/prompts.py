"""The job's problems. Which ones a step takes is a pure function of (job seed, step, round):
resuming needs no saved position."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from shared.errors import BadRequest, Unavailable
from shared.job import DataSpec, Job
from shared.wire import Prompt

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


class Rows(Protocol):
    """A table as `datasets.Dataset` is one."""

    @property
    def column_names(self) -> list[str]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> dict[str, Any]: ...


class Prompts:
    """Training prompts by step, and the held-out ones."""

    def __init__(self, job: Job, train: Rows, evaluation: Rows | None) -> None:
        self._job = job
        self._train = train
        self._evaluation = evaluation

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that every problem has, held-out ones included."""
        held_out = (
            self._evaluation.column_names
            if self._evaluation is not None
            else self._train.column_names
        )
        return tuple(name for name in self._train.column_names if name in held_out)

    def for_step(self, step: int, round: int = 0) -> tuple[Prompt, ...]:
        """Returns the step's `[P]` prompts. Each pass over the data has another order; step 1 is
        the first.

        In rounds from 1, those that may replace groups without signal: drawn from all rows that no
        earlier round of the step could have taken, so fewer than `[P]` once a small data set has no
        more.
        """
        source = self._job.data.train
        return tuple(
            self._prompt(self._train, source, index) for index in self._indices(step, round)
        )

    def held_out(self) -> tuple[Prompt, ...]:
        """Returns the evaluation problems, the same ones each time; empty without `data.eval`."""
        if self._evaluation is None:
            return ()
        count = min(
            self._job.evaluation.num_prompts or len(self._evaluation), len(self._evaluation)
        )
        source = str(self._job.data.eval)
        return tuple(self._prompt(self._evaluation, source, index) for index in range(count))

    def _indices(self, step: int, round: int) -> list[int]:
        count, rows = self._job.sampling.prompts_per_step, range(len(self._train))
        indices = [self._index(position) for position in range((step - 1) * count, step * count)]
        taken = set(indices)
        for earlier in range(1, round + 1):
            drawn = random.Random(f"{self._job.seed}:{step}:{earlier}").sample(
                rows, min(count + len(taken), len(rows))
            )
            indices = [index for index in drawn if index not in taken][:count]
            taken.update(indices)
        return indices

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._train))
        return _shuffled(len(self._train), self._job.seed, epoch)[offset]

    def _prompt(self, rows: Rows, source: str, index: int) -> Prompt:
        row = rows[index]
        where = f"row {index} of dataset {source!r}"
        return Prompt(index=index, content=_content(row, self._job.data, where), row=row)


def load_prompts(job: Job) -> Prompts:
    """Returns the job's problems. Raises BadRequest for a file that is missing, empty or
    unreadable, and for a column that is not there; Unavailable while the Hub cannot be reached.
    Takes as long as reading the files; call it off the event loop."""
    train = _load(job.data.train, job.data.train_split, job.data)
    evaluation = _load(job.data.eval, job.data.eval_split, job.data) if job.data.eval else None
    return Prompts(job, train, evaluation)


def _load(source: str, split: str, spec: DataSpec) -> Rows:
    import datasets

    path = Path(source)
    rows: Any
    try:
        if path.suffix in FORMATS:
            if not path.is_file():
                raise BadRequest(
                    f"no dataset file at {source!r} on the orchestrator's host; give an existing "
                    "file's path"
                )
            if path.suffix == ".csv" and not _has_rows(path):
                raise BadRequest(f"dataset {source!r} has no rows")
            rows = datasets.load_dataset(FORMATS[path.suffix], data_files=str(path), split="train")
        elif path.exists() or source.startswith(("/", ".")):
            raise BadRequest(
                f"dataset {source!r} is not a file ending in {', '.join(FORMATS)}, nor a Hugging "
                "Face dataset id"
            )
        else:
            rows = datasets.load_dataset(source, spec.config, split=split, revision=spec.revision)
    except BadRequest:
        raise
    except StopIteration as error:
        raise BadRequest(f"dataset {source!r} has no rows") from error
    except ConnectionError as error:
        raise Unavailable(f"dataset {source!r} cannot be fetched: {error}") from error
    except Exception as error:  # whatever reading a file that we did not write raises
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise BadRequest(f"dataset {source!r} cannot be read: {reason[0]}") from error
    if not len(rows):
        raise BadRequest(f"dataset {source!r} has no rows")
    if spec.prompt_column not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise BadRequest(
            f"dataset {source!r} has no column {spec.prompt_column!r} (data.prompt_column); its "
            f"columns are {columns}"
        )
    return rows


def _has_rows(csv: Path) -> bool:
    """Whether anything follows the header: `datasets` has several errors for what is empty."""
    with csv.open("rb") as lines:
        return len(list(itertools.islice(filter(bytes.strip, lines), 2))) == 2


@functools.lru_cache(maxsize=2)
def _shuffled(count: int, seed: int, epoch: int) -> Sequence[int]:
    order = list(range(count))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def _content(row: dict[str, Any], spec: DataSpec, where: str) -> str | tuple[dict[str, Any], ...]:
    value = row[spec.prompt_column]
    system = [{"role": "system", "content": spec.system_prompt}] if spec.system_prompt else []
    if isinstance(value, str):
        return (*system, {"role": "user", "content": value}) if system else value
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return (*system, *value)
    raise BadRequest(
        f"{where}, column {spec.prompt_column!r}: got {value!r:.80}; expected text or a list of "
        "chat messages, each with a role and its content"
    )


def _is_message(value: Any) -> bool:
    """Whether it has a role and something beside it: what an assistant's tool calls stand in has no
    `content`. A key that only other rows have is None."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and any(said is not None for key, said in value.items() if key != "role")
    )
