"""The folders that a trainer writes: a checkpoint (its name, and the list of its own files) and a
LoRA adapter. The orchestrator serves a checkpoint's files, and a download is compared with the
list. The sampler reads adapters as PEFT writes them:

    adapter_model.safetensors   base_model.model.<layer>.lora_A.weight [rank, in]
                                base_model.model.<layer>.lora_B.weight [out, rank]
    adapter_config.json         rank, alpha and the names of the layers, among others

And the canonical digest of weights, which depends only on the tensors, not on their layout in
files. A tensor's digest is XXH3 (128 bits) over its dtype, shape and bytes. The digest of all
tensors is XXH3 over their sorted names and digests. The trainer computes it over the bytes that it
writes, the sampler over the safetensors files that it reads. Neither torch nor the safetensors
library is needed.

XXH3 finds accidents: cut files, flipped bits, tensors of another version. It is as fast as memory;
sha256 takes longer than the rest of a sync. It does not protect against users who may write into
the trainer's folders: these could publish weights anyway.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import xxhash

from shared.errors import Failed
from shared.wire import Wire

KIND = "xxh3-"
"""Prefix of every digest. Other versions of Hone have another prefix."""

MAX_HEADER_BYTES = 100 << 20
"""The limit of the safetensors format."""

MAX_THREADS = 16
"""Threads read and hash at the same time; beyond this number memory bandwidth is the limit."""

BLOCK_BYTES = 1 << 20
"""Bytes read and hashed at a time: they stay in the processor's cache between the two."""

ITEM_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2},
    **{"I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1},
}
"""Size of an element by its safetensors dtype."""

T = TypeVar("T")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: `begin` and `end` are offsets into the file, in bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


class Digest:
    """Computes a tensor's digest: its bytes are added in order. `dtype` is safetensors' name."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self._total = xxhash.xxh3_128(f"{dtype}\0{json.dumps(shape)}\0".encode())

    def add(self, data: bytes | memoryview) -> None:
        self._total.update(data)

    def hex(self) -> str:
        return KIND + self._total.hexdigest()


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns every tensor in the *.safetensors files of `folder`, by name; {} without such files.

    Reads only the headers: 8 bytes of length, then JSON. Raises Failed for a file that is not
    safetensors or is cut short, and for a name in two files.
    """
    found: dict[str, StoredTensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in _tensors_of(file):
            if name in found:
                raise Failed(f"tensor {name!r} is in {found[name].file.name!r} and {file.name!r}")
            found[name] = tensor
    return found


def tensor_digests(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Returns each tensor's digest, over dtype, shape and bytes; hashed in parallel."""
    sizes = {name: tensor.size_bytes for name, tensor in tensors.items()}
    return in_parallel(sizes, lambda name: _digest(tensors[name]))


def in_parallel(sizes_bytes: Mapping[str, int], work: Callable[[str], T]) -> dict[str, T]:
    """Returns the results of `work` for each name, computed in threads, the largest first."""
    largest_first = sorted(sizes_bytes, key=lambda name: -sizes_bytes[name])
    num_threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="tensors") as pool:
        return dict(zip(largest_first, pool.map(work, largest_first), strict=True))


def digest(digests: Mapping[str, str]) -> str:
    """Returns the digest of all tensors, over the sorted names and their digests."""
    lines = "".join(f"{name}\0{digests[name]}\n" for name in sorted(digests))
    return KIND + xxhash.xxh3_128_hexdigest(lines.encode())


def digest_of(folder: Path) -> str:
    """Returns the digest of all tensors in the *.safetensors files of `folder`. Raises Failed as
    `stored_tensors` does."""
    return digest(tensor_digests(stored_tensors(folder)))


def digest_of_bytes(dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> str:
    """Returns the digest of a tensor that is not in a file. `dtype` is safetensors' name."""
    total = Digest(dtype, shape)
    total.add(data)
    return total.hex()


def _digest(tensor: StoredTensor) -> str:
    """Returns the digest of one tensor. Reads the file and does not map it: a mapped file that is
    cut short would kill the process."""
    total = Digest(tensor.dtype, tensor.shape)
    block = memoryview(bytearray(min(tensor.size_bytes, BLOCK_BYTES)))
    left_bytes = tensor.size_bytes
    with tensor.file.open("rb", buffering=0) as stream:
        stream.seek(tensor.begin)
        while left_bytes:
            num_bytes = stream.readinto(block[:left_bytes])
            if not num_bytes:
                raise _no_safetensors(tensor.file, f"it ends {left_bytes} bytes too early")
            total.add(block[:num_bytes])
            left_bytes -= num_bytes
    return total.hex()


def _tensors_of(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    check_regular(file)
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        length = stream.read(8)
        header_bytes = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
        if not 2 <= header_bytes <= MAX_HEADER_BYTES:
            raise _no_safetensors(file, f"its header would have {header_bytes} bytes")
        try:
            header: Any = json.loads(stream.read(header_bytes))
        except ValueError as error:
            raise _no_safetensors(file, f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _no_safetensors(file, "its header is not a JSON object")
    start = 8 + header_bytes
    for name, entry in cast(dict[str, Any], header).items():
        if name == "__metadata__":
            continue
        try:
            begin, end = map(int, entry["data_offsets"])
            dtype, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
        except (KeyError, TypeError, ValueError) as error:
            raise _no_safetensors(
                file, f"tensor {name!r} has no dtype, shape and data_offsets in its header"
            ) from error
        if not 0 <= begin <= end <= size_bytes - start:
            raise _no_safetensors(
                file, f"tensor {name!r} ends at byte {start + end} of {size_bytes}"
            )
        yield name, StoredTensor(file, dtype, shape, start + begin, start + end)


def check_regular(file: Path) -> None:
    """Raises Failed for a pipe, whose reader waits for a writer, and for a device, which has no
    end."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise Failed(f"{str(file)!r} is not a regular file")


def _no_safetensors(file: Path, why: str) -> Failed:
    return Failed(f"{str(file)!r} is not a whole safetensors file: {why}")


def digest_of_file(path: Path) -> str:
    """Returns the digest of a file's bytes. Raises OSError."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            state.update(block)
    return KIND + state.hexdigest()


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
"""The folder, in a run folder, of adapters that are kept for samplers."""

SNAPSHOT = "s"
"""The prefix of the name of a snapshot's folder; the operation's number follows."""

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
FILES = (CONFIG, WEIGHTS)

PREFIX = "base_model.model."
"""Prefix of a base model layer's name in the adapter's tensors."""


def adapter_digests(folder: Path) -> dict[str, str]:
    """Returns the digest of each tensor and, under its file's name, of the configuration, whose
    alpha determines the effect of the tensors. Raises Failed for files that cannot be read."""
    try:
        config = (folder / CONFIG).read_bytes()
        digests = tensor_digests(stored_tensors(folder))
    except OSError as error:
        raise Failed(f"no adapter can be read from {str(folder)!r}: {error}") from error
    return {**digests, CONFIG: digest_of_bytes("json", (len(config),), config)}
