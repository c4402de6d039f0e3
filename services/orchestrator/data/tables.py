"""Tables of problems: the rows of a source, by number or as a stream."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import httpx2 as httpx

from services.orchestrator.errors import OperatorActionNeeded
from shared.errors import BadRequest, Failed, HoneError, Unavailable
from shared.weights.folders import digest_of_file
from shared.wire.messages import without_arrow_nones

Row = dict[str, Any]

ended: ContextVar[threading.Event | None] = ContextVar("ended", default=None)
"""Set once no one waits for this thread's work. A thread cannot be killed, so the work checks
it."""

ROWS_LOOKED_AT = 1000
"""First rows of a stream, from which its columns are read."""


class Rows(Protocol):
    """Rows by number, as `datasets.Dataset` has them."""

    @property
    def column_names(self) -> list[str]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Row: ...


class RowList:
    """Rows in memory. A column that only other rows have is None."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self.column_names = list(dict.fromkeys(itertools.chain.from_iterable(rows)))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Row:
        return {name: self._rows[index].get(name) for name in self.column_names}


@dataclass(frozen=True)
class InlineTable:
    """Rows that stand in the job: they never change."""

    name: str
    given: tuple[Row, ...]
    version: str | None = None

    def rows(self) -> Rows:
        return RowList(self.given)

    def stream(self) -> Iterator[Row]:
        yield from self.given


@dataclass(frozen=True)
class JsonTable:
    """A file of JSON objects: one per line, or a list of them."""

    name: str
    path: Path
    version: str | None

    def rows(self) -> Rows:
        if self._is_list():
            return RowList(self._list())
        return JsonLines(self, *(_indexed(self) if self.version else self.index()))

    def index(self) -> tuple[array[int], list[str], tuple[int, ...]]:
        """Returns where each line begins, the columns, and the state of the file."""
        offsets, columns = array("Q"), dict[str, None]()
        with self.path.open("rb") as file:
            stamp = _stamp(file.fileno())
            for offset, line, number in _lines(file):
                columns.update(dict.fromkeys(self._parsed(line, number)))
                offsets.append(offset)
        return offsets, list(columns), stamp

    def stream(self) -> Iterator[Row]:
        if self._is_list():
            yield from self._list()
            return
        with self.path.open("rb") as file:
            for _, line, number in _lines(file):
                yield self._parsed(line, number)

    def _is_list(self) -> bool:
        with self.path.open("rb") as file:
            return next(filter(None, map(bytes.strip, file)), b"").startswith(b"[")

    def _list(self) -> list[Row]:
        try:
            found = cast(list[Any], json.loads(self.path.read_bytes()))
        except (ValueError, RecursionError) as error:
            raise self._not_json(str(error)) from error
        for number, row in enumerate(found):
            if not isinstance(row, dict):
                raise BadRequest(f"row {number} of {self.name} is {row!r:.80}; {AN_OBJECT}")
        return found

    def _parsed(self, line: bytes, number: int) -> Row:
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            at = isinstance(error, json.JSONDecodeError)
            why = f"{error.msg} at character {error.pos + 1}" if at else str(error)
            raise self._not_json(f"line {number}: {why}") from error
        if not isinstance(row, dict):
            raise BadRequest(f"line {number} of {self.name} is {row!r:.80}; {AN_OBJECT}")
        return cast(Row, row)

    def _not_json(self, why: str) -> BadRequest:
        return BadRequest(
            f"{self.name} cannot be read as JSON: {why}; {AN_OBJECT} on each line, or a "
            "list of objects"
        )


AN_OBJECT = "expected a JSON object"

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

PASSING = frozenset(
    {
        errno.EAGAIN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EIO,
        errno.EMFILE,
        errno.ENETUNREACH,
        errno.ENFILE,
        errno.ENODEV,
        errno.ENOMEM,
        errno.ENOTCONN,
        errno.ENXIO,
        errno.ESTALE,
    }
)
"""Errors of the disk, the volume or this process, which pass; they say nothing about the file."""

PASSING_KINDS = (ConnectionError, TimeoutError, httpx.TransportError)


@functools.lru_cache(maxsize=16)
def _indexed(table: JsonTable) -> tuple[array[int], list[str], tuple[int, ...]]:
    """As `JsonTable.index`, cached for all jobs with the same content of the same file."""
    found = table.index()
    check_version(table.name, digest_of_file(table.path), table.version)
    return found


