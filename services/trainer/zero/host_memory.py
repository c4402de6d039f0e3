"""How glibc's allocator treats large blocks, where tensors are in the host's memory.

A block that was freed once is from then on carved out of the heap, up to 32 MiB. There, before
glibc 2.38, an aligned block that is freed has no room for the next of its size if anything small
lies behind it, and torch aligns all of its tensors. So a process keeps several times what its
activations take.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

M_MMAP_THRESHOLD = -3

LARGE_BYTES = 1 << 20
"""Least size of a block that is mapped by itself, and so goes back to the system when freed."""

WORTH_BYTES = 128 << 20
"""What a micro-batch takes where anything is worth giving back."""

KEPT = 2.5
"""What a process takes at most, glibc keeping what is freed, of what is planned: 2.3 times were
measured."""

LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where a container reads how much memory it may use, by versions 2 and 1 of cgroups."""


def is_worth_giving_back(pass_bytes: int, planned_bytes: int, room_bytes: int) -> bool:
    """Whether large blocks should be given back, for micro-batches that take `pass_bytes` in ranks
    that are planned to take `planned_bytes` together, where there is room for so much. That has its
    price: the system clears each block that it gives, with which passes take up to half as long
    again with a hidden size of 512, and twice as long with 128. So memory that is there is used,
    up to half of it; the other half is the sampler's and everybody else's."""
    return pass_bytes >= WORTH_BYTES and planned_bytes * KEPT > room_bytes / 2


def room_bytes(limits: tuple[Path, ...] = LIMITS) -> int:
    """Returns the memory of this host, or what this container may use of it."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = [file.read_text().strip() for file in limits if file.exists()]
    return min([host, *(int(limit) for limit in found if limit.isdigit())])


@functools.cache
def give_back_large_blocks() -> bool:
    """Has large blocks mapped by themselves, in this process from now on, and gives back what is
    free by then. Returns False where the C library has no such setting, as on macOS."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or libc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES) != 1:
        return False
    libc.malloc_trim(0)
    return True
