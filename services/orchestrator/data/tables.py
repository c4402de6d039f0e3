"""Tables of problems: the rows of a source, by number or as a stream."""

from __future__ import annotations

import csv
import errno
import functools
import itertools
import json
import math
import os
import re
import threading
from array import array
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import httpx2 as httpx

from services.orchestrator.errors import OperatorActionNeeded
from shared.errors import BadRequest, Failed, HoneError, Unavailable
from shared.http import codec
from shared.weights.folders import digest_of_file
from shared.wire.messages import without_arrow_nones

Row = dict[str, Any]

ended: ContextVar[threading.Event | None] = ContextVar("ended", default=None)
"""Set when the caller of this thread's work is cancelled. A thread cannot be killed, so the work
checks the event."""

ROWS_LOOKED_AT = 1000
"""First rows of a stream, from which its columns are read."""


class Rows(Protocol):
    """Access to rows by number, as in `datasets.Dataset`."""

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
    """Rows that are part of the job itself, so they never change."""

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
        return self._list_rows() if self._is_list() else FileRows(self)

    def index(self) -> Index:
        offsets, columns = array("Q"), dict[str, None]()
        with self.path.open("rb") as file:
            stamp = _stamp(file.fileno())
            for offset, line, number in _lines(file):
                columns.update(dict.fromkeys(self._parsed(line, number)))
                check_columns(columns, self.name)
                offsets.append(offset)
        return Index(offsets, list(columns), stamp)

    def read_row(self, file: BinaryIO, index: Index) -> Row:
        return json.loads(file.readline())

    def stream(self) -> Iterator[Row]:
        if self._is_list():
            yield from (row for _, row in self._list(self._text()))
            return
        with self.path.open("rb") as file:
            for _, line, number in _lines(file):
                yield self._parsed(line, number)

    def _is_list(self) -> bool:
        with self.path.open("rb") as file:
            lines = (line.removeprefix(BOM_UTF8).strip() for line in file)
            return next(filter(None, lines), b"").startswith(b"[")

    def _list_rows(self) -> ListRows:
        text, offsets, columns = self._text(), array("Q"), dict[str, None]()
        for offset, row in self._list(text):
            offsets.append(offset)
            columns.update(dict.fromkeys(row))
            check_columns(columns, self.name)
        return ListRows(self.name, text, offsets, list(columns))

    def _text(self) -> str:
        data = self.path.read_bytes().removeprefix(BOM_UTF8)
        try:
            return data.decode(json.detect_encoding(data))
        except UnicodeDecodeError as error:
            raise self._not_json(str(error)) from error

    def _list(self, text: str) -> Iterator[tuple[int, Row]]:
        """Yields the offset of each row of a list, and the row. Rows are parsed one at a time,
        because json.loads blocks all other threads until it returns."""
        at = _skipped(text, _skipped(text, 0) + 1)
        if text[at : at + 1] == "]":
            return
        for number in itertools.count():
            check_wanted()
            try:
                row, end = _row_at(text, at, f"row {number} of {self.name}")
                if not isinstance(row, dict):
                    raise BadRequest(f"row {number} of {self.name} is {row!r:.80}; {AN_OBJECT}")
                yield at, cast(Row, row)
                end = _skipped(text, end)
                at = _skipped(text, end + 1)
                if text[end : end + 1] == "]" and at == len(text):
                    return
                if text[end : end + 1] != ",":
                    raise json.JSONDecodeError("Expecting ',' delimiter", text, end)
            except (ValueError, RecursionError) as error:
                raise self._not_json(str(error)) from error

    def _parsed(self, line: bytes, number: int) -> Row:
        _check_row(line, 0, len(line), f"line {number} of {self.name}")
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

MAX_ROW_BYTES = 64 << 20

MAX_ROW_WEIGHT = 1 << 20
"""The greatest weight of one row (`codec.json_weight`). Parsing such a row blocks all threads for a
quarter of a second."""

