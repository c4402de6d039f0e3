"""The checkpoints of a run folder, and the files of each, by the manifest that the trainer wrote
with them. Only files in the manifest are served."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from shared.errors import BadRequest, Failed, NotFound
from shared.job import Job
from shared.weights.folders import MANIFEST, STATE, StoredFile, step_of
from shared.wire import CheckpointFile

_FILES = TypeAdapter(dict[str, StoredFile])


def checkpoint_step(path: Path, checkpoints: Path) -> int | None:
    """Returns the step of the checkpoint at or around `path`; None for a path in no checkpoint of
    the folder `checkpoints`."""
    inside = path.resolve().relative_to(checkpoints.resolve()).parts
    return step_of(inside[0]) if inside else None


def files_of(folder: Path) -> tuple[CheckpointFile, ...]:
    """Returns the files of the checkpoint at `folder`, its manifest included, by name. Raises
    NotFound for a removed checkpoint, and Failed for an unreadable manifest."""
    try:
        text = (folder / MANIFEST).read_bytes()
        files = _FILES.validate_python(json.loads(text)["files"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"the checkpoint {str(folder)!r} is not there any more") from error
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        why = f"{type(error).__name__}: {error}"
        raise Failed(f"{str(folder / MANIFEST)!r} cannot be read: {why:.300}") from error
    files[MANIFEST] = StoredFile(size_bytes=len(text), crc32=zlib.crc32(text))
    return tuple(
        CheckpointFile(name=name, size_bytes=file.size_bytes, crc32=file.crc32)
        for name, file in sorted(files.items())
    )


def path_of(folder: Path, name: str) -> Path:
    """Returns the path of the file `name`. Raises NotFound for a file that is not in the
    checkpoint, and Failed if its size differs from the manifest."""
    sizes = {file.name: file.size_bytes for file in files_of(folder)}
    path = folder / name
    if name not in sizes or not path.resolve().is_relative_to(folder.resolve()):
        some = ", ".join([*sizes][:10]) + (", ..." if len(sizes) > 10 else "")
        raise NotFound(f"the checkpoint has no file {name!r:.200}; its files are {some}")
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"{str(path)!r} is not there any more") from error
    if size != sizes[name]:
        raise Failed(
            f"{str(path)!r} is damaged: it has {size} bytes; expected {sizes[name]}, as the "
            "checkpoint's manifest says; download another checkpoint"
        )
    return path


def check_start(job: Job, runs_dir: Path) -> None:
    """Raises BadRequest for a checkpoint that the job cannot begin with (`training.start_from`)."""
    if (start := job.training.start_from) is None:
        return
    folder = Path(start).resolve()
    if not folder.is_relative_to(runs_dir.resolve()) or not (folder / STATE).is_dir():
        raise BadRequest(
            f"training.start_from is {start!r:.200}, which is no checkpoint below HONE_RUNS_DIR; "
            "expected the full path of one, as `hone checkpoints JOB` lists them"
        )
    try:
        source = Job.model_validate(json.loads((folder / MANIFEST).read_bytes())["job"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise BadRequest(f"training.start_from: {str(folder / MANIFEST)!r}: {why:.300}") from error
    theirs, ours = _adapter(source), _adapter(job)
    if theirs != ours:
        raise BadRequest(
            f"training.start_from is a checkpoint with {theirs}, and the job has {ours}; expected "
            "the same"
        )


def _adapter(job: Job) -> str:
    """Returns what of a job's adapter a checkpoint has to fit."""
    if (lora := job.lora) is None:
        return "all weights"
    layers = lora.target_modules
    return f"lora of rank {lora.rank}, alpha {lora.alpha:g}, target_modules {layers!r}"
