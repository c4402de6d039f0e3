"""The checkpoints and snapshots of a model, in its run folder, until they are removed or expire.

    saved/<number>.msgpack    what operation <number> saved
    snapshots/s<number>/      the adapter of a snapshot, which the trainer wrote
    checkpoints/step-<step>/  a checkpoint

Several checkpoints may be of one step, and so one folder. The newest folder stays as long as the
model does, which resumes from it. All functions wait for the disk: call them in a thread.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from shared.errors import BadRequest
from shared.host import disk
from shared.host.logs import get_logger
from shared.http import codec
from shared.weights.folders import CHECKPOINTS, SNAPSHOT, SNAPSHOTS, step_of
from shared.wire import SavedKind, SavedWeights

FOLDER = "saved"

UNNAMED_S = 3600.0
"""Seconds that a snapshot without a name stays after its last sample."""


@dataclass(frozen=True)
class Saved:
    """What the model of the run folder `run` saved."""

    run: Path

    def add(self, saved: SavedWeights) -> None:
        """Returns once the entry is on disk. Replaces the entry of that number."""
        disk.make_folder(self.run / FOLDER)
        disk.write_file(self._file(saved.number), codec.encode(saved, codec.MSGPACK))

    def all(self) -> list[SavedWeights]:
        """Returns what is there and has not expired, in the order of the operations."""
        return [saved for saved in self._entries() if not self._is_expired(saved)]

    def expired(self) -> list[SavedWeights]:
        return [saved for saved in self._entries() if self._is_expired(saved)]

    def _entries(self) -> list[SavedWeights]:
        return [saved for saved in map(self._read, self._files()) if saved]

    def _has_unreadable(self) -> bool:
        return any(self._read(file) is None for file in self._files())

    def _files(self) -> list[Path]:
        return sorted((self.run / FOLDER).glob("*.msgpack"))

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
        """Notes that a snapshot is sampled now."""
        with contextlib.suppress(FileNotFoundError):
            self._file(number).touch()

    def remove(self, saved: SavedWeights) -> None:
        """Removes the weights, unless another entry or the model needs them, and the entry. The
        entry goes last: a removal that was cut off is made again."""
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
        return self.run / FOLDER / f"{number:08}.msgpack"

    def _read(self, file: Path) -> SavedWeights | None:
        """Returns the entry; None if it is not there, or cannot be read."""
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return codec.decode(SavedWeights, data, codec.MSGPACK)
        except BadRequest as error:
            get_logger().warning("entry is not valid", path=str(file), detail=error.detail)
            return None


def _steps_in(checkpoints: Path) -> set[int]:
    """Returns the steps of the folders `step-*`."""
    found = (step_of(path.name) for path in checkpoints.glob("step-*"))
    return {step for step in found if step is not None}


def _discard(folder: Path) -> None:
    """Removes a folder of which no one may see half."""
    aside = folder.with_name(f".tmp-{folder.name}")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
