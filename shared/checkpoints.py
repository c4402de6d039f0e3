"""What a checkpoint's folder says of its own files: written by the trainer, and read by the
orchestrator, which hands them out."""

from __future__ import annotations

from shared.wire import Wire

STATE = "trainer"
"""The folder within it from which training goes on; what plain `transformers` loads is beside."""

MANIFEST = f"{STATE}/manifest.json"


class StoredFile(Wire):
    """A file of a checkpoint as it was written. `crc32` is that of zlib."""

    size_bytes: int
    crc32: int
