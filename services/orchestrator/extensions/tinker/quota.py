"""Limits the operations and orders of samples that wait to be done, by API key. They are counted on
disk: the folder of a model that is new to this process is read first."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

from services.orchestrator.extensions.tinker.log import OperationLog
from shared.errors import Busy

MAX_PENDING = 4096
"""Most pending operations and orders of samples of one API key."""

MAX_PENDING_BYTES = 1 << 29
"""Bytes on disk of pending operations and orders at which an API key's requests are refused: a
hundred calls of 5 MB, the most that the SDK sends at a time."""

RETRY_AFTER_S = 2


@dataclass
class Pending:
    """The pending operations and orders of an API key: their bytes by run folder and name."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    sizes: dict[tuple[Path, str], int] = field(default_factory=dict[tuple[Path, str], int])
    seen: set[Path] = field(default_factory=set[Path])
    counted_at: float = -math.inf


class PendingQuota:
    """Checks and counts pending operations. Call in a thread: the methods wait for the disk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[str, Pending] = {}

    def check(self, key: str, log: OperationLog, name: str) -> None:
        """Raises Busy if the key has reached a limit, unless the operation `name` was accepted
        before."""
        with self._of(key, log) as pending:
            if log.pending_bytes(name):
                return
            if _is_full(pending.sizes):
                _count_again(pending)
            if _is_full(pending.sizes):
                raise Busy(
                    f"{len(pending.sizes)} operations and orders of samples wait to be done, which "
                    f"take {sum(pending.sizes.values())} bytes; expected fewer than {MAX_PENDING}, "
                    f"and than {MAX_PENDING_BYTES} bytes, of one API key: ask again when some are "
                    "done",
                    retry_after_s=RETRY_AFTER_S,
                )

    def note(self, key: str, log: OperationLog, name: str) -> None:
        """Counts a new operation or order."""
        with self._of(key, log) as pending:
            if num_bytes := log.pending_bytes(name):
                pending.sizes[log.run, name] = num_bytes

    @contextlib.contextmanager
    def _of(self, key: str, log: OperationLog) -> Generator[Pending]:
        """Yields the key's pending operations, locked. Other keys do not wait for its disk."""
        with self._lock:
            pending = self._pending.setdefault(key, Pending())
        with pending.lock:
            if log.run not in pending.seen:
                pending.seen.add(log.run)
                pending.sizes |= {
                    (log.run, name): log.pending_bytes(name) for name in log.pending()
                }
            yield pending


def _count_again(pending: Pending) -> None:
    """Removes finished operations from the count: not often, for it reads thousands of files."""
    now = time.monotonic()
    if now < pending.counted_at + RETRY_AFTER_S:
        return
    pending.counted_at = now
    for run, one in [*pending.sizes]:
        if not OperationLog(run).pending_bytes(one):
            del pending.sizes[run, one]


def _is_full(pending: dict[tuple[Path, str], int]) -> bool:
    return len(pending) >= MAX_PENDING or sum(pending.values()) >= MAX_PENDING_BYTES
