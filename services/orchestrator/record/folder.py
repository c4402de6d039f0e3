"""The run folder: everything a job leaves behind, as files that outlive every service.

    runs/<job>/job.json           the job as it was submitted
               metrics.jsonl      one line a step
               rollouts/000012.msgpack   the scored batch of step 12 (wire.Batch)
               checkpoints/       Hugging Face checkpoints, written by the trainer
               summary.json       written once, at the end
    runs/<name>                   points at the newest job of that name

A file is complete or absent: written aside, flushed to disk, renamed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from shared import codec
from shared.errors import Failed, NotFound
from shared.job import Job
from shared.wire import Batch, MetricsRow


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, job: Job) -> None:
        """Makes the folder and `job.json`, and points `runs/<name>` here. Doing it again changes
        nothing."""
        with _disk(self.path):
            (self.path / "rollouts").mkdir(parents=True, exist_ok=True)
            self._write("job.json", job.model_dump_json(indent=2).encode())
            _point(self.path.parent / job.name, self.path.name)

    def start_at(self, last_step: int) -> int | None:
        """Returns the last recorded step up to `last_step`, or None if there is none. Drops what
        was recorded of later ones, which will be done again."""
        rows = [row for row in self.metrics() if row.step <= last_step]
        self._write("metrics.jsonl", b"".join(_metrics_line(row) for row in rows))
        return rows[-1].step if rows else None

    def append_metrics(self, row: MetricsRow) -> None:
        with _disk(self.path), (self.path / "metrics.jsonl").open("ab") as file:
            file.write(_metrics_line(row))
            file.flush()
            os.fsync(file.fileno())

    def metrics(self, after_step: int = -1) -> list[MetricsRow]:
        """Returns the rows after `after_step`, in order. A last line that a crash cut short is not
        a row."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        lines = [line for line in path.read_bytes().split(b"\n")[:-1] if line]
        rows = (json.loads(line) for line in lines)
        return [
            MetricsRow(step=row.pop("step"), metrics=row)
            for row in rows
            if row["step"] > after_step
        ]

    def write_batch(self, batch: Batch) -> None:
        self._write(f"rollouts/{batch.step:06d}.msgpack", codec.encode(batch, codec.MSGPACK))

    def batch(self, step: int) -> Batch:
        """Returns the scored batch of `step`; raises NotFound naming the steps there are."""
        path = self.path / f"rollouts/{step:06d}.msgpack"
        if not path.exists():
            steps = self.batch_steps()
            have = f"steps {steps[0]} to {steps[-1]} have" if steps else "no step has yet"
            raise NotFound(f"step {step} has no stored rollouts; {have}")
        return codec.decode(Batch, path.read_bytes(), codec.MSGPACK)

    def batch_steps(self) -> list[int]:
        return sorted(int(path.stem) for path in (self.path / "rollouts").glob("*.msgpack"))

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._write("summary.json", json.dumps(summary, indent=2).encode())

    def _write(self, name: str, data: bytes) -> None:
        path = self.path / name
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with _disk(self.path):
            try:
                with aside.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                aside.replace(path)
            finally:
                aside.unlink(missing_ok=True)


def _metrics_line(row: MetricsRow) -> bytes:
    return json.dumps({"step": row.step, **row.metrics}).encode() + b"\n"


def _point(link: Path, target: str) -> None:
    """Makes `link` a symbolic link to its sibling `target`, unless something that is no link is in
    its place."""
    if link.exists() and not link.is_symlink():
        return
    aside = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    aside.symlink_to(target)
    aside.replace(link)


@contextlib.contextmanager
def _disk(path: Path) -> Generator[None]:
    """Turns a failing disk into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free_mib = shutil.disk_usage(_existing(path)).free >> 20
            raise Failed(
                f"the disk of run folder {str(path)!r} is full ({free_mib} MiB free); free some "
                "space and submit again"
            ) from error
        raise Failed(
            f"cannot write to run folder {str(path)!r}: {error.strerror or error}; check "
            "HONE_RUNS_DIR"
        ) from error


def _existing(path: Path) -> Path:
    candidates: Iterator[Path] = iter((path, *path.parents))
    return next(candidate for candidate in candidates if candidate.exists())
