"""How glibc's allocator treats large blocks, where tensors are in the host's memory.

A block that was freed once is from then on carved out of the heap, up to 32 MiB. There, before
glibc 2.38, an aligned block that is freed has no room for the next of its size if anything small
lies behind it, and torch aligns all of its tensors. So a process keeps several times what its
activations take.
"""

from __future__ import annotations

import ctypes
import functools

M_MMAP_THRESHOLD = -3

LARGE_BYTES = 1 << 20
"""Of a block that is mapped by itself, and so goes back to the system when it is freed."""

WORTH_BYTES, WORTH_HIDDEN = 128 << 20, 512
"""What a micro-batch takes, and the hidden size, from which on that is worth its time. The system
clears each block that it gives: with a hidden size of 128 the passes then take twice as long, with
512 nothing was measured, because a wider model computes longer on each byte."""


def is_worth_giving_back(pass_bytes: int, hidden: int) -> bool:
    """Whether large blocks should be given back, for micro-batches that take `pass_bytes`."""
    return pass_bytes >= WORTH_BYTES and hidden >= WORTH_HIDDEN


@functools.cache
def give_back_large_blocks() -> bool:
    """Has large blocks mapped by themselves, in this process from now on, and gives back what is
    free by then. Returns False where the C library has no such setting, as on macOS."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or libc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES) != 1:
        return False
    libc.malloc_trim(0)
    return True