WINDOW = 1 << 16
"""Characters of a list that are parsed first to find a row; the window grows if the row does not
end in it. Parsing that many characters takes little time, whatever they contain."""

SPACE = re.compile(r"[ \t\n\r]*")

AT_END = 16
"""An error in the last characters of a window may come from the cut: the window then grows."""


def _check_row(data: bytes | str, start: int, end: int, where: str) -> None:
    """Raises BadRequest for a row that takes too long to read."""
    if end - start <= WINDOW:
        return
    weight = codec.json_weight(data, start, min(end, start + MAX_ROW_BYTES))
    if weight > MAX_ROW_WEIGHT or end - start > MAX_ROW_BYTES:
        raise BadRequest(
            f"{where} has {end - start} bytes with more than {weight} numbers, lists and tables (a "
            f"list or table counts as {codec.BRACKET_WEIGHT}); expected at most {MAX_ROW_BYTES} "
            f"bytes and {MAX_ROW_WEIGHT} of these in a row"
        )


def _skipped(text: str, at: int) -> int:
    """Returns the place of the first character from `at` on that is no white space."""
    space = SPACE.match(text, at)
    return space.end() if space else at


def _row_at(text: str, at: int, where: str) -> tuple[Any, int]:
    """Returns the JSON value at a place of the text, and where it ends. Raises BadRequest for one
    that takes too long to read, and ValueError for what is no JSON."""
    size = WINDOW
    while True:
        end = min(at + size, len(text))
        _check_row(text, at, end, where)
        try:
            row, length = json.JSONDecoder().raw_decode(text[at:end])
            return row, at + length
        except json.JSONDecodeError as error:
            is_cut = error.msg.startswith("Unterminated string") or error.pos > end - at - AT_END
            if end == len(text) or not is_cut:
                raise json.JSONDecodeError(error.msg, text, at + error.pos) from None
        size *= 8


class ListRows:
    """Rows of a list in JSON. In memory are its text and their offsets; a row is read when it is
    needed: as Python's objects all rows could take twenty times as much."""

    def __init__(self, name: str, text: str, offsets: array[int], columns: list[str]) -> None:
        self.column_names = columns
        self._name, self._text, self._offsets = name, text, offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int, /) -> Row:
        where = f"row {index} of {self._name}"
        row, _ = _row_at(self._text, self._offsets[index], where)
        return {name: row.get(name) for name in self.column_names}


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


@dataclass(frozen=True)
class Index:
    """The index of a file: where each row begins, the columns, the types of the columns that are
    not text, and the state of the file."""

    offsets: array[int]
    columns: list[str]
    stamp: tuple[int, ...]
    types: Mapping[str, type] = field(default_factory=dict[str, type])


def _index_of(table: JsonTable | CsvTable) -> Index:
    return _indexed(table) if table.version else table.index()


@functools.lru_cache(maxsize=16)
def _indexed(table: JsonTable | CsvTable) -> Index:
    """Returns the table's `index`, cached for all jobs that read the same content of the file."""
    index = table.index()
    check_version(table.name, digest_of_file(table.path), table.version)
    return index


class FileRows:
    """Rows of a file. Only their offsets are in memory; rows are read when they are needed, so the
    file must not change."""

    def __init__(self, table: JsonTable | CsvTable) -> None:
        self._table, self._index = table, _index_of(table)
        self.column_names, self._stamp = self._index.columns, self._index.stamp

    def __len__(self) -> int:
        return len(self._index.offsets)

    def __getitem__(self, index: int, /) -> Row:
        try:
            with self._table.path.open("rb") as file:
                self._check_same(file.fileno())
                file.seek(self._index.offsets[index])
                row = self._table.read_row(file, self._index)
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


