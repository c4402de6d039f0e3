"""Tensors in the host's memory: copies in memory that is reused, and an allocator that returns
large blocks.

**Copies** (`HostCopies`) lie one after the other in blocks that are allocated once, pinned if the
tensors are on a GPU. New memory costs an update more than the copy: the kernel provides it page by
page, and a GPU copies into pageable memory at a third of the speed. All blocks have one size, a
power of two: for another size torch would pin up to twice as much.

**The allocator.** After a block of up to 32 MiB was freed, glibc takes blocks of that size from the
heap. Before glibc 2.38 the space of a freed aligned block cannot hold the next block of its size if
a small block lies behind it, and torch aligns all of its tensors. So a process keeps several times
the memory of its activations, unless large blocks are given back (`is_worth_giving_back` in
`shared/plan/memory.py`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_BYTES = 64 << 20
ALIGNMENT = 16
"""A copy begins at a multiple of so many bytes."""

M_MMAP_THRESHOLD = -3

LARGE_BYTES = 1 << 20
"""Least size of a block with a mapping of its own, which returns to the system when it is freed."""


@dataclass(frozen=True)
class HostCopy:
    """A copy of a tensor: `pieces` of its bytes, in order."""

    pieces: tuple[Tensor, ...]

    @torch.no_grad()
    def restore(self, tensor: Tensor) -> None:
        """Copies the bytes back into the tensor."""
        begin = 0
        plain = as_bytes(tensor)
        for piece in self.pieces:
            plain[begin : begin + len(piece)].copy_(piece, non_blocking=True)
            begin += len(piece)


class HostCopies:
    """Holds the copies that were made since the last `begin`."""

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self._blocks: list[Tensor] = []
        self._end = 0

    @property
    def size_bytes(self) -> int:
        return len(self._blocks) * BLOCK_BYTES

    def begin(self) -> None:
        """Forgets the copies; their memory is used again."""
        self._end = 0

    @torch.no_grad()
    def copy(self, tensor: Tensor) -> HostCopy:
        """Returns a copy; from a GPU it is complete once the current stream is done."""
        plain = as_bytes(tensor)
        begin, pieces = 0, list(self._room(len(plain)))
        for piece in pieces:
            piece.copy_(plain[begin : begin + len(piece)], non_blocking=True)
            begin += len(piece)
        return HostCopy(tuple(pieces))

    def _room(self, size_bytes: int) -> Iterator[Tensor]:
        while size_bytes > 0:
            number, begin = divmod(self._end, BLOCK_BYTES)
            if number == len(self._blocks):
                self._blocks.append(
                    torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self.pinned)
                )
            piece = self._blocks[number][begin : begin + size_bytes]
            size_bytes -= len(piece)
            self._end += len(piece)
            yield piece
        self._end += -self._end % ALIGNMENT


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the tensor's bytes, in the same memory."""
    return tensor.detach().view(-1).view(torch.uint8)


@functools.cache
def give_back_large_blocks() -> bool:
    """Gives large blocks mappings of their own, in this process from now on, and returns free
    memory to the system. Returns False if the C library has no such setting, as on macOS."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or libc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES) != 1:
        return False
    libc.malloc_trim(0)
    return True
