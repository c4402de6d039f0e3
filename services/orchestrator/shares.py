"""Shares of API keys in a common resource, such as memory."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator

from shared.errors import HoneError
from shared.http.gate import caller_name


class Shares:
    """Shares in a total. A caller may hold at most as much as it leaves for others: a single caller
    half of the total, two callers a third each, and so on."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def hold(
        self, amount: int, total: int, refused: Callable[[int, int], HoneError]
    ) -> Generator[None]:
        """Holds the amount for the request's API key within the block. If that is too much, raises
        the error that `refused` returns for the amounts that the key holds and that are left."""
        who, left = caller_name(), total - self._held.total()
        if amount and self._held[who] + amount > left:
            raise refused(self._held[who], left)
        self._held[who] += amount
        try:
            yield
        finally:
            self._held -= Counter({who: amount})
