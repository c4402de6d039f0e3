"""A checkpoint's folder: its name, and the list of its own files. The trainer writes both, the
orchestrator serves the files, and a download is compared with the list."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from shared.wire import Wire

BLOCK_BYTES = 1 << 20

STATE = "trainer"
"""The subfolder that training resumes from. The files that plain `transformers` loads are beside
it."""

MANIFEST = f"{STATE}/manifest.json"

_NAME = re.compile(r"step-(\d+)")


def folder_name(step: int) -> str:
    """Returns the name of the folder with the checkpoint of `step`."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """Returns the step of the checkpoint in a folder of that name; None for any other folder."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


class StoredFile(Wire):
    """A file of a checkpoint as it was written. `crc32` is zlib's checksum."""

    size_bytes: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> StoredFile:
        """Returns the entry of the file at `path` as it is now."""
        size_bytes = crc32 = 0
        with path.open("rb") as stream:
            while block := stream.read(BLOCK_BYTES):
                size_bytes += len(block)
                crc32 = zlib.crc32(block, crc32)
        return cls(size_bytes=size_bytes, crc32=crc32)
