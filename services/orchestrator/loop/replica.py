"""One sampler of the pool, as a job sees it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from shared.client import Client
from shared.wire import WeightsRef

FIRST_RETRY_S, MAX_RETRY_S = 0.25, 30.0


@dataclass(eq=False)
class Replica:
    """`up`: it serves what the job published last, `ref`; None: only the model so far. What is not
    up gets no groups; `why` says why not. `num_joins` counts how often it came up, and
    `failed_sync` says that it did not load what others did. `listed`: it is among those that the
    settings name now. `held`: it gets no further groups until a sync is done; `idle` is set while
    it has none.

    Its load counts completions. `under_way` are those of all groups that it was given and has not
    returned; `busy` those that it said it works on, and `sent` those it was given since. It can
    sample `capacity` of them at once; 0: unknown, taken to be without bound. `gpus` are the UUIDs
    of those that it computes on.
    """

    client: Client
    up: bool = False
    ref: WeightsRef | None = None
    why: str = "it was not asked yet"
    listed: bool = True
    capacity: int = 0
    gpus: tuple[str, ...] = ()
    under_way: int = 0
    busy: int = 0
    sent: int = 0
    num_joins: int = 0
    failed_sync: bool = False
    held: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    retry_at: float = 0.0
    _retry_s: float = field(default=FIRST_RETRY_S)

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def room(self) -> float:
        """How many more completions it could begin now. A group's stragglers leave room."""
        if not self.capacity:
            return float("inf")
        return self.capacity - min(self.under_way, self.busy + self.sent)

    @property
    def load(self) -> float:
        """To compare samplers by: the share of its capacity that is taken."""
        return min(self.under_way, self.busy + self.sent) / (self.capacity or 1)

    def __post_init__(self) -> None:
        self.idle.set()

    def take(self, num_completions: int) -> None:
        self.idle.clear()
        self.under_way += num_completions
        self.sent += num_completions

    def give_back(self, num_completions: int) -> None:
        self.under_way -= num_completions
        if not self.under_way:
            self.idle.set()

    def hear(self, busy: int) -> None:
        self.busy, self.sent = busy, 0

    def wants_to_hear_below(self) -> int | None:
        """Returns below how many completions a full sampler is to say how busy it is."""
        return self.capacity if self.room <= 0 else None

    def begin(self, ref: WeightsRef | None) -> None:
        self.num_joins += not self.up
        self.up, self.ref, self.why, self.failed_sync = True, ref, "", False
        self._retry_s = FIRST_RETRY_S

    def end(self, why: str) -> None:
        """Takes it out of the pool, until it is asked again: each time after a longer while."""
        self.up, self.ref, self.why = False, None, why
        self.busy = self.sent = 0
        self.retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(self._retry_s * 2, MAX_RETRY_S)
