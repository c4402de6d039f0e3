"""One sampler of the pool, as a job sees it: its state and room, and what it is asked for."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from services.orchestrator.errors import OperatorActionNeeded
from services.orchestrator.tasks import gather_all
from shared.errors import HoneError, StateLost
from shared.host.logs import get_logger
from shared.http.client import Client
from shared.settings import Settings
from shared.wire import (
    Aborted,
    AbortRequest,
    GenerateRequest,
    ModelRequest,
    RolloutGroup,
    SentWeights,
    ServingWeights,
    WeightsRef,
)

FIRST_RETRY_S, MAX_RETRY_S = 0.25, 30.0

NUM_MEASURED = 32
"""Groups over which the length of completions is averaged: the newest."""

FEW = 4
"""Groups that are measured before their mean counts alone."""

HUNG = 1.2
"""A sampler that has not ended a group after this many deadlines counts as hanging."""

ABORT_S = 2.0
"""Seconds for a sampler to end a job's requests. A stopped worker does not wait longer."""

NUM_ASKED_WHO = 4
"""Times that a sampler is asked who it is before it serves: at once, so on connections of their
own. A load balancer between two samplers that chooses at random goes unnoticed once in 16 times,
and then at the latest when weights are loaded."""

MAX_DIRECT = 128
"""Single completions, such as a conversation's turns, that are waited for on connections of their
own at a time: one request each, where a poll takes three. It leaves connections of the transport's
256 for everything else. Groups are polled for, because only polls tell how many of their
completions are left."""

NUM_LIVES = 3
"""How often a sampler gets the model, if it restarts each time before its identity is confirmed."""

NOT_HERE = frozenset({"not_seen", "no_adapters", "not_met"})
"""Codes of a sampler that can never take weights this way: it does not see their folder, its engine
takes no such adapter, or the trainer's GPU does not reach it."""


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


@dataclass(frozen=True)
class Push:
    """A published version, as all samplers load it (`ref`). `again` returns the version in
    the form for a sampler that failed to load it; `prove` raises unless a sampler serves it. With
    `drain` each sampler finishes its groups before it loads. `is_trial`: it is not known yet
    whether every sampler can take weights this way."""

    ref: WeightsRef
    again: Callable[[], Awaitable[WeightsRef]]
    prove: Callable[[Client, WeightsRef, ServingWeights], Awaitable[None]]
    drain: bool = False
    is_trial: bool = False

    @property
    def is_sent(self) -> bool:
        """Whether it goes from device to device, to the samplers that are up at the time."""
        return isinstance(self.ref.root, SentWeights)

    async def for_sampler(self, sampler: Sampler, *, late: bool = False) -> WeightsRef:
        """Returns the version as this sampler is to load it. Raises what `again` does."""
        files = self.is_sent and (late or sampler.by_files)
        return await self.again() if sampler.failed_sync or files else self.ref