@dataclass(frozen=True)
class CsvTable:
    """A file of comma-separated values. A column is text, unless each of its texts is how Python
    writes a whole number, or a float: "007", "1.50", "NA" and "" stay text."""

    name: str
    path: Path
    version: str | None

    def rows(self) -> Rows:
        return FileRows(self)

    def stream(self) -> Iterator[Row]:
        index = _index_of(self)
        with self.path.open("rb") as file:
            for _, texts in itertools.islice(self._records(file), 1, None):
                yield _typed(texts, index)

    def notes(self) -> list[str]:
        """Returns a sentence for each column that is not read as text."""
        return [
            f"column {column!r} of {self.name} was read as {NUMBERS[kind]}, because each of its "
            "texts is one; to keep it as text, save the file as .jsonl"
            for column, kind in _index_of(self).types.items()
        ]

    def index(self) -> Index:
        with self.path.open("rb") as file:
            stamp, records, offsets = _stamp(file.fileno()), self._records(file), array("Q")
            _, columns = next(records, (0, []))
            kinds = [[*NUMBERS] for _ in columns]
            for offset, texts in records:
                offsets.append(offset)
                for left, text in zip(kinds, texts, strict=True):
                    while left and not _is_written_as(left[0], text):
                        left.pop(0)
        if not offsets:
            raise no_rows(self.name)
        types = {column: left[0] for column, left in zip(columns, kinds, strict=True) if left}
        return Index(offsets, columns, stamp, types)

    def read_row(self, file: BinaryIO, index: Index) -> Row:
        lines = (line.decode("utf-8") for line in file)
        return _typed(next(csv.reader(lines, strict=True)), index)

    def _records(self, file: BinaryIO) -> Iterator[tuple[int, list[str]]]:
        """Yields the offset and the fields of the header, and of each row. Raises BadRequest with
        the line that cannot be read."""
        csv.field_size_limit(MAX_FIELD_CHARS)
        lines = _CountedLines(file)
        reader, begin, num_columns = csv.reader(lines, strict=True), 0, 0
        try:
            for texts in reader:
                if texts and not num_columns:
                    texts = self._header(texts)
                    num_columns = len(texts)
                if texts and len(texts) != num_columns:
                    raise self._unreadable(
                        f"Expected {num_columns} fields in line {reader.line_num}, saw {len(texts)}"
                    )
                if texts:
                    yield begin, texts
                begin = lines.num_bytes
        except (csv.Error, UnicodeDecodeError) as error:
            raise self._unreadable(f"line {lines.number}: {error}") from error

    def _header(self, texts: list[str]) -> list[str]:
        check_columns(texts, self.name)
        for separator, called in ((";", "semicolons"), ("\t", "tabs")):
            if len(texts) == 1 and (names := texts[0].split(separator))[1:]:
                raise BadRequest(
                    f"{self.name} has {called} between its columns ({', '.join(names)}), and is "
                    "read with commas; save it with commas, or as .jsonl"
                )
        times = Counter(texts)
        if twice := next((each for each in texts if each and times[each] > 1), None):
            raise BadRequest(
                f"{self.name} has two columns {twice!r}; expected each name once in its header"
            )
        return [each or f"Unnamed: {at}" for at, each in enumerate(texts)]

    def _unreadable(self, why: str) -> BadRequest:
        return BadRequest(
            f"{self.name} cannot be read as CSV: {why}; expected UTF-8, a header, and rows with as "
            'many fields, those with commas, quotes or line ends in "..."'
        )


MAX_FIELD_CHARS = 1 << 24
"""The csv module's own limit is less than a long prompt. It reads a field without a pause in which
others could work."""

NUMBERS: dict[type, str] = {int: "integers", float: "floats"}

MAX_INT = 2**63
"""Greater whole numbers stay text, because they cannot be sent to the services."""


