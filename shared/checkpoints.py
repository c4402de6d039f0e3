"""What a checkpoint's folder says of its own files: written by the trainer, read by the
orchestrator, which hands them out, and compared by who downloads them."""

from __future__ import annotations

import zlib
from pathlib import Path

from shared.wire import Wire

BLOCK_BYTES = 1 << 20

STATE = "trainer"
"""The folder within it from which training goes on; what plain `transformers` loads is beside."""

MANIFEST = f"{STATE}/manifest.json"


class StoredFile(Wire):
    """A file of a checkpoint as it was written. `crc32` is that of zlib."""

    size_bytes: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> StoredFile:
        """Returns what the file at `path` is now."""
        size_bytes = crc32 = 0
        with path.open("rb") as stream:
            while block := stream.read(BLOCK_BYTES):
                size_bytes += len(block)
                crc32 = zlib.crc32(block, crc32)
        return cls(size_bytes=size_bytes, crc32=crc32)
