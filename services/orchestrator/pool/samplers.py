"""The pool of samplers: what a job asks of them all, and which one samples a group.

Who is in the pool is kept by `members.py`. Each group goes to the sampler with the most room, in
the order of asking, and waits while none has any. What a sampler does not finish is sampled by
another, under the same key, and exactly one answer is taken: none lost, none counted twice. A
sampler that fails alone costs the job nothing but time. If the last one fails, its error is the
job's, as with one sampler.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping

from services.orchestrator.pool.admission import Admission
from services.orchestrator.pool.discovery import Registered, none_registered
from services.orchestrator.pool.gpus import Gpus
from services.orchestrator.pool.group_requests import GroupRequests
from services.orchestrator.pool.members import Members
from services.orchestrator.pool.replica import Length, Replica
from services.orchestrator.pool.sampler_loading import NOT_HERE, Push, load
from shared.errors import HoneError, Unavailable
from shared.http.client import Client
from shared.http.presence import Tell
from shared.job import SyncMethod
from shared.settings import Settings
from shared.wire import (
    AbortRequest,
    GenerateRequest,
    ModelRequest,
    RolloutGroup,
    ServingWeights,
    SleepRequest,
    WeightsRef,
)

MAX_FAULTS = 3
"""Samplers that may fail over one group, by more than being away, before its error is the job's: a
prompt that ends every engine must not take the whole pool along again and again."""

MAX_CONVERSATIONS = 65_536
"""Newest conversations of which it is known which sampler has them in its cache."""


class Samplers:
    """All samplers of one job. `open` begins an epoch, `push` makes all serve a version. `headers`
    go with each request."""

    def __init__(
        self,
        settings: Settings,
        tell: Tell,
        registered: Registered = none_registered,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self._length = Length()
        self._members = Members(
            settings, tell, registered, self._length, self._admit, headers=headers
        )
        self._admission = Admission(self._members.up, self._members.nobody)
        self._requests = GroupRequests(settings, self._admission, self._members.patience_s)
        self._homes: OrderedDict[str, tuple[Replica, WeightsRef | None]] = OrderedDict()

    # --- the pool --------------------------------------------------------------------------------

    async def open(self, spec: ModelRequest) -> None:
        """Makes the samplers serve a model, and none of the weights before. Returns once one does,
        and the others have had a little time; they join later. Raises the first one's error if
        none does."""
        await self._requests.close()
        await self._members.open(spec)

    async def close(self) -> None:
        await self._requests.close()
        await self._members.close()

    async def abort(self, body: AbortRequest) -> None:
        """Ends what the samplers have under way of the job. Nothing depends on it: one that does
        not answer soon is logged, and its fence keeps the rest from other weights."""
        if not self._members.replicas:
            await self._members.discover()
        every = self._members.replicas.values()
        await asyncio.gather(*(self._requests.abort(replica, body) for replica in every))

    async def sleep(self, body: SleepRequest) -> None:
        """Makes all samplers free their GPUs until the next version is pushed."""
        deadline_s = self._settings.sync_deadline_s
        for replica in self._members.up():
            await replica.client.call("POST", "/sleep", body, ServingWeights, deadline_s=deadline_s)

    def gpus(self, trainer: str | None, memory_space: str | None) -> Gpus:
        """Returns where weights go to from the trainer's GPU: the samplers that are up."""
        up = self._members.up()
        spaces = {memory_space, *(replica.memory_space for replica in up)}
        one_space = None not in spaces and len(spaces) == 1
        return Gpus(trainer, tuple(replica.gpus for replica in up), one_space)

    def under_way(self) -> dict[str, int]:
        """Returns the completions that each sampler was given and has not returned, by URL."""
        return {url: replica.under_way for url, replica in self._members.replicas.items()}

    def up(self) -> list[Client]:
        """Returns the clients of the samplers that serve the job."""
        return [replica.client for replica in self._members.up()]

    def clients(self) -> list[Client]:
        """Returns the clients of all, whether they are up or away."""
        return [replica.client for replica in self._members.replicas.values()]

    def one(self) -> Client:
        """Returns the client of a sampler, of one that is up if there is one. Raises Unavailable if
        there is none at all."""
        if not self._members.replicas:
            raise self._members.nobody()
        return max(self._members.replicas.values(), key=lambda replica: replica.up).client

    # --- weights ---------------------------------------------------------------------------------

    @property
    def given_up(self) -> set[SyncMethod]:
        """The ways to move weights that "auto" does not try again: a sampler could not take them
        so."""
        return self._members.given_up

    @property
    def want_files(self) -> bool:
        """Whether some sampler is away, or does not get what is sent to its GPU."""
        every = self._members.replicas.values()
        return any(replica.listed and (not replica.up or replica.by_files) for replica in every)

    async def push(self, push: Push) -> list[ServingWeights]:
        """Makes all samplers serve a version, and returns what each answered. One that fails is
        taken out of the pool and brought to the version before it comes back; if all fail, raises
        the error of the first, and of one that cannot take it this way while that is tried."""
        self._members.pushed = push
        up = self._members.up()
        if not up:
            raise self._members.nobody()
        loads = (
            load(replica, push, self._settings, self._members.patience_s(replica)) for replica in up
        )
        try:
            answers = await asyncio.gather(*loads, return_exceptions=True)
        finally:
            for replica in up:
                replica.held = False
        for answer in answers if push.is_trial else ():
            if isinstance(answer, HoneError) and answer.code in NOT_HERE:
                raise answer
        served = [answer for answer in answers if isinstance(answer, ServingWeights)]
        for replica, answer in zip(up, answers, strict=True):
            if isinstance(answer, ServingWeights):
                replica.begin(push.ref)
            elif not served or not self._members.can_do_without(replica, answer):
                raise answer
            else:
                replica.failed_sync = True
                replica.by_files |= push.is_sent
                await self._members.take_out(replica, str(answer))
        self._admit()
        return served

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
                if faults > MAX_FAULTS or not self._members.can_do_without(replica, error):
                    raise
                if replica.num_joins == num_joins:  # else it came back meanwhile
                    await self._members.take_out(replica, error.detail)
            finally:
                replica.give_back(body.sampling.n)
                self._admit()

    def _admit(self) -> None:
        self._admission.admit()
