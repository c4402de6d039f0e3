"""Which sampler a conversation continues at, and from which cached prefixes."""

from __future__ import annotations

from typing import Any, cast

import pytest

from services.orchestrator.samplers.admission import PrefixAffinity
from services.orchestrator.samplers.sampler import Sampler
from shared.wire import GenerateRequest, Known, Rollout, RolloutGroup, Span, TokenIds, WeightsRef

NEXT = GenerateRequest(
    prompt=({"role": "user", "content": "a"},),
    known=Known(num_messages=2, token_ids=TokenIds((1, 2))),
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
    homes = PrefixAffinity()
    homes.keeps_prefixes = keeps
    homes.note("c", None, sampler, sampled_by(3))
    assert (home := homes.find("c")) and home.sampler is sampler
    assert homes.find("d") is None and homes.find(None) is None
    sampler.begin(version())
    assert (homes.find("c") is not None) == keeps


def test_kept_prefixes_are_of_the_version_that_began_the_conversation_there(
    sampler: Sampler,
) -> None:
    homes = PrefixAffinity()
    homes.keeps_prefixes = True
    homes.note("c", None, sampler, sampled_by(3, 4))
    sampler.begin(version())
    homes.note("c", homes.find("c"), sampler, sampled_by(5))
    home = homes.find("c")
    assert homes.request(NEXT, home, sampler).known == Known(
        num_messages=2, token_ids=TokenIds((1, 2)), version=3
    )
    other = Sampler(cast(Any, None))
    assert homes.request(NEXT, home, other) is NEXT, "another sampler has no such cache"
    homes.note("c", home, other, sampled_by(5))
    other.begin(version())
    homes.note("c", None, other, sampled_by(6))
    assert homes.request(NEXT, homes.find("c"), other).known == Known(
        num_messages=2, token_ids=TokenIds((1, 2)), version=6
    )


def test_a_sampler_that_was_away_has_no_cache(sampler: Sampler) -> None:
    homes = PrefixAffinity()
    homes.keeps_prefixes = True
    homes.note("c", None, sampler, sampled_by(3))
    sampler.end("gone")
    assert homes.find("c") is None
    sampler.begin(sampler.ref)
    assert homes.find("c") is None
