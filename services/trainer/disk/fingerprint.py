"""Telling one model from another without reading all of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from transformers.utils.hub import cached_file

from shared.errors import Failed
from shared.job import Job

PATTERNS = ("config.json", "*.safetensors", "*.bin")
END_BYTES = 1 << 20


def model_fingerprint(job: Job) -> str:
    """Returns 16 hex digits that differ for another configuration, other tensors, or other weights
    in any file's first or last MiB.

    A safetensors file begins with the names, shapes and places of all its tensors. The job's model
    must be in reach already.
    """
    digest = hashlib.sha256()
    folder = _folder(job)
    for file in sorted(file for pattern in PATTERNS for file in folder.glob(pattern)):
        size_bytes = file.stat().st_size
        digest.update(f"{file.name} {size_bytes}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(END_BYTES))
            stream.seek(max(0, size_bytes - END_BYTES), os.SEEK_SET)
            digest.update(stream.read(END_BYTES))
    return digest.hexdigest()[:16]


def _folder(job: Job) -> Path:
    if Path(job.model).is_dir():
        return Path(job.model)
    file = cached_file(job.model, "config.json", revision=job.model_revision)
    if file is None:
        raise Failed(f"the model {job.model!r} has no config.json")
    return Path(file).parent
