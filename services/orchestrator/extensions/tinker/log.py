"""The operations of a program's model, and its saved weights: files in its run folder, which
outlive every process. `PendingQuota` limits the operations and orders of samples that
wait, by API key.

    operations/00000017.msgpack          operation 17, once it is accepted
    operations/00000017.outcome.msgpack  its outcome, once it is done
    operations/start.msgpack             which operations are final, and never repeated
    operations/session-<id>.msgpack      a session of samples, and its weights
    operations/sample-<id>.msgpack       an order of samples, and .outcome.msgpack
    saved/<number>.msgpack               weights that operation <number> saved, until they expire
    snapshots/s<number>/                 the adapter of a snapshot, which the trainer wrote
    checkpoints/step-<step>/             a checkpoint

Operations are numbered from 1 by the program, and done in this order. The same number again with
the same body is the same operation; with another body it is refused. Final operations are removed
after an hour, with their outcomes: until then a program may request these again. All functions wait
for the disk: call them in a thread.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from shared.errors import BadRequest, Busy, Conflict, Failed
from shared.host import disk
from shared.host.logs import get_logger
from shared.http import codec
from shared.weights.folders import CHECKPOINTS, SNAPSHOT, SNAPSHOTS, step_of
from shared.wire import (
    DeliveredSamples,
    LogStart,
    OperationOutcome,
    ProgramOperation,
    SampleOrder,
    SamplingSession,
    SavedKind,
    SavedWeights,
    Wire,
)

ROOT = "/api/v1"

KINDS: dict[str, tuple[SavedKind, str]] = {
    "weights": ("checkpoint", "training"),
    "sampler_weights": ("snapshot", "sampler"),
    "external_weights": ("export", "external"),
}
"""The kinds by their part of a path, and Tinker's names of their types."""

PARTS = {kind: part for part, (kind, _) in KINDS.items()}

PATH = re.compile(r"tinker://([\w:-]+)/([a-z_]+)/([\w.-]+)")

NAME = re.compile(r"[\w.-]{1,100}")
"""Name of a checkpoint, snapshot or export."""

SESSION = re.compile(r"[0-9]{1,12}|x[0-9a-f]{16}")
"""Name of a sampling session: the number of a snapshot without a name, or "x" and 16 digits of a
digest."""

SAMPLE = re.compile(rf"sample:((?:{SESSION.pattern})--?[0-9]{{1,20}})")
"""The future of an order of samples: the session, and the order's number there."""

MAX_OPERATIONS = 99_999_999
"""Greatest number of an operation: names of files have eight digits."""

NUMBER = re.compile(r"[0-9]{1,8}")
"""The future of an operation, within its model: the operation's number. 0: the model itself."""


def path_to(model_id: str, kind: SavedKind, name: str) -> str:
    return f"tinker://{model_id}/{PARTS[kind]}/{name}"


def read_path(path: Any, kind: SavedKind) -> tuple[str, str]:
    """Returns the model's id and the name of a path `tinker://MODEL/PART/NAME`. Raises BadRequest
    for any other path."""
    found = PATH.fullmatch(str(path))
    if not found or found[2] != PARTS[kind]:
        raise BadRequest(f"the path is {path!r:.200}; expected tinker://MODEL/{PARTS[kind]}/NAME")
    return found[1], found[3]


def read_name(path: Any) -> str:
    """Returns the name under which weights are saved. Raises BadRequest."""
    if not isinstance(path, str) or not NAME.fullmatch(path) or not path.strip("."):
        raise BadRequest(
            f"'path': got {path!r:.120}; expected a name of letters, digits, '.', '_' and '-', of "
            "at most 100 characters"
        )
    return path


def future_of(model_id: str, number: int) -> str:
    """Returns the id of an operation's future."""
    return f"{model_id}:{number}"


W = TypeVar("W", bound=Wire)

FOLDER = "operations"

KEPT_S = 3600.0
"""Seconds for which final operations and samples are kept."""

