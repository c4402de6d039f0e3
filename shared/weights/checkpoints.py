"""The folders that a trainer writes: a checkpoint (its name, and the list of its own files) and a
LoRA adapter. The orchestrator serves a checkpoint's files, and a download is compared with the
list. The sampler reads adapters as PEFT writes them:

    adapter_model.safetensors   base_model.model.<layer>.lora_A.weight [rank, in]
                                base_model.model.<layer>.lora_B.weight [out, rank]
    adapter_config.json         rank, alpha and the names of the layers, among others
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from shared.errors import Failed
from shared.weights.digest import digest_of_bytes, stored_tensors, tensor_digests
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


CHECKPOINTS = "checkpoints"
"""The folder, in a run folder, of checkpoints."""

SNAPSHOTS = "snapshots"
"""The folder, in a run folder, of adapters that stay for samplers."""

SNAPSHOT = "s"
"""What the name of a snapshot's folder begins with; the operation's number follows."""

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
FILES = (CONFIG, WEIGHTS)

PREFIX = "base_model.model."
"""Prefix of a base model layer's name in the adapter's tensors."""


def adapter_digests(folder: Path) -> dict[str, str]:
    """Returns the digest of each tensor and, under its file's name, of the configuration: without
    its alpha the tensors say nothing. Raises Failed for files that cannot be read."""
    try:
        config = (folder / CONFIG).read_bytes()
        digests = tensor_digests(stored_tensors(folder))
    except OSError as error:
        raise Failed(f"no adapter can be read from {str(folder)!r}: {error}") from error
    return {**digests, CONFIG: digest_of_bytes("json", (len(config),), config)}
