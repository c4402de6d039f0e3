"""Checkpoints: `<runs_dir>/<job>/checkpoints/step-000100/`, a Hugging Face folder that plain `transformers` loads.

Model, configuration, generation configuration and tokenizer; complete or absent, and on disk before it is answered for.

Left out: optimizer state. It will live beside these files, in the same folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from services.trainer.folders import size_of, written_aside
from shared.wire import Checkpoint

PREFIX = "step-"


def checkpoints_dir(runs_dir: Path, job_id: str) -> Path:
    return runs_dir.resolve() / job_id / "checkpoints"


def write(folder: Path, step: int, size_bytes: int, save: Callable[[Path], None]) -> Checkpoint:
    """Returns the checkpoint of `step` below `folder`, written by `save(folder)`. Raises Failed, leaving nothing."""
    target = folder / f"{PREFIX}{step:06d}"
    with written_aside(target, size_bytes, durable=True) as aside:
        save(aside)
    return _read(target)


def listed(folder: Path) -> tuple[Checkpoint, ...]:
    """Returns the complete checkpoints below `folder`, oldest step first."""
    found = folder.glob(PREFIX + "*") if folder.is_dir() else ()
    return tuple(sorted((_read(path) for path in found), key=lambda checkpoint: checkpoint.step))


def _read(path: Path) -> Checkpoint:
    return Checkpoint(step=int(path.name.removeprefix(PREFIX)), path=str(path), size_bytes=size_of(path))
