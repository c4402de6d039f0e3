"""Makes glibc's allocator return large blocks, for tensors in the host's memory.

Once a block of up to 32 MiB was freed, glibc takes blocks of its size from the heap. Before glibc
2.38, the space of a freed aligned block cannot hold the next one of its size if a small block lies
behind it, and torch aligns all of its tensors. So a process keeps several times the memory of its
activations.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

M_MMAP_THRESHOLD = -3

LARGE_BYTES = 1 << 20
"""Least size of a block with a mapping of its own, which returns to the system when it is freed."""

WORTH_BYTES = 128 << 20
"""Least bytes of a micro-batch for which giving memory back is worth its time."""

KEPT = 2.5
"""Most memory of a process, as a multiple of the plan, if glibc keeps freed blocks: 2.3 times were
measured."""

LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Files with a container's memory limit, by versions 2 and 1 of cgroups."""


def is_worth_giving_back(pass_bytes: int, planned_bytes: int, room_bytes: int) -> bool:
    """Whether large blocks should be given back. Micro-batches take `pass_bytes`, all ranks
    together are planned to take `planned_bytes`, and the host has `room_bytes`. Giving back costs
    time, because the system clears each block that it gives: passes take up to half as long again
    with a hidden size of 512, and twice as long with 128. So up to half of the memory is used
    instead; the other half is for the sampler and other processes."""
    return pass_bytes >= WORTH_BYTES and planned_bytes * KEPT > room_bytes / 2


def room_bytes(limits: tuple[Path, ...] = LIMITS) -> int:
    """Returns the memory of this host, or this container's limit."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = [file.read_text().strip() for file in limits if file.exists()]
    return min([host, *(int(limit) for limit in found if limit.isdigit())])


@functools.cache
def give_back_large_blocks() -> bool:
    """Gives large blocks mappings of their own, in this process from now on, and returns free
    memory to the system. Returns False if the C library has no such setting, as on macOS."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or libc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES) != 1:
        return False
    libc.malloc_trim(0)
    return True