class JsonLines:
    """Rows of a file with an object per line. Only their offsets are in memory; rows are read when
    they are needed, so the file must not change."""

    def __init__(
        self, table: JsonTable, offsets: array[int], columns: list[str], stamp: tuple[int, ...]
    ) -> None:
        self.column_names = columns
        self._table = table
        self._offsets = offsets
        self._stamp = stamp

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int, /) -> Row:
        try:
            with self._table.path.open("rb") as file:
                self._check_same(file.fileno())
                file.seek(self._offsets[index])
                row: Row = json.loads(file.readline())
        except OSError as error:
            raise Unavailable(
                f"{self._table.name} cannot be read any more: {error.strerror}"
            ) from error
        return {name: row.get(name) for name in self.column_names}

    def _check_same(self, descriptor: int) -> None:
        """Raises OperatorActionNeeded if the file has changed since it was first read."""
        stamp = _stamp(descriptor)
        if stamp != self._stamp:
            check_version(self._table.name, digest_of_file(self._table.path), self._table.version)
            self._stamp = stamp


class ArrowRows:
    """Rows of a `datasets.Dataset`, with their chat messages as they were written."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.column_names = rows.column_names

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Row:
        return _from_arrow(self._rows[index])


def _from_arrow(row: Row) -> Row:
    return {name: without_arrow_nones(value) for name, value in row.items()}


@dataclass(frozen=True)
class ArrowTable:
    """A table read by the library `datasets`, with `arguments` for its `load_dataset`. It keeps the
    rows in an Arrow file on disk, not in memory."""

    name: str
    version: str | None
    arguments: dict[str, Any]

    def rows(self) -> Rows:
        return ArrowRows(self._read(lambda: self._load(streaming=False)))

    def stream(self) -> Iterator[Row]:
        rows = self._read(lambda: iter(self._load(streaming=True)))
        nothing: Row = {}
        while (row := self._read(lambda: next(rows, nothing))) is not nothing:
            yield _from_arrow(row)

    def _load(self, *, streaming: bool) -> Any:
        import datasets
        from datasets import config

        # Otherwise every read, also of a local file, is counted at Hugging Face: seconds if that is
        # away.
        config.HF_UPDATE_DOWNLOAD_COUNTS = False
        return datasets.load_dataset(**self.arguments, streaming=streaming)

    def _read(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except StopIteration as error:  # of `datasets`, for an empty file
            raise no_rows(self.name) from error
        except Exception as error:  # reading a foreign file may raise any class
            if isinstance(error, HoneError):
                raise
            for cause in _causes(error):
                if not isinstance(found := unreadable(self.name, cause), BadRequest):
                    raise found from error
            reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
            raise BadRequest(f"{self.name} cannot be read: {reason[0]}") from error


Table = InlineTable | JsonTable | ArrowTable
"""An opened source. Messages call it `name`; `version` identifies its content (None: unknown, or
always the same). `rows` returns all rows, `stream` yields them in order, without holding them; both
raise BadRequest if they cannot be read."""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error, its cause, and so on."""
    while error:
        yield error
        error = error.__cause__ or error.__context__


def unreadable(name: str, error: BaseException) -> HoneError:
    """Returns the error for an unreadable source: BadRequest if the file is missing, not allowed or
    no file, Failed for a full disk, and Unavailable for faults that pass: a connection, a volume
    that is unreachable, a disk without answer."""
    number = getattr(error, "errno", None)
    reason = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    sentence = f"{name} cannot be read: {reason.splitlines()[0]}"
    if number in FULL:
        return Failed(f"{sentence}; free some space", code="disk_full")
    if number in PASSING or isinstance(error, PASSING_KINDS):
        return Unavailable(sentence)
    return BadRequest(sentence)


def no_rows(name: str) -> BadRequest:
    return BadRequest(f"{name} has no rows; expected at least one")


def check_version(name: str, found: str | None, wanted: str | None) -> None:
    """Raises OperatorActionNeeded if a source's content has changed since the job was submitted."""
    if found and wanted and found != wanted:
        raise OperatorActionNeeded(
            f"{name} has changed since the job was submitted (its digest is {found}, expected "
            f"{wanted}): the job would continue with other problems; restore the old file, or "
            "submit a new job"
        )


def check_wanted() -> None:
    """Raises Failed once no one waits for this work."""
    if (end := ended.get()) and end.is_set():
        raise Failed("it was ended: no one waits for it any more")


def _lines(file: Any) -> Iterator[tuple[int, bytes, int]]:
    """Yields offset, content and number (from 1) of each line that is not blank."""
    offset = 0
    for number, line in enumerate(file, 1):
        check_wanted()
        if line.strip():
            yield offset, line, number
        offset += len(line)


def _stamp(descriptor: int) -> tuple[int, ...]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
