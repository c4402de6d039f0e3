"""Whether a service is away, over all calls of one client: said once when it goes, and once when it
is back."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

Tell = Callable[[str, bool], Awaitable[None]]
"""Takes a sentence for people, and whether the service is away by it."""

AWAY_S = 3.0
"""Seconds without an answer after which a service is said to be away. A restart within them is
not reported."""


async def tell_nobody(_message: str, _away: bool) -> None:
    pass


class Presence:
    """One service's. Not answering is having no connection, or answering that it cannot work
    now."""

    def __init__(self, service: str, tell: Tell) -> None:
        self._service = service
        self._tell = tell
        self._since: float | None = None
        self._told = False

    @property
    def away_since(self) -> float | None:
        """Unix time since when it is said to be away; None: it is not."""
        if self._since is None or not self._told:
            return None
        return time.time() - (time.monotonic() - self._since)

    async def missed(self, asked_at: float, reason: str) -> None:
        """Notes that a call made at `asked_at` (time.monotonic) had no answer, and why."""
        self._since = asked_at if self._since is None else self._since
        away_s = time.monotonic() - self._since
        if self._told or away_s < AWAY_S:
            return
        self._told = True
        since = time.strftime("%H:%M:%S", time.gmtime(time.time() - away_s))
        await self._tell(
            f"the {self._service} service is away since {since} UTC: {reason}; waiting for it", True
        )

    async def heard(self) -> None:
        """Notes that the service answered."""
        since, told = self._since, self._told
        self._since, self._told = None, False
        if since is not None and told:
            away_s = round(time.monotonic() - since)
            await self._tell(f"the {self._service} service is back after {away_s} s", False)
