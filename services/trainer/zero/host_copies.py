"""Copies of tensors in host memory that is allocated once and written over from then on.

Fresh memory costs an update more than the copy: the kernel gives it page by page, and a GPU copies
into pageable memory through a buffer of its own, at a third of the speed. So the copies lie one
after the other in blocks that stay, pinned where the tensors are on a GPU. All blocks have one
size, a power of two: of another size torch would pin up to twice as much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_BYTES = 64 << 20
ALIGNMENT = 16
"""A copy begins at a multiple of so many bytes."""


@dataclass(frozen=True)
class HostCopy:
    """A copy of a tensor: `pieces` of its bytes, in order."""

    pieces: tuple[Tensor, ...]

    @torch.no_grad()
    def restore(self, tensor: Tensor) -> None:
        """Makes the tensor what it was when it was copied."""
        begin = 0
        plain = as_bytes(tensor)
        for piece in self.pieces:
            plain[begin : begin + len(piece)].copy_(piece, non_blocking=True)
            begin += len(piece)


class HostCopies:
    """Holds as many copies as are made until it is told to `begin` anew."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[Tensor] = []
        self._end = 0

    @property
    def size_bytes(self) -> int:
        return len(self._blocks) * BLOCK_BYTES

    def begin(self) -> None:
        """Forgets the copies, whose memory is used again."""
        self._end = 0

    @torch.no_grad()
    def copy(self, tensor: Tensor) -> HostCopy:
        """Returns a copy, which from a GPU is there once the present stream is done."""
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
                    torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._pinned)
                )
            piece = self._blocks[number][begin : begin + size_bytes]
            size_bytes -= len(piece)
            self._end += len(piece)
            yield piece
        self._end += -self._end % ALIGNMENT


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the tensor's bytes, in the same memory."""
    return tensor.detach().view(-1).view(torch.uint8)
