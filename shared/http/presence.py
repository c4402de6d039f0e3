"""Whether a service is unreachable, over all calls of one client. It is reported once when the
service goes away, and once when it is back."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

Tell = Callable[[str, bool], Awaitable[None]]
"""Called with a message for people, and with whether the service is unreachable."""

AWAY_S = 3.0
"""Seconds without an answer after which a service is said to be away. A restart within them is
not reported."""


def since(at: float) -> str:
    """Returns the start and length of a period for messages; `at` is Unix time."""
    return f"since {_clock(at)} UTC ({time.time() - at:.0f} s)"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(at))


async def tell_nobody(_message: str, _away: bool) -> None:
    pass


class Presence:
    """Tracks one service. It does not answer if there is no connection, or it says that it cannot
    work now."""

    def __init__(self, service: str, tell: Tell) -> None:
        self._service = self._who = f"the {service} service"
        self._tell = tell
        self._since: float | None = None
        self._told = False

    @property
    def away(self) -> tuple[str, float] | None:
        """The service reported as away, and since when (Unix time); None if it is not away."""
        if self._since is None or not self._told:
            return None
        return self._who, time.time() - (time.monotonic() - self._since)

    async def missed(self, asked_at: float, reason: str, who: str | None = None) -> None:
        """Notes that a call made at `asked_at` (time.monotonic) had no answer, and why. `who` is
        the service that is really away, if the called service waits for another one."""
        if (who or self._service) != self._who:
            self._since, self._told, self._who = None, False, who or self._service
        self._since = asked_at if self._since is None else self._since
        away_s = time.monotonic() - self._since
        if self._told or away_s < AWAY_S:
            return
        self._told = True
        clock = _clock(time.time() - away_s)
        message = f"{self._who} is unreachable since {clock} UTC: {reason}; waiting for it"
        await self._tell(message, True)

    async def heard(self) -> None:
        """Notes that the service answered."""
        since, told = self._since, self._told
        self._since, self._told = None, False
        if since is not None and told:
            away_s = round(time.monotonic() - since)
            await self._tell(f"{self._who} is back after {away_s} s", False)
