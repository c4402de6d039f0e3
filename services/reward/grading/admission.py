"""A bound on what waits: beyond it a caller is told to come back, instead of memory filling up."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from shared.errors import Busy


class Admission:
    """At most `limit` of `what` ("completions") wait or run at once; `setting` names the limit to a
    reader."""

    def __init__(self, what: str, limit: int, setting: str) -> None:
        self._what = what
        self._limit = limit
        self._setting = setting
        self._count = 0

    @contextlib.contextmanager
    def of(self, count: int) -> Generator[None]:
        """Raises Busy if `count` more would be too many. A single request is taken whatever its
        size."""
        if self._count and self._count + count > self._limit:
            raise Busy(
                f"{self._count} {self._what} wait or run and {count} more were sent; at most "
                f"{self._limit} may "
                f"(setting {self._setting})"
            )
        self._count += count
        try:
            yield
        finally:
            self._count -= count