@dataclass(eq=False)
class Sampler:
    """`name` is what it calls itself, and `boot_id` its engine's life.

    `up`: it serves `ref`, which the job published last; None: only the model so far. A sampler that
    is not up gets no groups, and `why` says the reason. `num_joins` counts how often it came up.
    `failed_sync`: it did not load a version that others loaded. `by_files`: it gets versions as
    files, because a version that was sent to its GPU did not arrive. `listed`: the settings or a
    registration name it now. `held`: it gets no further groups until a sync is done; `idle` is set
    while it has none. `num_loads` are the versions that it loads at the moment: one, or none.
    `num_direct` are its completions that wait on a connection of their own.

    Its load counts completions. `under_way` counts the completions of all groups that it was given
    and has not returned, `busy` the completions that it reported to work on, and `sent` the
    completions that it was given since. It samples `max_num_seqs` completions at once, as far as
    its cache of `kv_cache_tokens` has room for them at the job's `length`; 0: unknown. It computes
    on `gpus` (UUIDs) in a `memory_space` (shared/weights/meeting.py).
    """

    client: Client
    length: Length = field(default_factory=Length)
    name: str = ""
    boot_id: str = ""
    up: bool = False
    ref: WeightsRef | None = None
    why: str = "it was not asked yet"
    listed: bool = True
    dtype: str = ""
    max_num_seqs: int = 0
    kv_cache_tokens: int = 0
    gpus: tuple[str, ...] = ()
    memory_space: str | None = None
    under_way: int = 0
    busy: int = 0
    sent: int = 0
    num_joins: int = 0
    num_loads: int = 0
    num_direct: int = 0
    failed_sync: bool = False
    by_files: bool = False
    held: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    retry_at: float = 0.0
    _retry_s: float = field(default=FIRST_RETRY_S)

    def __post_init__(self) -> None:
        self.idle.set()

    # --- in the pool, or out of it ---------------------------------------------------------------

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def is_left_alone(self) -> bool:
        """Whether it does nothing for the job."""
        return not self.under_way and not self.num_loads

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

    # --- its room --------------------------------------------------------------------------------

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

    # --- what it is asked for --------------------------------------------------------------------

    async def give_model(self, spec: ModelRequest, settings: Settings, patience_s: float) -> None:
        """Makes it serve the model, and notes what it reports of itself. Raises
        OperatorActionNeeded if different samplers answer at its URL: each has a model and weights
        of its own, and only one of them would get a version. A sampler that died meanwhile, and
        answers as another, is given the model again."""
        for _ in range(NUM_LIVES):
            serving = await self.client.call(
                "PUT",
                "/model",
                spec,
                ServingWeights,
                deadline_s=settings.operation_deadline_s,
                patience_s=patience_s,
            )
            others = await self._others(serving, settings, patience_s)
            if not others:
                return self.configure(serving)
            again = await self._others(serving, settings, patience_s)
            if len(again) < NUM_ASKED_WHO:  # a dead sampler does not answer again
                raise OperatorActionNeeded(self._two_answer(serving, others[0]))
        raise StateLost(f"{self.url} was restarted {NUM_LIVES} times while it was given the model")

    def configure(self, serving: ServingWeights) -> None:
        """Notes what it reports of itself and of the model's engine."""
        self.name, self.boot_id = serving.replica, serving.boot_id
        self.gpus, self.memory_space = serving.gpus, serving.memory_space
        self.max_num_seqs, self.kv_cache_tokens = serving.max_num_seqs, serving.kv_cache_tokens
        self.dtype = serving.dtype

    async def _others(
        self, serving: ServingWeights, settings: Settings, patience_s: float
    ) -> list[ServingWeights]:
        """Returns which of NUM_ASKED_WHO answers come from another sampler, or from another life
        of this one."""
        answers = await gather_all(
            self.client.call(
                "GET",
                "/weights",
                None,
                ServingWeights,
                deadline_s=settings.short_deadline_s,
                patience_s=patience_s,
            )
            for _ in range(NUM_ASKED_WHO)
        )
        who = serving.replica, serving.boot_id
        return [answer for answer in answers if (answer.replica, answer.boot_id) != who]

    def _two_answer(self, serving: ServingWeights, other: ServingWeights) -> str:
        names = (
            f"as two samplers {serving.replica!r} and {other.replica!r}"
            if other.replica != serving.replica
            else f"as two engines of the name {serving.replica!r}"
        )
        return (
            f"{self.url} answers {names}, as a load balancer does; name each sampler in "
            'HONE_ROLLOUT_URL, or set that to "registered", and HONE_ROLLOUT_ADVERTISE_URL at each '
            "sampler"
        )

    async def load_weights(
        self, push: Push, settings: Settings, patience_s: float, *, late: bool = False
    ) -> ServingWeights:
        """Returns its answer once it serves the version, proven. `late`: it joins after the version
        was sent. Raises StateLost unless the sampler and the engine with the model answer."""
        self.num_loads += 1
        try:
            ref = await push.for_sampler(self, late=late)
            if push.drain and self.up and not late:  # `Pool.push` lets it sample again
                self.held = True
                await self.idle.wait()
            serving = await self.client.call(
                "POST",
                "/reload_weights",
                ref,
                ServingWeights,
                deadline_s=settings.short_deadline_s,
                patience_s=patience_s,
            )
            if serving.replica != self.name:
                raise StateLost(
                    f"sampler {serving.replica!r} answers at {self.url}, and {self.name!r} did "
                    "when the model was loaded"
                )
            if serving.boot_id != self.boot_id:
                raise StateLost(
                    f"sampler {self.name!r} has another engine than when the job's model was loaded"
                )
            await push.prove(self.client, ref, serving)
            return serving
        finally:
            self.num_loads -= 1

    async def generate(
        self, body: GenerateRequest, key: str, settings: Settings, patience_s: float
    ) -> RolloutGroup:
        is_direct = body.sampling.n == 1 and self.num_direct < MAX_DIRECT
        self.num_direct += is_direct
        try:
            return await self.client.call(
                "POST",
                "/generate",
                body,
                RolloutGroup,
                deadline_s=settings.generate_deadline_s * HUNG,
                key=key,
                wait_s=None if is_direct else 0,
                patience_s=patience_s,
            )
        finally:
            self.num_direct -= is_direct

    async def abort(self, body: AbortRequest) -> None:
        """Ends requests of the job. Nothing depends on it: a sampler that does not answer soon is
        logged, and its fence keeps the rest from other weights."""
        try:
            await self.client.call("POST", "/abort", body, Aborted, deadline_s=ABORT_S)
        except HoneError as error:
            get_logger().warning("not aborted", job=body.job_id, url=self.url, reason=error.detail)
