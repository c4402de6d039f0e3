"""The pool: which samplers serve a job, and which one samples a group.

    away --PUT /model, reload--> up --a call or a sync fails--> away, asked again by itself

Each group goes to the sampler with the most room, in the order of asking, and waits while none has
any. What a sampler does not finish is sampled by another, under the same key, and exactly one
answer is taken: none lost, none counted twice. A sampler that fails alone costs the job nothing
but time. If the last one fails, its error is the job's, as with one sampler.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.orchestrator.loop.admission import Admission
from services.orchestrator.loop.decisions import MustPause, SyncFailed
from services.orchestrator.loop.discovery import Registered, none_registered, sampler_urls
from services.orchestrator.loop.group_requests import GroupRequests
from services.orchestrator.loop.replica import Length, Replica
from services.orchestrator.loop.tasks import all_of, stop
from shared.client import Client
from shared.config import Settings
from shared.errors import BadRequest, HoneError, StateLost, Unavailable
from shared.logs import get_logger
from shared.presence import Tell, tell_nobody
from shared.wire import (
    AbortRequest,
    GenerateRequest,
    ModelRequest,
    RolloutGroup,
    SentWeights,
    ServingWeights,
    SleepRequest,
    WeightsRef,
)

LOOK_S = 0.25
"""How often the pool looks for samplers that are to be asked again."""

DISCOVER_S = 5.0
"""How often the pool looks for samplers that came or left."""

NUM_ASKED_WHO = 4
"""Times that a sampler is asked who it is before it serves: at once, so on connections of their
own. A load balancer between two samplers that chooses at random goes unnoticed once in 16 times,
and then at the latest when weights are loaded."""

NUM_LIVES = 3
"""Times that a sampler is given the model, if each time it dies before it says who it is."""

MAX_FAULTS = 3
"""Samplers that may fail over one group, by more than being away, before its error is the job's: a
prompt that ends every engine must not take the whole pool along again and again."""

MAX_CONVERSATIONS = 65_536
"""Of how many conversations, the newest, it is known which sampler has them in its cache."""

STALE = "stale"


@dataclass(frozen=True)
class Push:
    """A published version: as it goes to all samplers (`ref`), as it goes to one that failed to
    load it (`again`), and what raises unless a sampler serves it (`prove`). `drain`: each sampler
    finishes its groups before it loads."""

    ref: WeightsRef
    again: WeightsRef
    prove: Callable[[Client, WeightsRef, ServingWeights], Awaitable[None]]
    drain: bool = False

    @property
    def is_sent(self) -> bool:
        """Whether it goes from device to device, to the samplers that are there at the time."""
        return isinstance(self.ref.root, SentWeights)

    def for_sampler(self, replica: Replica, *, late: bool = False) -> WeightsRef:
        """Returns the version as this sampler is to load it."""
        files = self.is_sent and (late or replica.by_files)
        return self.again if replica.failed_sync or files else self.ref


class Samplers:
    """All samplers of one job. `open` begins an epoch, `push` makes all serve a version."""

    def __init__(
        self, settings: Settings, tell: Tell, registered: Registered = none_registered
    ) -> None:
        self._settings = settings
        self._registered = registered
        self._tell = tell
        self._replicas: dict[str, Replica] = {}
        self._length = Length()
        self._spec: ModelRequest | None = None
        self._pushed: Push | None = None
        self._admission = Admission(self._up, self._nobody)
        self._keeper: asyncio.Task[None] | None = None
        self._requests = GroupRequests(settings, self._admission, self._patience_s)
        self._homes: OrderedDict[str, tuple[Replica, WeightsRef | None]] = OrderedDict()
        self._discover_at = self._found_at = 0.0

    # --- the pool --------------------------------------------------------------------------------

    async def open(self, spec: ModelRequest) -> None:
        """Makes the samplers serve a model, and none of the weights before. Returns once one does,
        and the others have had a little time; they join later. Raises the first one's error if
        none does."""
        await self._stop_keeping()
        self._spec, self._pushed = spec, None
        for replica in self._replicas.values():
            replica.end("the job is loaded again")
            replica.by_files = False
        await self._find_some()
        await self._first_up()
        self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        await self._stop_keeping()
        for replica in self._replicas.values():
            await replica.client.close()

    async def abort(self, body: AbortRequest) -> None:
        """Ends what the samplers have under way of the job. Nothing depends on it: one that does
        not answer soon is logged, and its fence keeps the rest from other weights."""
        if not self._replicas:
            await self._discover_again()
        every = self._replicas.values()
        await asyncio.gather(*(self._requests.abort(replica, body) for replica in every))

    async def sleep(self, body: SleepRequest) -> None:
        """Makes all samplers free their GPUs until the next version is pushed."""
        deadline_s = self._settings.sync_deadline_s
        for replica in self._up():
            await replica.client.call("POST", "/sleep", body, ServingWeights, deadline_s=deadline_s)

    def gpus(self) -> tuple[tuple[str, ...], ...]:
        """Returns those of each sampler that is up, by UUID."""
        return tuple(replica.gpus for replica in self._up())

    def under_way(self) -> dict[str, int]:
        """Returns the completions that each sampler was given and has not returned, by URL."""
        return {url: replica.under_way for url, replica in self._replicas.items()}

    def up(self) -> list[Client]:
        """Returns the clients of those that serve the job."""
        return [replica.client for replica in self._up()]

    def one(self) -> Client:
        """Returns the client of a sampler, of one that is up if there is one. Raises Unavailable if
        there is none at all."""
        if not self._replicas:
            raise self._nobody()
        return max(self._replicas.values(), key=lambda replica: replica.up).client

    async def _first_up(self) -> None:
        patience_s = self._settings.patience_s
        joins = {
            asyncio.create_task(self._join(replica, patience_s)): replica
            for replica in self._replicas.values()
            if replica.listed
        }
        try:
            waiting = set(joins)
            while waiting and not self._up():
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if waiting:
                await asyncio.wait(waiting, timeout=self._settings.replica_patience_s)
        finally:
            await stop(*joins)
        errors = {
            replica: None if join.cancelled() else join.exception()
            for join, replica in joins.items()
        }
        for error in errors.values():
            if error and not (self._up() and isinstance(error, HoneError) and error.code != STALE):
                raise error
        for replica, error in errors.items():
            if not replica.up:
                replica.end(str(error or "it is still starting"))
                await self._tell(f"sampler {replica.url} joins later: {replica.why}", True)

    async def _join(self, replica: Replica, patience_s: float) -> None:
        """Brings the sampler to the model and to the version that serve now."""
        assert self._spec is not None, "the pool was opened"
        replica.configure(await self._give_model(replica, self._spec, patience_s))
        while (pushed := self._pushed) is not None:
            ref = pushed.for_sampler(replica, late=True)
            await self._load(replica, pushed, ref, patience_s)
            if pushed is self._pushed:  # else a newer one was pushed meanwhile
                break
        replica.begin(pushed.ref if pushed else None)
        self._admission.admit()

    async def _give_model(
        self, replica: Replica, spec: ModelRequest, patience_s: float
    ) -> ServingWeights:
        """Returns what the one sampler at this URL answered that serves the model. Raises MustPause
        if different samplers answer there: each has a model and weights of its own, and only one of
        them would get what all need. One that died meanwhile, and answers as another, is given the
        model again."""
        for _ in range(NUM_LIVES):
            serving = await replica.client.call(
                "PUT",
                "/model",
                spec,
                ServingWeights,
                deadline_s=self._settings.start_deadline_s,
                patience_s=patience_s,
            )
            others = await self._others(replica, serving, patience_s)
            if not others:
                return serving
            again = await self._others(replica, serving, patience_s)
            if len(again) < NUM_ASKED_WHO:  # what has died does not answer again
                other = others[0]
                names = (
                    f"as two samplers {serving.replica!r} and {other.replica!r}"
                    if other.replica != serving.replica
                    else f"as two engines of the name {serving.replica!r}"
                )
                raise MustPause(
                    f"{replica.url} answers {names}, as a load balancer does; name each sampler in "
                    "HONE_ROLLOUT_URL, or a DNS name of them all as dns+http://<name>:<port>"
                )
        raise StateLost(
            f"{replica.url} was started anew {NUM_LIVES} times while it was given the model"
        )

    async def _others(
        self, replica: Replica, serving: ServingWeights, patience_s: float
    ) -> list[ServingWeights]:
        """Returns those of NUM_ASKED_WHO answers that are not of this life of this sampler."""
        answers = await all_of(
            replica.client.call(
                "GET",
                "/weights",
                None,
                ServingWeights,
                deadline_s=self._settings.start_deadline_s,
                patience_s=patience_s,
            )
            for _ in range(NUM_ASKED_WHO)
        )
        who = serving.replica, serving.boot_id
        return [answer for answer in answers if (answer.replica, answer.boot_id) != who]

    async def _keep(self) -> None:
        """Asks samplers that are away again, and finds those that came or left."""
        joins: dict[Replica, asyncio.Task[None]] = {}
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                if time.monotonic() >= self._discover_at:
                    await self._discover_again()
                for replica in [*self._replicas.values()]:
                    join = joins.get(replica)
                    is_due = not replica.up and time.monotonic() >= replica.retry_at
                    if replica.listed and is_due and (join is None or join.done()):
                        joins[replica] = asyncio.create_task(self._rejoin(replica))
                    if not replica.listed and replica.is_left_alone and (not join or join.done()):
                        del self._replicas[replica.url]
                        await replica.client.close()
        finally:
            await stop(*joins.values())

    async def _rejoin(self, replica: Replica) -> None:
        before = replica.why
        try:
            await self._join(replica, 0.0)
        except HoneError as error:
            replica.failed_sync |= isinstance(error, SyncFailed)
            replica.end(error.detail)
            if error.detail != before:
                get_logger().warning("sampler away", url=replica.url, reason=error.detail)
        else:
            version = replica.ref.root.version if replica.ref else None
            serves = "the model" if version is None else f"version {version}"
            await self._tell(f"sampler {replica.url} serves {serves}", False)

    async def _find_some(self) -> None:
        """Waits until there is a sampler, as names and registrations may stand for none. Raises
        Unavailable if none comes."""
        end = time.monotonic() + self._settings.patience_s
        is_said = False
        while await self._discover() == 0:
            if time.monotonic() > end:
                raise Unavailable(f"there is no sampler at all: {self._places()}")
            if not is_said:
                await self._tell(f"waiting for a first sampler: {self._places()}", True)
            is_said = True
            await asyncio.sleep(LOOK_S)

    def _places(self) -> str:
        return f"HONE_ROLLOUT_URL is {self._settings.rollout_url!r}, which stands for none now"

    async def _discover_again(self) -> None:
        """While Redis is away, the samplers are those of before."""
        try:
            await self._discover()
        except Unavailable as error:
            get_logger().warning("samplers not found out", reason=error.detail)

    async def _discover(self) -> int:
        """Returns how many samplers there are. Raises StoreUnavailable while Redis is away. Where
        there is none at all, those of before stay for as long as a service may be away: that they
        could not renew their leases, or that a name was not found, ends no sampler."""
        now = time.monotonic()
        self._discover_at = now + DISCOVER_S
        urls = await sampler_urls(self._settings.rollout_urls, self._registered)
        if urls:
            self._found_at = now
        elif now < self._found_at + self._settings.patience_s:
            return 0
        for replica in self._replicas.values():
            replica.listed = replica.url in urls
        for url in urls:
            if url not in self._replicas:
                self._replicas[url] = self._new(url, alone=len(urls) == 1)
        return len(urls)

    def _new(self, url: str, *, alone: bool) -> Replica:
        """Returns one that was not asked yet. Of several, the pool says itself which is away."""
        client = Client(
            "rollout",
            url,
            token=self._settings.bearer(),
            binary=True,
            patience_s=self._settings.patience_s,
            tell=self._tell if alone else tell_nobody,
        )
        replica = Replica(client, self._length)

        def hear(busy: int) -> None:
            replica.hear(busy)
            self._admission.admit()

        client.poller.heard, client.poller.busy_below = hear, replica.wants_to_hear_below
        return replica

    async def _stop_keeping(self) -> None:
        await self._requests.close()
        if self._keeper:
            await stop(self._keeper)
            await asyncio.gather(self._keeper, return_exceptions=True)

    def _up(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.up]

    def _patience_s(self, replica: Replica) -> float:
        """Short where another sampler could do it instead."""
        others = any(other is not replica for other in self._up())
        return self._settings.replica_patience_s if others else self._settings.patience_s

    # --- weights ---------------------------------------------------------------------------------

    async def push(self, push: Push) -> list[ServingWeights]:
        """Makes all samplers serve a version, and returns what each answered. One that fails is
        taken out of the pool and brought to the version before it comes back; if all fail, raises
        the error of the first."""
        self._pushed = push
        up = self._up()
        if not up:
            raise self._nobody()
        loads = (
            self._load(replica, push, push.for_sampler(replica), self._patience_s(replica))
            for replica in up
        )
        try:
            answers = await asyncio.gather(*loads, return_exceptions=True)
        finally:
            for replica in up:
                replica.held = False
        served = [answer for answer in answers if isinstance(answer, ServingWeights)]
        for replica, answer in zip(up, answers, strict=True):
            if isinstance(answer, ServingWeights):
                replica.begin(push.ref)
            elif not served or not self._can_do_without(replica, answer):
                raise answer
            else:
                replica.failed_sync = True
                replica.by_files |= push.is_sent
                await self._take_out(replica, str(answer))
        self._admission.admit()
        return served

    async def _load(
        self, replica: Replica, push: Push, ref: WeightsRef, patience_s: float
    ) -> ServingWeights:
        replica.num_loads += 1
        try:
            if push.drain and replica.up:
                replica.held = True
                await replica.idle.wait()
            serving = await replica.client.call(
                "POST",
                "/reload_weights",
                ref,
                ServingWeights,
                deadline_s=self._settings.sync_deadline_s,
                patience_s=patience_s,
            )
            if serving.replica != replica.name:
                raise StateLost(
                    f"sampler {serving.replica!r} answers at {replica.url}, and {replica.name!r} "
                    "did when the model was loaded"
                )
            if serving.boot_id != replica.boot_id:
                raise StateLost(
                    f"sampler {replica.name!r} has another engine than the one that the job's "
                    "model was loaded into"
                )
            await push.prove(replica.client, ref, serving)
            return serving
        finally:
            replica.num_loads -= 1

    # --- sampling --------------------------------------------------------------------------------

    async def generate(
        self, body: GenerateRequest, key: str, conversation: str | None = None
    ) -> RolloutGroup:
        """Returns the group, sampled by whichever sampler; the turns of one `conversation` by the
        same one, if it has room soon and still has the weights that it computed its cache with.
        Raises the error of the last one that is left, and what another sampler would answer
        alike."""
        self._length.expect(body)
        replica, group = await self._generate(body, key, self._home(conversation))
        self._length.measure(group)
        if conversation is not None:
            self._homes[conversation] = replica, replica.ref
            self._homes.move_to_end(conversation)
            if len(self._homes) > MAX_CONVERSATIONS:
                self._homes.popitem(last=False)
        return group

    def _home(self, conversation: str | None) -> Replica | None:
        """Returns the sampler that has the conversation so far in its cache, if there is one."""
        replica, ref = self._homes.get(conversation or "", (None, None))
        return replica if replica and replica.up and replica.ref is ref else None

    async def _generate(
        self, body: GenerateRequest, key: str, near: Replica | None
    ) -> tuple[Replica, RolloutGroup]:
        faults = 0
        while True:
            replica = await self._admission.room_for(body.sampling.n, near)
            num_joins = replica.num_joins
            try:
                return await self._requests.sample(replica, body, key)
            except HoneError as error:
                faults += not isinstance(error, Unavailable) or error.code == "deadline"
                if faults > MAX_FAULTS or not self._can_do_without(replica, error):
                    raise
                if replica.num_joins == num_joins:  # else it came back meanwhile
                    await self._take_out(replica, error.detail)
            finally:
                replica.give_back(body.sampling.n)
                self._admission.admit()

    def _can_do_without(self, replica: Replica, error: BaseException) -> bool:
        """Returns whether the error is this sampler's alone, and another one is there."""
        if not isinstance(error, HoneError) or isinstance(error, BadRequest) or error.code == STALE:
            return False
        return any(other is not replica for other in self._up())

    async def _take_out(self, replica: Replica, why: str) -> None:
        if not replica.up:  # another group has said so
            return
        replica.end(why)
        left = f"{len(self._up())} of {len(self._replicas)} samplers are left"
        await self._tell(f"sampler {replica.url} is out: {why}; {left}", True)

    def _nobody(self) -> Unavailable:
        whys = "; ".join(f"{replica.url}: {replica.why}" for replica in self._replicas.values())
        return Unavailable(f"no sampler serves the job ({whys})", code="unreachable")