MAX_END_BYTES = 1024
"""More bytes than the operation that ends a model has, so larger files need not be read."""


class OperationLog:
    """The log in the run folder `run`."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._folder = run / FOLDER

    def accept(self, number: int, operation: ProgramOperation) -> None:
        """Returns once the operation is on disk. Raises Conflict, "body_differs", for a number that
        was used with another body."""
        if not self.run.is_dir():
            raise Failed(f"the run folder {self.run} does not exist", code="run_folder_gone")
        if number < self.start().number and self.operation(number) is None:
            raise Conflict(f"operation {number} was done long ago; expected a new number")
        if not self._create(f"{number:08}", operation):
            known = self.operation(number)
            if known is None or known.digest != operation.digest:
                raise _differs(f"operation {number} was accepted")

    def _create(self, name: str, stored: Wire) -> bool:
        """Returns once the file is on disk; False if it existed already."""
        disk.make_folder(self._folder)
        try:
            disk.create_file(self._file(name), _packed(stored))
        except FileExistsError:
            return False
        return True

    def refuse(self, number: int, digest: str, error: str) -> None:
        """Records that the request with this number is refused, unless it was accepted."""
        with contextlib.suppress(Conflict):
            self.accept(number, ProgramOperation(kind="refused", digest=digest))
            self.finish(number, OperationOutcome(error=error))

    def operation(self, number: int) -> ProgramOperation | None:
        """Returns the operation; None if it has not arrived."""
        return _read(self._file(f"{number:08}"), ProgramOperation)

    def outcome(self, number: int) -> OperationOutcome | None:
        """Returns the operation's outcome; None if it is not done."""
        return _read(self._file(f"{number:08}.outcome"), OperationOutcome)

    def finish(self, number: int, outcome: OperationOutcome) -> None:
        """Stores the operation's outcome."""
        disk.write_file(self._file(f"{number:08}.outcome"), _packed(outcome))

    def newest(self) -> int:
        """Returns the greatest number that has arrived; 0 without any."""
        names = (path.name for path in self._folder.glob("[0-9]*.msgpack"))
        return max((int(name[:8]) for name in names), default=self.start().number - 1)

    def end(self) -> int | None:
        """Returns the number of the operation that ends the model; None if there is none.
        Operations that arrived at the same time may have later numbers."""
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
        """Makes the log begin there, and removes operations that are no longer needed."""
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
        """Removes samples that were delivered more than an hour ago."""
        for file in _old(self._folder.glob("sample-*.outcome.msgpack")):
            name = file.name.removesuffix(".outcome.msgpack")
            self._file(name).unlink(missing_ok=True)
            file.unlink(missing_ok=True)

    def pending(self) -> list[str]:
        """Returns the names of operations and of orders of samples without an outcome."""
        names = {file.name.removesuffix(".msgpack") for file in self._folder.glob("*.msgpack")}
        return [
            name
            for name in names
            if (name.isdecimal() or name.startswith("sample-"))
            and not name.endswith(".outcome")
            and f"{name}.outcome" not in names
        ]

    def pending_bytes(self, name: str) -> int:
        """Returns the bytes on disk of an operation or an order of samples; 0 once it is done, or
        before it has arrived."""
        if self._file(f"{name}.outcome").exists():
            return 0
        with contextlib.suppress(FileNotFoundError):
            return self._file(name).stat().st_size
        return 0

    def undelivered(self) -> list[str]:
        """Returns the ids of the orders whose samples are not delivered yet."""
        samples = sorted(name for name in self.pending() if name.startswith("sample-"))
        return [name.removeprefix("sample-") for name in samples]

    def open_session(self, id: str, session: SamplingSession) -> None:
        """Returns once the session is on disk; an existing one is kept. Raises Conflict,
        "body_differs", for an id that was used with other weights."""
        if not self._create(f"session-{id}", session):
            known = self.session(id)
            if known is None or known.of_path != session.of_path:
                raise _differs(f"session {id} was opened")

    def sessions(self) -> list[str]:
        """Returns the names of the sessions, in no order."""
        return [file.stem.removeprefix("session-") for file in self._folder.glob("session-*")]

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
        that was used with another order."""
        if not self._create(f"sample-{id}", order) and self.ordered(id) != order:
            raise _differs(f"sample {id} was ordered")

    def ordered(self, id: str) -> SampleOrder | None:
        return _read(self._file(f"sample-{id}"), SampleOrder)

    def samples(self, id: str) -> DeliveredSamples | None:
        """Returns the samples; None if they are not delivered yet."""
        return _read(self._file(f"sample-{id}.outcome"), DeliveredSamples)

    def deliver(self, id: str, samples: DeliveredSamples) -> None:
        disk.write_file(self._file(f"sample-{id}.outcome"), _packed(samples))

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.msgpack"


def _old(files: Iterable[Path]) -> Iterator[Path]:
    """Yields the files that are older than KEPT_S."""
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


# --- limits on pending operations ----------------------------------------------------------------

MAX_PENDING = 4096
"""Most pending operations and orders of samples of one API key."""

MAX_PENDING_BYTES = 1 << 29
"""Bytes on disk of pending operations and orders at which an API key's requests are refused: a
hundred calls of 5 MB, the most that the SDK sends at a time."""

QUOTA_RETRY_AFTER_S = 2


@dataclass
class Pending:
    """The pending operations and orders of an API key: their bytes by run folder and name."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    sizes: dict[tuple[Path, str], int] = field(default_factory=dict[tuple[Path, str], int])
    seen: set[Path] = field(default_factory=set[Path])
    counted_at: float = -math.inf


