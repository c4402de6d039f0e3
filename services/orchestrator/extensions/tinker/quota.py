"""How much of what programs sent may wait to be done, by API key. What is counted is on disk: of a
model that this process has not seen, its folder is read first."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

from services.orchestrator.extensions.tinker.log import OperationLog
from shared.errors import Busy

MAX_PENDING = 4096
"""Most operations and orders of samples of one API key that are not done."""

MAX_PENDING_BYTES = 1 << 29
"""Bytes on disk of what is not done, from which on an API key's requests are refused: a hundred
calls of the 5 MB that the SDK sends at a time."""

RETRY_AFTER_S = 2


class PendingQuota:
    """Methods wait for the disk: call them in a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[str, dict[tuple[Path, str], int]] = {}  # bytes, by API key
        self._seen: set[tuple[str, Path]] = set()
        self._counted_at: dict[str, float] = {}

    def check(self, key: str, log: OperationLog, name: str) -> None:
        """Raises Busy if too much of the key waits already, unless the operation `name` has come
        before."""
        with self._lock:
            pending = self._of(key, log)
            if log.pending_bytes(name):
                return
            if _is_full(pending):
                self._count_again(key, pending)
            if _is_full(pending):
                raise Busy(
                    f"{len(pending)} operations and orders of samples wait to be done, which take "
                    f"{sum(pending.values())} bytes; expected fewer than {MAX_PENDING}, and than "
                    f"{MAX_PENDING_BYTES} bytes, of one API key: ask again when some are done",
                    retry_after_s=RETRY_AFTER_S,
                )

    def _count_again(self, key: str, pending: dict[tuple[Path, str], int]) -> None:
        """Forgets what is done. Not at every request of a full key: it looks at thousands of files,
        and others' requests wait meanwhile."""
        now = time.monotonic()
        if now < self._counted_at.get(key, -math.inf) + RETRY_AFTER_S:
            return
        self._counted_at[key] = now
        for run, one in [*pending]:
            if not OperationLog(run).pending_bytes(one):
                del pending[run, one]

    def note(self, key: str, log: OperationLog, name: str) -> None:
        """Counts the operation or order, which has just come."""
        with self._lock:
            if num_bytes := log.pending_bytes(name):
                self._of(key, log)[log.run, name] = num_bytes

    def _of(self, key: str, log: OperationLog) -> dict[tuple[Path, str], int]:
        pending = self._pending.setdefault(key, {})
        if (key, log.run) not in self._seen:
            self._seen.add((key, log.run))
            pending |= {(log.run, name): log.pending_bytes(name) for name in log.pending()}
        return pending


def _is_full(pending: dict[tuple[Path, str], int]) -> bool:
    return len(pending) >= MAX_PENDING or sum(pending.values()) >= MAX_PENDING_BYTES
