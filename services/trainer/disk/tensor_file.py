"""Writes tensors into one safetensors file, and hashes each while it is written.

The safetensors library copies every tensor in memory before it writes it, and a digest would need
another reading of the file. Here each block of a tensor is hashed and written while the processor's
cache holds it, several tensors at a time. Tensors of a GPU come through pinned buffers, which are
kept for the next version. The format is 8 bytes of length, a JSON header, and the tensors one after
the other.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from shared.weights.folders import BLOCK_BYTES, Digest, in_parallel

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""safetensors' names."""

ALIGNMENT = 8
"""The header ends at a multiple of so many bytes, as the library's does."""


def write(tensors: Mapping[str, Tensor], file: Path) -> dict[str, str]:
    """Writes the tensors, of any device, and returns the digest of each. A file that is there is
    written over, in the memory that it has."""
    header, begins = _header(tensors)
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.truncate(descriptor, len(header) + sum(sizes.values()))
        _write_all(descriptor, memoryview(header), 0)
        return in_parallel(
            sizes, lambda name: _write(tensors[name], descriptor, len(header) + begins[name])
        )
    finally:
        os.close(descriptor)


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """Returns the file's first bytes, and where each tensor begins after them. Tensors of large
    elements come first, so that each begins at a multiple of its element's size."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        begins[name], end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begins[name], end],
        }
    plain = json.dumps(entries).encode()
    plain += b" " * (-len(plain) % ALIGNMENT)
    return struct.pack("<Q", len(plain)) + plain, begins


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the digest of each tensor, of any device, as `write` does, and writes nothing."""
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    return in_parallel(sizes, lambda name: _hashed(tensors[name], lambda _: None))


def _write(tensor: Tensor, descriptor: int, offset: int) -> str:
    def write_block(block: memoryview) -> None:
        nonlocal offset
        _write_all(descriptor, block, offset)
        offset += len(block)

    return _hashed(tensor, write_block)


def _hashed(tensor: Tensor, take: Callable[[memoryview], None]) -> str:
    """Returns the tensor's digest; `take` gets its bytes, block by block in order."""
    plain = tensor.detach().contiguous()
    digest = Digest(DTYPES[plain.dtype], tuple(plain.shape))
    for data in _in_host_memory(plain.view(-1).view(torch.uint8)):
        for begin in range(0, len(data), BLOCK_BYTES):
            block = data[begin : begin + BLOCK_BYTES]
            digest.add(block)
            take(block)
    return digest.hex()


def _in_host_memory(plain: Tensor) -> Iterator[memoryview]:
    """Yields the bytes in order; a GPU's bytes come in pieces, each valid until the next one."""
    if plain.device.type == "cpu":
        yield plain.numpy().data
        return
    with STAGING.buffer() as buffer:
        for piece in plain.split(len(buffer)):
            staged = buffer[: len(piece)]
            staged.copy_(piece)
            yield staged.numpy().data


class Staging:
    """Buffers in host memory, one for each thread that writes at the same time, kept until the
    process ends. They are pinned, so that a GPU copies into them directly."""

    def __init__(self, size_bytes: int, *, pinned: bool) -> None:
        self._size_bytes = size_bytes
        self._pinned = pinned
        self._free: SimpleQueue[Tensor] = SimpleQueue()

    @contextmanager
    def buffer(self) -> Iterator[Tensor]:
        """Yields a free buffer, or a new one. No other thread has it meanwhile."""
        try:
            buffer = self._free.get_nowait()
        except Empty:
            buffer = torch.empty(self._size_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        try:
            yield buffer
        finally:
            self._free.put(buffer)


STAGING = Staging(16 << 20, pinned=True)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
