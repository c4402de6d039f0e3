"""Problems as people have them in a script (rows, a `datasets.Dataset`, a DataFrame, a path, a
name of the Hub) as a source of `[data]`: inside the job where they are few, else uploaded."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shared.errors import BadRequest
from shared.explain import elide
from shared.job import MAX_INLINE_BYTES, MAX_INLINE_ROWS

if TYPE_CHECKING:
    from hone.client import Client

NAME = "rows.jsonl"
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


@dataclass(frozen=True)
class Problems:
    """`source` is what `data.train` or `data.eval` says, before an upload. `lines` are the rows to
    upload, as JSON lines, or `path` is a file of the user's."""

    source: Any
    lines: bytes = b""
    path: Path | None = None

    def uploaded(self, client: Client) -> Any:
        """Returns the source once it is where the orchestrator can read it. The same rows are
        stored once."""
        if self.lines:
            return client.upload(io.BytesIO(self.lines), NAME, key=f"rows-{_digest(self.lines)}").id
        if self.path is not None:
            content = self.path.read_bytes()
            key = f"file-{_digest(content)}"
            return client.upload(io.BytesIO(content), self.path.name, key=key).id
        return self.source

    def saved(self, path: Path) -> Any:
        """Returns the source for a job file; rows are written to `path`."""
        if isinstance(rows := self.source, list):
            lines = [json.dumps(row, ensure_ascii=False) for row in cast(list[Any], rows)]
            path.write_text("\n".join([*lines, ""]))
            return str(path.resolve())
        if not self.lines:
            return self.source
        path.write_bytes(self.lines)
        return str(path.resolve())


def problems(given: Any, what: str) -> Problems:
    """Returns the problems of the parameter `what`. Raises BadRequest for anything else."""
    if isinstance(given, Mapping):
        splits = ", ".join(map(repr, [*cast(Mapping[Any, Any], given)][:8]))
        raise BadRequest(f"{what} is a dict of {splits}; expected one table of rows")
    if isinstance(given, str | os.PathLike):
        return _named(os.fspath(cast(str, given)), what)
    return _of_rows(_rows(given, what), what)


def _named(name: str, what: str) -> Problems:
    path = Path(name).expanduser()
    if path.is_file():
        return Problems(str(path.resolve()), path=path)
    if path.is_dir():
        raise BadRequest(f"{what} is {name!r}, a folder; expected a file {', '.join(SUFFIXES)}")
    if path.suffix in SUFFIXES or name.startswith((".", "/", "~")):
        raise BadRequest(f"{what} is {name!r}, and there is no such file")
    return Problems(name)


def _rows(given: Any, what: str) -> Iterable[Any]:
    kind = f"{type(given).__module__.partition('.')[0]}.{type(given).__name__}"
    if kind == "pandas.DataFrame":
        return given.to_dict("records")
    if kind == "polars.DataFrame":
        return given.to_dicts()
    if kind == "datasets.IterableDataset":
        raise BadRequest(
            f"{what} is a stream, which cannot be sent; expected the data set's name on the Hub "
            'with data={"streaming": True}, or a datasets.Dataset'
        )
    if kind == "datasets.Dataset" or isinstance(given, Sequence):
        return cast(Iterable[Any], given)
    raise BadRequest(
        f"{what} is {elide(given)}; expected a datasets.Dataset, a list of dicts, a DataFrame, a "
        "path, or a name of the Hugging Face Hub"
    )


def _of_rows(rows: Iterable[Any], what: str) -> Problems:
    """Returns rows inside the job, or to be uploaded if they are many."""
    lines = [_line(row, number, what) for number, row in enumerate(rows)]
    if not lines:
        raise BadRequest(f"{what} has no rows; expected one or more")
    content = b"".join(lines)
    if len(lines) <= MAX_INLINE_ROWS and len(content) <= MAX_INLINE_BYTES // 2:
        return Problems([json.loads(line) for line in lines])
    return Problems(f"file-{_digest(content)[:24]}", content)  # an id, to check the job by


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _line(row: Any, number: int, what: str) -> bytes:
    if not isinstance(row, Mapping):
        raise BadRequest(
            f"{what}: row {number} is {elide(row)}; expected a dict of columns, such as "
            '{"prompt": "2+2?", "answer": "4"}'
        )
    try:
        return _json(row) + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        columns = cast(Mapping[Any, Any], row)
        column = next((column for column in columns if not _is_json(columns[column])), None)
        raise BadRequest(
            f"{what}: row {number}, column {column!r} is {elide(columns.get(column))}, which "
            "cannot be written as JSON; expected text, numbers, lists and dicts of them"
        ) from error


def _is_json(value: Any) -> bool:
    try:
        return bool(_json(value))
    except (TypeError, ValueError, RecursionError):
        return False


def _json(value: Any) -> bytes:
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False).encode()


def _plain(value: Any) -> Any:
    """Returns plain data: numbers of numpy as Python's, what is missing (NaN, NaT) as None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in cast(Sequence[Any], value)]
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return _plain(value.tolist())
    if type(value).__name__ in ("NaTType", "NAType"):
        return None
    return value.isoformat() if hasattr(value, "isoformat") else value
