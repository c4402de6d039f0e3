"""Tensors in the host's memory: copies in memory that is reused, and an allocator that returns
large blocks.

**Copies** (`HostCopies`) lie one after the other in blocks that are allocated once, pinned if the
tensors are on a GPU. New memory costs an update more than the copy: the kernel provides it page by
page, and a GPU copies into pageable memory at a third of the speed. All blocks have one size, a
power of two: for another size torch would pin up to twice as much.

**The allocator.** By default glibc returns large freed blocks to the kernel, which zeroes each page
before it hands it out again. `keep_freed_blocks` keeps them in the process for the next pass: an
update of 135 million parameters then took 0.85 of the time and 1.1 times the memory. However,
before glibc 2.38 the space of a freed aligned block cannot hold another block of its size if a
small block follows it, and torch aligns all tensors, so the heap can grow to several times the
memory of the activations. Where that might not fit (`is_worth_giving_back` in `memory.py`), large
blocks are returned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Event

import torch
from torch import Tensor

BLOCK_BYTES = 64 << 20
ALIGNMENT = 16
"""A copy begins at a multiple of so many bytes."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4

LARGE_BYTES = 1 << 20
"""Least size of a block with a mapping of its own, which returns to the system when it is freed."""

DEFAULTS = {M_MMAP_MAX: 1 << 16, M_TRIM_THRESHOLD: 128 << 10}
"""glibc's own: the most such blocks, and the free bytes at the heap's end that are returned."""


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


def give_back_large_blocks() -> bool:
    """Gives large blocks mappings of their own, in this process from now on, and returns free
    memory to the system. Returns False if the C library has no such setting, as on macOS."""
    if not _set(DEFAULTS | {M_MMAP_THRESHOLD: LARGE_BYTES}):
        return False
    ctypes.CDLL(None).malloc_trim(0)
    return True


_ran_out = Event()
"""Set once this process ran out of memory, of which a fragmented heap may be the cause."""


def keep_freed_blocks() -> bool:
    """Takes blocks of any size from the heap, in this process from now on, and returns nothing to
    the system. Returns False if the C library has no such setting, or after `run_out`."""
    return not _ran_out.is_set() and _set({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1})


def run_out() -> None:
    """Returns large blocks to the system from now on, also after `keep_freed_blocks`."""
    _ran_out.set()
    give_back_large_blocks()


def _set(settings: dict[int, int]) -> bool:
    libc = ctypes.CDLL(None)
    return hasattr(libc, "mallopt") and all(
        libc.mallopt(name, value) == 1 for name, value in settings.items()
    )
