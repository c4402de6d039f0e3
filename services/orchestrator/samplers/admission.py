"""Which sampler a group gets: the least loaded one with room. Groups wait for room in the order of
asking, so that a step's groups come before the next step's. The next turn of a conversation goes
first, to the sampler with its earlier turns in its cache, if that sampler has room soon."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.orchestrator.samplers.sampler import Sampler
from shared.wire import GenerateRequest, RolloutGroup, WeightsRef


def choose(samplers: Iterable[Sampler]) -> Sampler | None:
    """Returns the least loaded sampler that can begin a group now; None if none can."""
    free = [
        sampler
        for sampler in samplers
        if sampler.up and sampler.listed and not sampler.held and sampler.room > 0
    ]
    return min(free, key=lambda sampler: sampler.load, default=None)


@dataclass(eq=False)
class WaitingGroup:
    """A group that waits for room; at first only at the sampler `near`, unless that is None."""

    num_completions: int
    given: asyncio.Future[Sampler]
    near: Sampler | None = None

    def give(self, sampler: Sampler) -> None:
        sampler.take(self.num_completions)
        self.given.set_result(sampler)


class Queue:
    """The groups that wait for room: conversations' turns that wait for their own sampler, and
    groups that any sampler may have."""

    def __init__(self) -> None:
        self._turns: list[WaitingGroup] = []
        self._groups: deque[WaitingGroup] = deque()

    def __bool__(self) -> bool:
        """Whether a group waits that any sampler may have."""
        return bool(self._groups)

    def add(self, waiting: WaitingGroup) -> None:
        (self._turns if waiting.near else self._groups).append(waiting)

    def remove(self, waiting: WaitingGroup) -> None:
        for queue in (self._turns, self._groups):
            if waiting in queue:
                queue.remove(waiting)

    def wait_anywhere(self, turn: WaitingGroup) -> None:
        """Lets a turn that waits for its own sampler wait for any sampler, as the first."""
        if turn in self._turns:
            self._turns.remove(turn)
            self._groups.appendleft(turn)

    def admit(self, samplers: Sequence[Sampler], none_up: Callable[[], BaseException]) -> None:
        """Gives waiting groups to samplers, as long as a sampler has room. If none serves, the
        groups get the error that `none_up` returns."""
        for turn in [*self._turns]:
            near = turn.near
            if near is None or not (near.up and near.listed):
                self.wait_anywhere(turn)
            elif near.room > 0 and not near.held:
                self._turns.remove(turn)
                turn.give(near)
        serves = any(sampler.up and sampler.listed for sampler in samplers)
        while self._groups:
            sampler = choose(samplers)
            if serves and not sampler:
                return
            waiting = self._groups.popleft()
            if waiting.given.done():
                continue
            if sampler:
                waiting.give(sampler)
            else:
                waiting.given.set_exception(none_up())


MAX_HOLDERS = 65_536
"""Newest conversations whose sampler is known."""


@dataclass(frozen=True)
class PrefixHolder:
    """A sampler with a conversation in its cache. `version`: the weights that began the
    conversation there. `ref` and `num_joins` are the sampler's at its latest answer."""

    sampler: Sampler
    version: int | None
    ref: WeightsRef | None
    num_joins: int


class PrefixAffinity:
    """The samplers of the conversations answered last. With `keeps_prefixes` a sampler's cache is
    of use also after newer weights were loaded."""

    def __init__(self) -> None:
        self._holders: OrderedDict[str, PrefixHolder] = OrderedDict()
        self.keeps_prefixes = False

    def find(self, conversation: str | None) -> PrefixHolder | None:
        """Returns the conversation's sampler, if its cache is of use."""
        if (holder := self._holders.get(conversation or "")) is None:
            return None
        sampler = holder.sampler
        is_same_life = sampler.up and holder.num_joins == sampler.num_joins
        return (
            holder if is_same_life and (self.keeps_prefixes or holder.ref is sampler.ref) else None
        )

    def request(
        self, body: GenerateRequest, holder: PrefixHolder | None, sampler: Sampler
    ) -> GenerateRequest:
        """Returns the request for the sampler. There it continues from what older weights have
        cached, with `keeps_prefixes`."""
        if not (self.keeps_prefixes and holder and holder.sampler is sampler and body.known):
            return body
        known = body.known.model_copy(update={"version": holder.version})
        return body.model_copy(update={"known": known})

    def note(
        self, conversation: str, holder: PrefixHolder | None, sampler: Sampler, group: RolloutGroup
    ) -> None:
        """Notes which sampler sampled the latest answer, after the `holder` found for it."""
        version = next(iter(group.rollouts[0].versions), None)
        if holder and holder.sampler is sampler:
            version = holder.version
        self._holders[conversation] = PrefixHolder(sampler, version, sampler.ref, sampler.num_joins)
        self._holders.move_to_end(conversation)
        if len(self._holders) > MAX_HOLDERS:
            self._holders.popitem(last=False)
