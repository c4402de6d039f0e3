"""Which sampler a conversation continues at, and from which cached prefixes."""

from __future__ import annotations

from typing import Any, cast

import pytest

from services.orchestrator.samplers.admission import PrefixAffinity
from services.orchestrator.samplers.sampler import Sampler
from shared.wire import (
    ConversationPrefix,
    GenerateRequest,
    Rollout,
    RolloutGroup,
    Span,
    TokenIds,
    WeightsRef,
)

NEXT = GenerateRequest(
    prompt=({"role": "user", "content": "a"},),
    known=ConversationPrefix(num_messages=2, token_ids=TokenIds((1, 2))),
)


def sampled_by(*versions: int) -> RolloutGroup:
    spans = tuple(Span(version=version, start=at) for at, version in enumerate(versions))
    rollout = Rollout(
        text="", token_ids=TokenIds(range(len(versions))), finish_reason="stop", spans=spans
    )
    return RolloutGroup(prompt_token_ids=TokenIds((1,)), rollouts=(rollout,))


def version() -> WeightsRef:
    return cast(WeightsRef, object())


@pytest.fixture
def sampler() -> Sampler:
    found = Sampler(cast(Any, None))
    found.begin(version())
    return found


@pytest.mark.parametrize("keeps", [False, True])
def test_newer_weights_end_the_use_of_a_cache_unless_prefixes_are_kept(
    sampler: Sampler, keeps: bool
) -> None:
    affinity = PrefixAffinity()
    affinity.keeps_prefixes = keeps
    affinity.note("c", None, sampler, sampled_by(3))
    assert (holder := affinity.find("c")) and holder.sampler is sampler
    assert affinity.find("d") is None and affinity.find(None) is None
    sampler.begin(version())
    assert (affinity.find("c") is not None) == keeps


def test_kept_prefixes_are_of_the_version_that_began_the_conversation_there(
    sampler: Sampler,
) -> None:
    affinity = PrefixAffinity()
    affinity.keeps_prefixes = True
    affinity.note("c", None, sampler, sampled_by(3, 4))
    sampler.begin(version())
    affinity.note("c", affinity.find("c"), sampler, sampled_by(5))
    holder = affinity.find("c")
    assert affinity.request(NEXT, holder, sampler).known == ConversationPrefix(
        num_messages=2, token_ids=TokenIds((1, 2)), version=3
    )
    other = Sampler(cast(Any, None))
    assert affinity.request(NEXT, holder, other) is NEXT, "another sampler has no such cache"
    affinity.note("c", holder, other, sampled_by(5))
    other.begin(version())
    affinity.note("c", None, other, sampled_by(6))
    assert affinity.request(NEXT, affinity.find("c"), other).known == ConversationPrefix(
        num_messages=2, token_ids=TokenIds((1, 2)), version=6
    )


def test_a_sampler_that_was_unreachable_has_no_cache(sampler: Sampler) -> None:
    affinity = PrefixAffinity()
    affinity.keeps_prefixes = True
    affinity.note("c", None, sampler, sampled_by(3))
    sampler.end("gone")
    assert affinity.find("c") is None
    sampler.begin(sampler.ref)
    assert affinity.find("c") is None
