"""The pool of samplers: what a job asks of them all, and which one samples a group. READ FIRST.

    away --PUT /model, reload--> up --a call or a sync fails--> away, retried automatically

Samplers are found by URL or by registration (discovery.py), join, leave, and come back; what one
of them is asked for is in sampler.py. A sampler that settings and registrations name no more leaves
once nothing of the job is under way there.

Each group goes to the least loaded sampler with room, in the order of asking, and waits while none
has room (admission.py). A group that one sampler does not finish is sampled by another, under the
same key, and exactly one answer is taken: none lost, none counted twice. A sampler that fails alone
costs the job nothing but time. If the last one fails, its error is the job's, as with one sampler.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from services.orchestrator.errors import SyncFailed
from services.orchestrator.samplers.admission import (
    PrefixAffinity,
    PrefixHolder,
    Queue,
    WaitingGroup,
    choose,
)
from services.orchestrator.samplers.discovery import Discovery, Registered, none_registered
from services.orchestrator.samplers.sampler import NOT_HERE, Length, Push, Sampler
from services.orchestrator.samplers.status import Caller
from services.orchestrator.samplers.transport import client_to
from services.orchestrator.tasks import stop
from shared.errors import BadRequest, HoneError, Unavailable
from shared.host import tracing
from shared.host.logs import get_logger
from shared.http.client import Client
from shared.http.connecting import Presence
from shared.job import SyncMethod
from shared.wire import (
    AbortRequest,
    GenerateRequest,
    ModelRequest,
    RolloutGroup,
    ServingWeights,
    SleepRequest,
)

LOOK_AT_AWAY_S = 0.25
"""How often the pool looks for samplers that are to be asked again."""

SOON_S = 2.0
"""Seconds that a turn waits for the sampler with its conversation in the cache, before any other
sampler takes it: about the time of sampling a few dozen tokens, or of computing a long prompt
again."""

REPLICA_SHARE = 1 / 30
"""Share of `patience_s` for one sampler of several: another one then samples its groups. Long
enough for a lost connection. It need not cover a restart, because the other samplers continue."""

HEDGE_AT = 1 / 6
"""Share of `generate_deadline_s` after which another sampler with room is asked for a group too;
the first answer counts. Well above what a group usually takes, because it is sampled twice."""

MAX_FAULTS = 3
"""Samplers that may fail over one group, by more than being away, before its error is the job's: a
prompt that ends every engine must not take the whole pool along again and again."""


class Pool:
    """All samplers of one job, by URL, whether up or away. `open` begins an epoch, `push` makes all
    serve a version. `given_up` has the ways to move weights that a sampler could not take, so that
    "auto" does not try them again."""

    def __init__(self, caller: Caller, registered: Registered = none_registered) -> None:
        self._caller = caller
        self._settings, self._tell = caller.settings, caller.tell
        self._discovery = Discovery(caller.settings, registered)
        self._length = Length()
        self._queue = Queue()
        self._affinity = PrefixAffinity()
        self._spec: ModelRequest | None = None
        self._pushed: Push | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._aborting: set[asyncio.Task[None]] = set()
        self.samplers: dict[str, Sampler] = {}
        caller.status.serving = self._presences
        self.given_up: set[SyncMethod] = set()

    async def open(self, spec: ModelRequest) -> None:
        """Makes the samplers serve a model, and none of the weights before. Returns once one does,
        and the others have had a little time; they join later. Raises the first one's error if
        none does."""
        await self._stop_tasks()
        self._spec, self._pushed = spec, None
        self._affinity.keeps_prefixes = spec.keep_prefixes
        for sampler in self.samplers.values():
            sampler.end("the job is loaded again")
            sampler.by_files = False
        self._update(await self._discovery.some())
        await self._first_up()
        with tracing.detached():  # it lives longer than what it is begun in
            self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        await self._stop_tasks()
        for sampler in self.samplers.values():
            await sampler.client.close()

    async def abort(self, body: AbortRequest) -> None:
        """Ends what the samplers have under way of the job."""
        if not self.samplers:
            self._update(await self._discovery.now() or ())
        await asyncio.gather(*(sampler.abort(body) for sampler in self.samplers.values()))

    async def sleep(self, body: SleepRequest) -> None:
        """Makes all samplers free their GPUs until the next version is pushed."""
        deadline_s = self._settings.short_deadline_s
        for sampler in self.up():
            await sampler.client.call("POST", "/sleep", body, ServingWeights, deadline_s=deadline_s)

    async def _stop_tasks(self) -> None:
        tasks = [*self._aborting, *([self._keeper] if self._keeper else [])]
        await stop(*tasks)
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- who is up -------------------------------------------------------------------------------

    def up(self) -> list[Sampler]:
        """Returns the samplers that serve the weights published last."""
        return [sampler for sampler in self.samplers.values() if sampler.up]

    def _presences(self) -> set[Presence]:
        """Returns the presence of each sampler that is up, or of all while none is."""
        return {sampler.client.presence for sampler in self.up() or self.samplers.values()}

    def one(self) -> Client:
        """Returns the client of a sampler, which is up if any is. Raises Unavailable if there is no
        sampler at all."""
        if not self.samplers:
            raise self._none_up()
        return max(self.samplers.values(), key=lambda sampler: sampler.up).client

    def under_way(self) -> dict[str, int]:
        """Returns the completions that each sampler was given and has not returned, by URL."""
        return {url: sampler.under_way for url, sampler in self.samplers.items()}

    @property
    def want_files(self) -> bool:
        """Whether some sampler is unreachable, or does not get what is sent to its GPU."""
        every = self.samplers.values()
        return any(sampler.listed and (not sampler.up or sampler.by_files) for sampler in every)

    def _none_up(self) -> Unavailable:
        """Returns the error of a pool in which no sampler is up."""
        whys = "; ".join(f"{sampler.url}: {sampler.why}" for sampler in self.samplers.values())
        return Unavailable(f"no sampler serves the job ({whys})", code="unreachable")

    def _others(self, sampler: Sampler) -> bool:
        return any(other is not sampler for other in self.up())

    def _patience_s(self, sampler: Sampler) -> float:
        """Returns how long it may be unreachable: shortly where another sampler could do its
        work."""
        patience_s = self._settings.patience_s
        return REPLICA_SHARE * patience_s if self._others(sampler) else patience_s

    def _can_do_without(self, sampler: Sampler, error: BaseException) -> bool:
        """Returns whether the error is this sampler's alone, and another one is up."""
        if isinstance(error, BadRequest) or not isinstance(error, HoneError):
            return False
        return error.code != "stale" and self._others(sampler)

    async def _take_out(self, sampler: Sampler, why: str) -> None:
        """Gives it no more groups until it has joined again."""
        if not sampler.up:  # another group has said so
            return
        sampler.end(why)
        left = f"{len(self.up())} of {len(self.samplers)} samplers are left"
        await self._tell(f"sampler {sampler.url} is out: {why}; {left}", True)

    # --- weights ---------------------------------------------------------------------------------

    async def push(self, push: Push) -> list[ServingWeights]:
        """Makes all samplers serve a version, and returns their answers. A sampler that fails is
        taken out of the pool and brought to the version before it comes back. If all fail, raises
        the first one's error. While the way is on trial, raises the error of any sampler that
        cannot take weights this way."""
        self._pushed = push
        up = self.up()
        if not up:
            raise self._none_up()
        loads = (
            sampler.load_weights(push, self._settings, self._patience_s(sampler)) for sampler in up
        )
        try:
            answers = await asyncio.gather(*loads, return_exceptions=True)
        finally:
            for sampler in up:
                sampler.held = False
        for answer in answers if push.is_trial else ():
            if isinstance(answer, HoneError) and answer.code in NOT_HERE:
                raise answer
        served = [answer for answer in answers if isinstance(answer, ServingWeights)]
        for sampler, answer in zip(up, answers, strict=True):
            if isinstance(answer, ServingWeights):
                sampler.begin(push.ref)
            elif not served or not self._can_do_without(sampler, answer):
                raise answer
            else:
                sampler.failed_sync = True
                sampler.by_files |= push.is_sent
                await self._take_out(sampler, str(answer))
        self._admit()
        return served

    # --- sampling --------------------------------------------------------------------------------

    async def generate(
        self, body: GenerateRequest, key: str, conversation: str | None = None
    ) -> RolloutGroup:
        """Returns the group, sampled by any sampler. The turns of one `conversation` are sampled by
        the same one, if it has room soon and still serves the weights of its cache. Raises an error
        that every sampler would give, or the error of the last sampler."""
        self._length.expect(body)
        holder = self._affinity.find(conversation)
        sampler, group = await self._generate(body, key, holder)
        self._length.measure(group)
        if conversation:
            self._affinity.note(conversation, holder, sampler, group)
        return group

    async def _generate(
        self, body: GenerateRequest, key: str, holder: PrefixHolder | None
    ) -> tuple[Sampler, RolloutGroup]:
        faults = 0
        while True:
            sampler = await self._room_for(body.sampling.n, holder and holder.sampler)
            num_joins = sampler.num_joins
            request = self._affinity.request(body, holder, sampler)
            try:
                return await self._sample(sampler, request, key)
            except HoneError as error:
                faults += not isinstance(error, Unavailable) or error.code == "deadline"
                if faults > MAX_FAULTS or not self._can_do_without(sampler, error):
                    raise
                if sampler.num_joins == num_joins:  # else it came back meanwhile
                    await self._take_out(sampler, error.detail)
            finally:
                sampler.give_back(body.sampling.n)
                self._admit()

    async def _room_for(self, num_completions: int, near: Sampler | None = None) -> Sampler:
        """Waits for room, takes it, and returns the sampler: `near`, if it has room within SOON_S
        seconds. Raises Unavailable if no sampler serves."""
        given = asyncio.get_running_loop().create_future()
        waiting = WaitingGroup(num_completions, given, near)
        self._queue.add(waiting)
        self._admit()
        try:
            if near:
                await asyncio.wait({given}, timeout=SOON_S)
                self._queue.wait_anywhere(waiting)
                self._admit()
            return await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled() and not given.exception():
                given.result().give_back(num_completions)
                self._admit()
            raise
        finally:
            self._queue.remove(waiting)

    def _admit(self) -> None:
        """Gives waiting groups to samplers; called whenever there may be more room."""
        self._queue.admit([*self.samplers.values()], self._none_up)

    async def _sample(
        self, sampler: Sampler, body: GenerateRequest, key: str
    ) -> tuple[Sampler, RolloutGroup]:
        """Asks the sampler, and after a while also another one with room. Returns the sampler that
        answered first, and its group."""
        first = asyncio.create_task(self._ask(sampler, body, key))
        asked = {first: sampler}
        try:
            await asyncio.wait(asked, timeout=HEDGE_AT * self._settings.generate_deadline_s)
            if not first.done() and (other := self._spare(sampler)):
                asked[asyncio.create_task(self._hedge(other, body, key))] = other
            waiting = set(asked)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if not task.exception():
                        return asked[task], task.result()
            return sampler, first.result()
        finally:
            losers = [asked[task] for task in asked if not task.done()]
            await stop(*asked)
            await asyncio.gather(*asked, return_exceptions=True)  # the loser's error is ignored
            if len(asked) > 1:
                for loser in losers:
                    self._end_there(loser, body, key)

    async def _ask(self, sampler: Sampler, body: GenerateRequest, key: str) -> RolloutGroup:
        return await sampler.generate(body, key, self._settings, self._patience_s(sampler))

    def _spare(self, sampler: Sampler) -> Sampler | None:
        """Returns another sampler with room that no group waits for."""
        others = (other for other in self.samplers.values() if other is not sampler)
        return None if self._queue else choose(others)

    async def _hedge(self, other: Sampler, body: GenerateRequest, key: str) -> RolloutGroup:
        get_logger().info("group sampled twice", key=key, url=other.url)
        other.take(body.sampling.n)
        try:
            return await self._ask(other, body, key)
        finally:
            other.give_back(body.sampling.n)
            self._admit()

    def _end_there(self, loser: Sampler, body: GenerateRequest, key: str) -> None:
        """Ends the sampler's request for a group that another sampler has finished."""
        assert body.job_id is not None
        request = AbortRequest(
            job_id=body.job_id, attempt=body.attempt, epoch=body.epoch, keys=(key,)
        )
        task = asyncio.create_task(loser.abort(request))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    # --- joining and leaving ---------------------------------------------------------------------

    def _update(self, urls: Sequence[str]) -> None:
        """Adds new samplers. A sampler that is no longer listed gets no groups."""
        for sampler in self.samplers.values():
            sampler.listed = sampler.url in urls
        for url in urls:
            if url not in self.samplers:
                self.samplers[url] = self._new(url, alone=len(urls) == 1)

    def _new(self, url: str, *, alone: bool) -> Sampler:
        """Returns a sampler that was not asked yet. Of several, the pool says itself which is
        unreachable."""
        client = client_to("rollout", url, self._caller, reports=alone)
        sampler = Sampler(client, self._length)

        def hear(busy: int) -> None:
            sampler.hear(busy)
            self._admit()

        poller = sampler.client.poller
        poller.heard, poller.busy_below = hear, sampler.wants_to_hear_below
        return sampler

    async def _first_up(self) -> None:
        patience_s = self._settings.patience_s
        joins = {
            asyncio.create_task(self._join(sampler, patience_s)): sampler
            for sampler in self.samplers.values()
            if sampler.listed
        }
        try:
            waiting = set(joins)
            while waiting and not self.up():
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if waiting:
                await asyncio.wait(waiting, timeout=REPLICA_SHARE * patience_s)
        finally:
            await stop(*joins)
        errors = {
            sampler: None if join.cancelled() else join.exception()
            for join, sampler in joins.items()
        }
        for error in errors.values():
            if error and not (self.up() and isinstance(error, HoneError) and error.code != "stale"):
                raise error
        for sampler, error in errors.items():
            if not sampler.up:
                sampler.end(str(error or "it is still starting"))
                await self._tell(f"sampler {sampler.url} joins later: {sampler.why}", True)

    async def _join(self, sampler: Sampler, patience_s: float) -> None:
        """Brings the sampler to the model and to the version that serve now."""
        assert self._spec is not None, "the pool was opened"
        await sampler.give_model(self._spec, self._settings, patience_s)
        while (pushed := self._pushed) is not None:
            try:
                await sampler.load_weights(pushed, self._settings, patience_s, late=True)
            except HoneError as error:
                if error.code in NOT_HERE:
                    self.given_up.add(pushed.ref.root.method)
                raise
            if pushed is self._pushed:  # else a newer one was pushed meanwhile
                break
        sampler.begin(pushed.ref if pushed else None)
        self._admit()

    async def _keep(self) -> None:
        """Retries samplers that are unreachable, and looks for new and removed samplers."""
        joins: dict[Sampler, asyncio.Task[None]] = {}
        try:
            while True:
                await asyncio.sleep(LOOK_AT_AWAY_S)
                if self._discovery.is_due and (urls := await self._discovery.now()) is not None:
                    self._update(urls)
                for sampler in [*self.samplers.values()]:
                    join = joins.get(sampler)
                    is_due = not sampler.up and time.monotonic() >= sampler.retry_at
                    if sampler.listed and is_due and (join is None or join.done()):
                        joins[sampler] = asyncio.create_task(self._rejoin(sampler))
                    if not sampler.listed and sampler.is_left_alone and (not join or join.done()):
                        del self.samplers[sampler.url]
                        await sampler.client.close()
        finally:
            await stop(*joins.values())

    async def _rejoin(self, sampler: Sampler) -> None:
        before = sampler.why
        try:
            await self._join(sampler, 0.0)
        except HoneError as error:
            sampler.failed_sync |= isinstance(error, SyncFailed)
            sampler.end(error.detail)
            if error.detail != before:
                get_logger().warning("sampler away", url=sampler.url, reason=error.detail)
        except Exception as error:  # a bug: logged, retried with backoff
            sampler.end(f"it could not join: {error!r}")
            get_logger().exception("a sampler could not join", url=sampler.url)
        else:
            version = sampler.ref.root.version if sampler.ref else None
            serves = "the model" if version is None else f"version {version}"
            await self._tell(f"sampler {sampler.url} serves {serves}", False)