class _CountedLines(Iterator[str]):
    """The lines of a file as text, with their line ends. `num_bytes` and `number` are of what was
    read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = 0
        self.number = 0

    def __next__(self) -> str:
        check_wanted()
        line = next(self._file)
        self.num_bytes += len(line)
        self.number += 1
        return line.decode("utf-8-sig" if self.number == 1 else "utf-8")


def _is_written_as(kind: type, text: str) -> bool:
    """Whether the text is a number of this kind exactly as Python writes it."""
    try:
        number = kind(text)
    except ValueError:
        return False
    is_sendable = math.isfinite(number) if kind is float else abs(number) < MAX_INT
    return is_sendable and repr(number) == text


def _typed(texts: Sequence[str], index: Index) -> Row:
    pairs = zip(index.columns, texts, strict=True)
    return {name: index.types.get(name, str)(text) for name, text in pairs}


class ArrowRows:
    """Rows of a `datasets.Dataset`, with their chat messages as they were written."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.column_names = rows.column_names

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Row:
        return _from_arrow(self._rows[index])


JSON_TYPES = ("string", "large_string", "bool", "int", "uint", "float", "null")
"""The beginnings of the names of the Arrow types whose values JSON can express."""


def _unsendable(feature: Any) -> str | None:
    """Returns the type in a column that JSON cannot express; None if there is none."""
    if isinstance(feature, dict):
        inner = list(cast(dict[str, Any], feature).values())
    elif isinstance(feature, list):
        inner = cast(list[Any], feature)
    elif hasattr(feature, "feature"):  # a list
        inner = [feature.feature]
    else:
        kind = str(getattr(feature, "dtype", ""))
        media = type(feature).__name__ in ("Image", "Audio", "Video", "Pdf")
        if media:
            return type(feature).__name__.lower()
        return None if kind.startswith(JSON_TYPES) else kind
    return next(filter(None, map(_unsendable, inner)), None)


def _from_arrow(row: Row) -> Row:
    return {name: without_arrow_nones(value) for name, value in row.items()}


