"""One sampler of the pool, as a job sees it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

from shared.http.client import Client
from shared.wire import GenerateRequest, RolloutGroup, ServingWeights, WeightsRef

FIRST_RETRY_S, MAX_RETRY_S = 0.25, 30.0

NUM_MEASURED = 32
"""Groups over which the length of completions is averaged: the newest."""

FEW = 4
"""Groups that are measured before their mean counts alone."""


class Length:
    """How many tokens a completion of the job takes in a sampler's cache, with its share of the
    group's prompt: at first its bound, `max_tokens`, and once FEW groups are measured, the mean of
    the last NUM_MEASURED. The bound throughout would leave most of the cache unused, for few
    completions reach it."""

    def __init__(self) -> None:
        self._bound = 1
        self._last: deque[float] = deque(maxlen=NUM_MEASURED)
        self.tokens = 1.0

    def expect(self, body: GenerateRequest) -> None:
        self._bound = max(self._bound, body.sampling.max_tokens)
        self._average()

    def measure(self, group: RolloutGroup) -> None:
        num_tokens = sum(len(rollout.token_ids) for rollout in group.rollouts)
        self._last.append((len(group.prompt_token_ids) + num_tokens) / len(group.rollouts))
        self._average()

    def _average(self) -> None:
        missing = max(FEW - len(self._last), 0)
        total = sum(self._last) + missing * self._bound
        self.tokens = max(1.0, total / (len(self._last) + missing))


@dataclass(eq=False)
class Replica:
    """`name` is the one that it reports, `boot_id` its engine's life. `up`: it serves what the job
    published last, `ref`; None: only the model so far. What is not up gets no groups; `why` says
    why not. `num_joins` counts how often it came up, and `failed_sync` says that it did not load
    what others did, `by_files` that it once did not get what was sent to its GPU. `listed`: it is
    among those that the settings name now. `held`: it gets no further groups until a sync is done;
    `idle` is set while it has none. `num_loads` are the versions that it loads at the moment: one,
    or none.

    Its load counts completions. `under_way` are those of all groups that it was given and has not
    returned; `busy` those that it reported to work on, and `sent` those it was given since. It
    samples `max_num_seqs` of them at once, as far as its cache of `kv_cache_tokens` has room for
    them at the job's `length`; 0: unknown. `gpus` are the UUIDs of those that it computes on,
    in a `memory_space` (shared/weights/meeting.py).
    """

    client: Client
    length: Length = field(default_factory=Length)
    name: str = ""
    boot_id: str = ""
    up: bool = False
    ref: WeightsRef | None = None
    why: str = "it was not asked yet"
    listed: bool = True
    max_num_seqs: int = 0
    kv_cache_tokens: int = 0
    gpus: tuple[str, ...] = ()
    memory_space: str | None = None
    under_way: int = 0
    busy: int = 0
    sent: int = 0
    num_joins: int = 0
    num_loads: int = 0
    failed_sync: bool = False
    by_files: bool = False
    held: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    retry_at: float = 0.0
    _retry_s: float = field(default=FIRST_RETRY_S)

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def is_left_alone(self) -> bool:
        """Whether nothing of the job is under way there."""
        return not self.under_way and not self.num_loads

    @property
    def capacity(self) -> int:
        """How many completions it can sample at once, one at least; 0: unknown, taken to be without
        bound."""
        bounds = [self.max_num_seqs] if self.max_num_seqs else []
        if self.kv_cache_tokens:
            bounds.append(max(int(self.kv_cache_tokens / self.length.tokens), 1))
        return min(bounds, default=0)

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
        """Returns below how many completions a full sampler is to report how busy it is."""
        return self.capacity if self.room <= 0 else None

    def configure(self, serving: ServingWeights) -> None:
        """Takes over what it reported of itself and of the model's engine."""
        self.name, self.boot_id = serving.replica, serving.boot_id
        self.gpus, self.memory_space = serving.gpus, serving.memory_space
        self.max_num_seqs, self.kv_cache_tokens = serving.max_num_seqs, serving.kv_cache_tokens

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
