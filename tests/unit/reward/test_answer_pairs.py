"""`math` on the pairs of `bench/answers/`, which are right or wrong by construction."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.answers import Pair, pairs
from services.reward.grading import registry
from shared.job import RewardSpec
from shared.wire import Execution, ScoreItem
from tests.support.reward_helpers import ScriptedSandbox, tools_of

PAIRS = list(pairs())


def test_there_are_a_thousand_pairs_of_fifty_kinds_and_always_the_same() -> None:
    kinds = Counter(pair.kind for pair in PAIRS)
    assert (len(kinds) >= 50, len(PAIRS) >= 1000, set(kinds.values())) == (True, True, {20})
    assert all(
        {pair.is_right for pair in PAIRS if pair.kind == kind} == {True, False} for kind in kinds
    )
    assert list(pairs()) == PAIRS


async def check(tried: list[Pair]) -> None:
    tools = tools_of(ScriptedSandbox(Execution(verdict="ok")))
    math = registry.bind(RewardSpec(grader="math"), tools)
    wrong: list[Pair] = []
    for pair in tried:
        item = ScoreItem(prompt="", completion=pair.completion, row={"answer": pair.wanted})
        (part,) = await math.grade([item])
        wrong += [] if part.value == float(pair.is_right) else [pair]
    await tools.limited.close()
    assert wrong == []


async def test_no_pair_of_any_kind_is_graded_wrongly() -> None:
    """Four right and four wrong pairs of each kind."""
    kinds: dict[tuple[str, bool], list[Pair]] = {}
    for pair in PAIRS:
        kinds.setdefault((pair.kind, pair.is_right), []).append(pair)
    await check([pair for pairs_of_kind in kinds.values() for pair in pairs_of_kind[:4]])


@pytest.mark.soak
async def test_no_pair_is_graded_wrongly() -> None:
    await check(PAIRS)
