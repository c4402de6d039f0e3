"""What the conversations of a job act in: the seam between `play` and everything that has episodes.

An environment that fails is no fault of the policy: each call raises Lost for an episode that
cannot continue, and the conversation is played anew. What a tool gets wrong is a result for the
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from shared.errors import Conflict, Unavailable
from shared.wire import (
    EnvironmentValidated,
    EpisodeClosed,
    EpisodeOpened,
    EpisodeStepped,
    ToolCall,
)

LOST = "episode_lost"
"""The error's code of an episode that cannot continue."""


class Lost(Conflict):
    """The episode cannot continue."""

    default_code = LOST


class Unreachable(Unavailable):
    """No server of the environment can be reached."""


class Environment(Protocol):
    """The episodes of a job. `service` is what is waited for, by name."""

    service: str

    async def open(self, id: str, row: Mapping[str, Any]) -> EpisodeOpened:
        """Begins an episode with a row, under an id of its own."""
        ...

    async def step(self, id: str, turn: int, calls: tuple[ToolCall, ...]) -> EpisodeStepped:
        """Makes the calls of turn number `turn`, from 0 on."""
        ...

    async def close(self, id: str, *, rewarded: bool) -> EpisodeClosed:
        """Ends the episode. Without `rewarded` no one needs its reward."""
        ...

    def drop(self, id: str) -> None:
        """Lets go of an episode, if it is open, without waiting for anything."""
        ...

    async def validate(self, row: Mapping[str, Any]) -> EnvironmentValidated:
        """Opens an episode of a row and ends it. Raises BadRequest where it cannot be opened."""
        ...

    async def shut(self) -> None:
        """Ends all episodes."""
        ...
