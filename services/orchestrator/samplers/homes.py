"""Which sampler has which conversation in its cache."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from services.orchestrator.samplers.sampler import Sampler
from shared.wire import GenerateRequest, RolloutGroup, WeightsRef

MAX_HOMES = 65_536
"""Newest conversations whose homes are known."""


@dataclass(frozen=True)
class Home:
    """A sampler with a conversation in its cache. `version`: the weights that began the
    conversation there. `ref` and `num_joins` are the sampler's at its latest answer."""

    sampler: Sampler
    version: int | None
    ref: WeightsRef | None
    num_joins: int


class Homes:
    """The homes of the conversations answered last. With `keeps_prefixes` a sampler's cache is of
    use also after newer weights were loaded."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, Home] = OrderedDict()
        self.keeps_prefixes = False

    def find(self, conversation: str | None) -> Home | None:
        """Returns the conversation's home, if its cache is of use."""
        if (home := self._homes.get(conversation or "")) is None:
            return None
        sampler = home.sampler
        is_same_life = sampler.up and home.num_joins == sampler.num_joins
        return home if is_same_life and (self.keeps_prefixes or home.ref is sampler.ref) else None

    def request(
        self, body: GenerateRequest, home: Home | None, sampler: Sampler
    ) -> GenerateRequest:
        """Returns the request for the sampler. At home it continues from what older weights have
        cached, with `keeps_prefixes`."""
        if not (self.keeps_prefixes and home and home.sampler is sampler and body.known):
            return body
        known = body.known.model_copy(update={"version": home.version})
        return body.model_copy(update={"known": known})

    def note(
        self, conversation: str, home: Home | None, sampler: Sampler, group: RolloutGroup
    ) -> None:
        """Notes which sampler sampled the latest answer, after the `home` found for it."""
        version = next(iter(group.rollouts[0].versions), None)
        if home and home.sampler is sampler:
            version = home.version
        self._homes[conversation] = Home(sampler, version, sampler.ref, sampler.num_joins)
        self._homes.move_to_end(conversation)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)
