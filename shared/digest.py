"""The canonical digest of weights: the same for the same tensors, in whatever files they lie.

A tensor's digest is sha256 over its dtype, shape and bytes; the digest of all is sha256 over the
sorted names and their digests. Trainer and sampler both compute it from the safetensors files they
wrote or read; neither torch nor the safetensors library is needed for that.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shared.errors import Failed

MAX_HEADER_BYTES = 100 << 20
"""The safetensors format's own limit."""

MAX_THREADS = 16
"""hashlib lets other threads run while it hashes; beyond this the memory is the limit."""

BLOCK_BYTES = 1 << 20
"""Bytes read and hashed at a time: they stay in the processor's cache in between."""


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
    """Returns each tensor's sha256 over dtype, shape and bytes, in hex; hashed in parallel."""
    largest_first = sorted(tensors, key=lambda name: -tensors[name].size_bytes)
    num_threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="digest") as pool:
        digests = pool.map(_digest, (tensors[name] for name in largest_first))
        return dict(zip(largest_first, digests, strict=True))


def digest(digests: Mapping[str, str]) -> str:
    """Returns the sha256, in hex, over the sorted names and their digests."""
    total = hashlib.sha256()
    for name in sorted(digests):
        total.update(f"{name}\0{digests[name]}\n".encode())
    return total.hexdigest()


def digest_of(folder: Path) -> str:
    """Returns the digest of all tensors in the *.safetensors files of `folder`. Raises Failed as
    `stored_tensors` does."""
    return digest(tensor_digests(stored_tensors(folder)))


def digest_of_bytes(dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> str:
    """Returns a tensor's digest, as it would be of one in a file. `dtype` is safetensors' name."""
    total = _begun(dtype, shape)
    total.update(data)
    return total.hexdigest()


def _begun(dtype: str, shape: tuple[int, ...]) -> Any:
    return hashlib.sha256(f"{dtype}\0{json.dumps(shape)}\0".encode())


def _digest(tensor: StoredTensor) -> str:
    """Reads rather than maps the file: one cut short under a mapping would kill the process."""
    total = _begun(tensor.dtype, tensor.shape)
    block = memoryview(bytearray(min(tensor.size_bytes, BLOCK_BYTES)))
    left_bytes = tensor.size_bytes
    with tensor.file.open("rb", buffering=0) as stream:
        stream.seek(tensor.begin)
        while left_bytes:
            num_bytes = stream.readinto(block[:left_bytes])
            if not num_bytes:
                raise _no_safetensors(tensor.file, f"it ends {left_bytes} bytes too early")
            total.update(block[:num_bytes])
            left_bytes -= num_bytes
    return total.hexdigest()


def _tensors_of(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        length = stream.read(8)
        header_bytes = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
        if not 2 <= header_bytes <= MAX_HEADER_BYTES:
            raise _no_safetensors(file, f"its header would have {header_bytes} bytes")
        try:
            header: Any = json.loads(stream.read(header_bytes))
        except ValueError as error:
            raise _no_safetensors(file, f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise _no_safetensors(file, "its header is no JSON object")
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


def _no_safetensors(file: Path, why: str) -> Failed:
    return Failed(f"{str(file)!r} is not a whole safetensors file: {why}")