@dataclass(frozen=True)
class ArrowTable:
    """A table read by the library `datasets`, with `arguments` for its `load_dataset`. It keeps the
    rows in an Arrow file on disk, not in memory."""

    name: str
    version: str | None
    arguments: dict[str, Any]
    left_out: dict[str, str] = field(default_factory=dict[str, str], compare=False)
    """The types of the columns that cannot be sent to the services, known once rows were read."""

    def rows(self) -> Rows:
        return ArrowRows(self._read(lambda: self._sendable(streaming=False)))

    def stream(self) -> Iterator[Row]:
        rows = self._read(lambda: iter(self._sendable(streaming=True)))
        nothing: Row = {}
        while (row := self._read(lambda: next(rows, nothing))) is not nothing:
            yield _from_arrow(row)

    def notes(self) -> list[str]:
        """Returns a sentence for each column that is left out."""
        return [
            f"column {column!r} of {self.name} is left out of its rows, because its type is "
            f"{kind}; if a reward reads it, convert the column to text or numbers"
            for column, kind in self.left_out.items()
        ]

    def _sendable(self, *, streaming: bool) -> Any:
        """Returns the data set without the columns whose values JSON cannot express."""
        dataset = self._load(streaming=streaming)
        for column, feature in (dataset.features or {}).items():
            if kind := _unsendable(feature):
                self.left_out[column] = kind
        return dataset.remove_columns([*self.left_out]) if self.left_out else dataset

    def _load(self, *, streaming: bool) -> Any:
        import datasets
        from datasets import config

        # Otherwise every read, also of a local file, is reported to Hugging Face, which takes
        # seconds if that is unreachable.
        config.HF_UPDATE_DOWNLOAD_COUNTS = False
        return datasets.load_dataset(**self.arguments, streaming=streaming)

    def _read(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except StopIteration as error:  # raised by `datasets` for an empty file
            raise no_rows(self.name) from error
        except Exception as error:  # reading a foreign file may raise any class
            if isinstance(error, HoneError):
                raise
            for cause in _causes(error):
                if not isinstance(found := unreadable(self.name, cause), BadRequest):
                    raise found from error
            reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
            raise BadRequest(f"{self.name} cannot be read: {reason[0]}") from error


def notes_of(table: Table) -> list[str]:
    """Returns notes on how the table's rows are read, where a user may not expect it."""
    return table.notes() if isinstance(table, CsvTable | ArrowTable) else []


Table = InlineTable | JsonTable | CsvTable | ArrowTable
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


def check_version(name: str, version: str | None, wanted: str | None) -> None:
    """Raises OperatorActionNeeded if a source's content has changed since the job was submitted."""
    if version and wanted and version != wanted:
        raise OperatorActionNeeded(
            f"{name} has changed since the job was submitted (its digest is {version}, expected "
            f"{wanted}): the job would continue with other problems; restore the old file, or "
            "submit a new job"
        )


MAX_COLUMNS = 10_000


def check_columns(columns: Sized, name: str) -> None:
    """Raises BadRequest for too many columns: every row has all of them, so rows that each have
    another column would take space quadratic in their number."""
    if len(columns) > MAX_COLUMNS:
        raise BadRequest(
            f"{name} has more than {MAX_COLUMNS} columns; expected at most as many: put such "
            "values into one column, as a table"
        )


def check_wanted() -> None:
    """Raises Failed if the caller of this work was cancelled."""
    if (end := ended.get()) and end.is_set():
        raise Failed("cancelled: its caller disconnected")


LEAST_EXPANDED, EXPANSION = 1 << 30, 32
"""The rows of a Parquet file may take `LEAST_EXPANDED` bytes in memory, or `EXPANSION` times the
bytes of the file where that is more."""

BATCH_ROWS = 256


@functools.lru_cache(maxsize=64)
def check_expansion(path: Path, name: str, _version: str) -> None:
    """Raises BadRequest for a Parquet file whose rows need far more memory than the file. Parquet
    stores a text that many rows share once, so a file of 2 KB may expand to a TB."""
    from pyarrow.parquet import ParquetFile

    most = max(LEAST_EXPANDED, EXPANSION * path.stat().st_size)
    with ParquetFile(path) as file:
        columns = [file.schema.column(at) for at in range(len(file.schema))]
    texts = [one.path for one in columns if one.physical_type == "BYTE_ARRAY"]
    taken = 0
    with ParquetFile(path, read_dictionary=texts) as file:
        for batch in file.iter_batches(BATCH_ROWS):
            check_wanted()
            taken += sum(map(_expanded_bytes, batch.columns))
            if taken > most:
                raise BadRequest(
                    f"{name} has {path.stat().st_size} bytes, and its rows take more than {most}; "
                    "expected fewer: leave out columns that the job does not read, or texts that "
                    "all rows share (data.template may have them)"
                )


def _expanded_bytes(column: Any) -> int:
    """Returns the bytes of an Arrow array if each row had its own copy of its texts."""
    from pyarrow import compute, types

    made: Any = compute  # pyarrow makes its functions when it is imported
    if types.is_dictionary(column.type):
        lengths = made.binary_length(column.dictionary)
        return int(made.sum(made.take(lengths, column.indices)).as_py() or 0)
    if types.is_map(column.type):
        return sum(map(_expanded_bytes, (column.keys, column.items)))
    if types.is_struct(column.type):
        return sum(map(_expanded_bytes, column.flatten()))
    if types.is_nested(column.type):  # a list
        return 4 * len(column) + _expanded_bytes(column.flatten())
    return int(column.nbytes)


def _lines(file: Any) -> Iterator[tuple[int, bytes, int]]:
    """Yields offset, content and number (from 1) of each line that is not blank."""
    offset = 0
    for number, line in enumerate(file, 1):
        check_wanted()
        if line.removeprefix(BOM_UTF8).strip():
            yield offset, line, number
        offset += len(line)


def _stamp(descriptor: int) -> tuple[int, ...]:
    stat = os.fstat(descriptor)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
