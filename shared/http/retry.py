"""What a call to a service does next: send the request again, ask for the operation's result, or
give up. A `Retry` decides by what came back and when. It does no IO and has no clock: the caller
passes times in, in seconds of one monotonic clock, and executes what is returned.

Sent again: what was lost with its connection, 503, 429, a 5xx that is not the service's own, and
an operation that the service forgot in a restart. Never: anything the service answered on purpose,
such as a fence that is stale or a service that another orchestrator owns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.errors import Busy, HoneError, Unavailable

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0
"""Seconds before a request is sent again: doubled each time, up to the maximum. Only a service that
asks for more (Retry-After) gets more."""

LEAST_S = 0.01
"""Seconds that an attempt has at least, also when the deadline has passed."""


@dataclass(frozen=True)
class Send:
    """Send the request, with its idempotency key, after `pause_s` seconds."""

    pause_s: float = 0.0


@dataclass(frozen=True)
class Poll:
    """After `pause_s` seconds wait for the operation at `location`, then ask for its result."""

    location: str
    pause_s: float = 0.0


@dataclass(frozen=True)
class GiveUp:
    """Raise the error. One of its notes names the service and the request."""

    error: HoneError


class Retry:
    """One call of `request` (such as "POST /score") to `service`, begun at `now`.

    It has `deadline_s` seconds. It is given up once the service was unavailable (unreachable, or
    answering 503) for `patience_s` seconds without a break. Without `counts_away` the time in which
    the service is unavailable does not count towards the deadline.
    """

    def __init__(
        self,
        service: str,
        request: str,
        now: float,
        *,
        deadline_s: float = math.inf,
        patience_s: float,
        counts_away: bool = True,
    ) -> None:
        self._service, self._request = service, request
        self._deadline_s, self._patience_s = deadline_s, patience_s
        self._counts_away = counts_away
        self._end = now + deadline_s
        self.sent_at = now
        self._heard_at = self._away_since = -math.inf
        self._missed: tuple[float, HoneError] | None = None
        self._pause_s, self._poll_pause_s = FIRST_PAUSE_S, 0.0

    def left_s(self, now: float) -> float:
        """Returns how many seconds the next attempt may take, its pause included."""
        return max(self._end - now, LEAST_S)

    def away_s(self, now: float) -> float:
        """Returns for how many seconds the service has been away."""
        return now - max(self._away_since, self._heard_at)

    def heard(self, now: float) -> None:
        """Notes that the service worked on the call at this time, so it was not away."""
        self._heard_at = max(self._heard_at, now)

    def progressed(self, now: float) -> None:
        """Notes that a part of a stream came: it is resumed as soon as a new call is retried."""
        self.heard(now)
        self._pause_s = FIRST_PAUSE_S

    def accepted(self, location: str, now: float) -> Poll:
        """Returns the next action after 202. A second 202 to one request means that another process
        answered the poll, which knows nothing of the operation."""
        self.heard(now)
        pause_s = self._poll_pause_s
        self._poll_pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), MAX_PAUSE_S)
        return Poll(location, pause_s)

    def failed(self, error: HoneError, now: float) -> Send | GiveUp:
        """Returns the next action after an error: the service's own, or Unavailable for a lost
        connection."""
        is_there = isinstance(error, Busy) or error.code == "no_operation"
        if not (isinstance(error, Unavailable) or is_there):
            return self._give_up(error)
        pause_s = (
            max(self._pause_s, error.retry_after_s) if isinstance(error, Busy) else self._pause_s
        )
        again_at = now + pause_s
        if is_there:
            self._away_since, self._missed = again_at, None
        else:
            since = self.sent_at if self._away_since == -math.inf else self._away_since
            self._away_since, self._missed = max(since, self._heard_at), (now, error)
            self._end += 0.0 if self._counts_away else again_at - self.sent_at
        if again_at >= min(self._end, self._away_since + self._patience_s):
            return self._give_up(error)
        self.sent_at = again_at
        self._pause_s, self._poll_pause_s = min(2 * pause_s, MAX_PAUSE_S), 0.0
        return Send(pause_s)

    def pause_s(self, error: HoneError, now: float) -> float:
        """Returns the pause of `failed`, for a caller that polls for nothing. Raises the error
        where `failed` gives up."""
        action = self.failed(error, now)
        if isinstance(action, GiveUp):
            raise action.error
        return action.pause_s

    def late(self) -> GiveUp:
        """Returns the next action once an attempt was not done in `left_s`. A service that has not
        been heard of since its last miss is unreachable, and not slow."""
        if self._missed and self._heard_at <= self._missed[0]:
            return self._give_up(self._missed[1])
        return self._give_up(
            Unavailable(
                f"{self._service} did not finish {self._request} within {self._deadline_s:g} s",
                code="deadline",
            )
        )

    def _give_up(self, error: HoneError) -> GiveUp:
        error.add_note(f"{self._request} of {self._service}")
        return GiveUp(error)
