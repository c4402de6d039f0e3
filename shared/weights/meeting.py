"""How trainer and sampler meet to move weights from device to device: in a torch store, under the
version's key. Before anything else is sent, a first collective shows that they reach each other.

    asked          how many samplers have asked
    asked/<n>      the n-th one's name and number of ranks: "3f2a 2"
    <name>/turn    is there once it is served; until then it waits
    <name>/...     its process group's own
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator
from pathlib import Path

MEET_S = 15.0
"""Seconds that both sides wait for each other once it is a sampler's turn. Making a group takes
NCCL one to five; where a port or an interface cannot be reached it waits for minutes, or for ever.
"""

MEETING_DEADLINES, LOADING_DEADLINES = 2, 3
"""The number of transfer deadlines that a sampler may take: two until it has met the trainer,
because a sampler before it may hang, and three to receive and load."""

ASKED, TURN = "asked", "turn"

ERROR_HANDLING, CLEAN_UP_ONLY = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"

_changing = threading.Lock()
_before: list[str | None] = []
"""The variable's value before each block under way. A thread that hangs may be in such a block."""


def memory_space() -> str | None:
    """Returns an identifier that two processes must share for one to read the other's memory of a
    GPU: of the host, the PID namespace (CUDA names a block's process by its number) and /dev/shm
    (torch counts the readers there). Each container has its own last two. None: unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pids, shm = Path("/proc/self/ns/pid").stat().st_ino, Path("/dev/shm").stat().st_dev
    except OSError:
        return None
    return f"{boot}:{pids}:{shm}"


def nth_asked(number: int) -> str:
    return f"{ASKED}/{number}"


@contextlib.contextmanager
def surviving_peers() -> Generator[None]:
    """Within the block: an NCCL group that is made leaves the process alive when a peer times out.
    By default torch then ends the process, so a peer that dies would end this one too."""
    with _changing:
        _before.append(os.environ.get(ERROR_HANDLING))
        os.environ[ERROR_HANDLING] = CLEAN_UP_ONLY  # a group reads the variable when it is made
    try:
        yield
    finally:
        with _changing:
            before = _before.pop()
            if not _before and before is None:
                del os.environ[ERROR_HANDLING]
            elif not _before and before is not None:
                os.environ[ERROR_HANDLING] = before
