"""The operations of a program's model: files in its run folder, so that they outlive every process.

    operations/00000017.msgpack          operation 17, once it is accepted
    operations/00000017.outcome.msgpack  what it did, once it is done
    operations/start.msgpack             which operations are done for good
    operations/session-<id>.msgpack      a session of samples, and the weights that it samples by
    operations/sample-<id>.msgpack       samples that were asked for, and .outcome.msgpack

Operations are numbered from 1 by the program, and done in this order. The same number again with
the same body is the same operation; with another body it is refused. What is done for good is
removed after an hour, with its outcome: until then a program may ask for it again. All functions
wait for the disk: call them in a thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from shared.errors import Conflict, Failed
from shared.host import disk
from shared.http import codec
from shared.wire import (
    DeliveredSamples,
    LogStart,
    OperationOutcome,
    ProgramOperation,
    SampleOrder,
    SamplingSession,
    Wire,
)

W = TypeVar("W", bound=Wire)

FOLDER = "operations"

KEPT_S = 3600.0
"""Seconds that what is done for good stays, and samples do."""

MAX_END_BYTES = 1024
"""More than a model's end takes on disk. It has no data, so larger files need not be read."""


class OperationLog:
    """The log in the run folder `run`."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._folder = run / FOLDER

    def accept(self, number: int, operation: ProgramOperation) -> None:
        """Returns once the operation is on disk. Raises Conflict, "body_differs", for a number that
        came with another body."""
        if not self._run.is_dir():
            raise Failed(f"the run folder {self._run} is gone", code="run_folder_gone")
        if number < self.start().number and self.operation(number) is None:
            raise Conflict(f"operation {number} was done long ago; expected a new number")
        if not self._create(f"{number:08}", operation):
            known = self.operation(number)
            if known is None or known.digest != operation.digest:
                raise _differs(f"operation {number} was accepted")

    def _create(self, name: str, stored: Wire) -> bool:
        """Returns once the file is on disk; False if it was there."""
        disk.make_folder(self._folder)
        try:
            disk.create_file(self._file(name), _packed(stored))
        except FileExistsError:
            return False
        return True

    def refuse(self, number: int, digest: str, error: str) -> None:
        """Notes that the request with this number cannot be done, unless the number has come."""
        with contextlib.suppress(Conflict):
            self.accept(number, ProgramOperation(kind="refused", digest=digest))
            self.finish(number, OperationOutcome(error=error))

    def operation(self, number: int) -> ProgramOperation | None:
        """Returns the operation; None if it has not come."""
        return _read(self._file(f"{number:08}"), ProgramOperation)

    def outcome(self, number: int) -> OperationOutcome | None:
        """Returns what the operation did; None if it is not done."""
        return _read(self._file(f"{number:08}.outcome"), OperationOutcome)

    def finish(self, number: int, outcome: OperationOutcome) -> None:
        """Stores what the operation did."""
        disk.write_file(self._file(f"{number:08}.outcome"), _packed(outcome))

    def newest(self) -> int:
        """Returns the greatest number that has come; 0 without any."""
        names = (path.name for path in self._folder.glob("[0-9]*.msgpack"))
        return max((int(name[:8]) for name in names), default=self.start().number - 1)

    def end(self) -> int | None:
        """Returns the number of the model's end; None if none has come. Operations that arrived at
        the same time may have later numbers."""
        for file in sorted(self._folder.glob("[0-9]*[0-9].msgpack"), reverse=True):
            with contextlib.suppress(FileNotFoundError):  # done meanwhile
                if file.stat().st_size > MAX_END_BYTES:
                    continue
            operation = _read(file, ProgramOperation)
            if operation is not None and operation.kind == "unload":
                return int(file.stem)
        return None

    def start(self) -> LogStart:
        return _read(self._file("start"), LogStart) or LogStart()

    def advance(self, start: LogStart) -> None:
        """Makes the log begin there, and removes what no one can need any more."""
        disk.write_file(self._file("start"), _packed(start))
        done = (
            file
            for file in self._folder.glob("[0-9]*.outcome.msgpack")
            if int(file.name[:8]) < start.number
        )
        for file in _old(done):
            self._file(file.name[:8]).unlink(missing_ok=True)
            file.unlink(missing_ok=True)

    def forget_samples(self) -> None:
        """Removes samples that were delivered an hour ago."""
        for file in _old(self._folder.glob("sample-*.outcome.msgpack")):
            name = file.name.removesuffix(".outcome.msgpack")
            self._file(name).unlink(missing_ok=True)
            file.unlink(missing_ok=True)

    def undelivered(self) -> list[str]:
        """Returns the ids of the orders of samples that have none yet."""
        names = {file.name.removesuffix(".msgpack") for file in self._folder.glob("sample-*")}
        return [
            name.removeprefix("sample-")
            for name in sorted(names)
            if not name.endswith(".outcome") and f"{name}.outcome" not in names
        ]

    def open_session(self, id: str, session: SamplingSession) -> None:
        """Returns once the session is on disk; one that is there stays. Raises Conflict,
        "body_differs", for an id that came with other weights."""
        if not self._create(f"session-{id}", session):
            known = self.session(id)
            if known is None or known.of_path != session.of_path:
                raise _differs(f"session {id} was opened")

    def session(self, id: str) -> SamplingSession | None:
        """Returns the session; None without one."""
        return _read(self._file(f"session-{id}"), SamplingSession)

    def changed_at(self) -> float | None:
        """Returns when the newest operation was accepted, in Unix seconds; None without one."""
        with contextlib.suppress(FileNotFoundError):
            return self._file(f"{self.newest():08}").stat().st_mtime
        return None

    def order(self, id: str, order: SampleOrder) -> None:
        """Returns once the order of samples is on disk. Raises Conflict, "body_differs", for an id
        that came with another order."""
        if not self._create(f"sample-{id}", order) and self.ordered(id) != order:
            raise _differs(f"sample {id} was ordered")

    def ordered(self, id: str) -> SampleOrder | None:
        return _read(self._file(f"sample-{id}"), SampleOrder)

    def samples(self, id: str) -> DeliveredSamples | None:
        """Returns the samples; None if they are not there yet."""
        return _read(self._file(f"sample-{id}.outcome"), DeliveredSamples)

    def deliver(self, id: str, samples: DeliveredSamples) -> None:
        disk.write_file(self._file(f"sample-{id}.outcome"), _packed(samples))

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.msgpack"


def _old(files: Iterable[Path]) -> Iterator[Path]:
    """Yields the files that have stayed as long as they are to."""
    latest = time.time() - KEPT_S
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            if file.stat().st_mtime < latest:
                yield file


def _differs(what: str) -> Conflict:
    return Conflict(
        f"{what} with another body; expected the same body again, or a new number",
        code="body_differs",
    )


def _packed(stored: Wire) -> bytes:
    return codec.encode(stored, codec.MSGPACK)


def _read(path: Path, kind: type[W]) -> W | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return codec.decode(kind, data, codec.MSGPACK)