class PendingQuota:
    """Limits the operations and orders of samples that wait to be done, by API key. They are
    counted on disk: the folder of a model that is new to this process is read first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[str, Pending] = {}

    def check(self, key: str, log: OperationLog, name: str) -> None:
        """Raises Busy if the key has reached a limit, unless the operation `name` was accepted
        before."""
        with self._of(key, log) as pending:
            if log.pending_bytes(name):
                return
            if _is_full(pending.sizes):
                _count_again(pending)
            if _is_full(pending.sizes):
                raise Busy(
                    f"{len(pending.sizes)} operations and orders of samples wait to be done, which "
                    f"take {sum(pending.sizes.values())} bytes; expected fewer than {MAX_PENDING}, "
                    f"and than {MAX_PENDING_BYTES} bytes, of one API key: ask again when some are "
                    "done",
                    retry_after_s=QUOTA_RETRY_AFTER_S,
                )

    def note(self, key: str, log: OperationLog, name: str) -> None:
        """Counts a new operation or order."""
        with self._of(key, log) as pending:
            if num_bytes := log.pending_bytes(name):
                pending.sizes[log.run, name] = num_bytes

    @contextlib.contextmanager
    def _of(self, key: str, log: OperationLog) -> Generator[Pending]:
        """Yields the key's pending operations, locked. Other keys do not wait for its disk."""
        with self._lock:
            pending = self._pending.setdefault(key, Pending())
        with pending.lock:
            if log.run not in pending.seen:
                pending.seen.add(log.run)
                pending.sizes |= {
                    (log.run, name): log.pending_bytes(name) for name in log.pending()
                }
            yield pending


def _count_again(pending: Pending) -> None:
    """Removes finished operations from the count: not often, for it reads thousands of files."""
    now = time.monotonic()
    if now < pending.counted_at + QUOTA_RETRY_AFTER_S:
        return
    pending.counted_at = now
    for run, one in [*pending.sizes]:
        if not OperationLog(run).pending_bytes(one):
            del pending.sizes[run, one]


def _is_full(pending: dict[tuple[Path, str], int]) -> bool:
    return len(pending) >= MAX_PENDING or sum(pending.values()) >= MAX_PENDING_BYTES


SAVED_FOLDER = "saved"

UNNAMED_S = 3600.0
"""Seconds that a snapshot without a name stays after its last sample."""


@dataclass(frozen=True)
class SavedFolder:
    """The list of the weights that the model of the run folder `run` saved."""

    run: Path

    def add(self, saved: SavedWeights) -> None:
        """Returns once the entry is on disk. Replaces the entry of that number."""
        disk.make_folder(self.run / SAVED_FOLDER)
        disk.write_file(self._file(saved.number), _packed(saved))

    def all(self) -> list[SavedWeights]:
        """Returns the entries that have not expired, in the order of the operations."""
        return [saved for saved in self._entries() if not self._is_expired(saved)]

    def expired(self) -> list[SavedWeights]:
        return [saved for saved in self._entries() if self._is_expired(saved)]

    def _entries(self) -> list[SavedWeights]:
        return [saved for saved in map(self._read, self._files()) if saved]

    def _has_unreadable(self) -> bool:
        return any(self._read(file) is None for file in self._files())

    def _files(self) -> list[Path]:
        return sorted((self.run / SAVED_FOLDER).glob("*.msgpack"))

    def find(self, kind: SavedKind, name: str) -> SavedWeights | None:
        """Returns the newest of that kind and name."""
        return next(
            (one for one in reversed(self.all()) if (one.kind, one.name) == (kind, name)), None
        )

    def steps(self) -> tuple[int, ...]:
        """Returns the steps of all checkpoints whose entries have not been removed. An entry that
        cannot be read may be of any checkpoint."""
        if self._has_unreadable():
            return tuple(sorted(_steps_in(self.run / CHECKPOINTS)))
        return tuple(sorted({one.step for one in self._entries() if one.kind != "snapshot"}))

    def use(self, number: int) -> None:
        """Records that a snapshot is sampled now."""
        with contextlib.suppress(FileNotFoundError):
            self._file(number).touch()

    def remove(self, saved: SavedWeights) -> None:
        """Removes the weights, unless another entry or the model needs them, and the entry. The
        entry is removed last, so that an interrupted removal is repeated."""
        if saved.kind == "snapshot":
            _discard(self.run / SNAPSHOTS / f"{SNAPSHOT}{saved.number}")
        elif not self._is_needed(saved):
            _discard(Path(saved.path))
        self._file(saved.number).unlink(missing_ok=True)

    def _is_needed(self, saved: SavedWeights) -> bool:
        """Whether another entry has the checkpoint's folder, or it is the newest."""
        others = (one for one in self._entries() if one.number != saved.number)
        if saved.step in {one.step for one in others if one.kind != "snapshot"}:
            return True
        newest = max(_steps_in(Path(saved.path).parent), default=0)
        return saved.step >= newest or self._has_unreadable()

    def change(self, saved: SavedWeights) -> None:
        """Replaces an entry, unless it was removed meanwhile."""
        if self._file(saved.number).exists():
            self.add(saved)

    def _is_expired(self, saved: SavedWeights) -> bool:
        expires_at = saved.expires_at
        if not saved.name:
            with contextlib.suppress(FileNotFoundError):
                expires_at = self._file(saved.number).stat().st_mtime + UNNAMED_S
        return expires_at is not None and expires_at < time.time()

    def _file(self, number: int) -> Path:
        return self.run / SAVED_FOLDER / f"{number:08}.msgpack"

    def _read(self, file: Path) -> SavedWeights | None:
        """Returns the entry; None if it does not exist or cannot be read."""
        try:
            return _read(file, SavedWeights)
        except BadRequest as error:
            get_logger().warning("entry is not valid", path=str(file), detail=error.detail)
            return None


def _steps_in(checkpoints: Path) -> set[int]:
    """Returns the steps of the folders `step-*`."""
    found = (step_of(path.name) for path in checkpoints.glob("step-*"))
    return {step for step in found if step is not None}


def _discard(folder: Path) -> None:
    """Removes a folder; readers never see it half removed."""
    aside = folder.with_name(f".tmp-{folder.name}")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
