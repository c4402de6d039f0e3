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


@pytest.mark.slow
async def test_no_pair_is_graded_wrongly() -> None:
    tools = tools_of(ScriptedSandbox(Execution(verdict="ok")))
    math = registry.bind(RewardSpec(grader="math"), tools)
    wrong: list[Pair] = []
    for pair in PAIRS:
        item = ScoreItem(prompt="", completion=pair.completion, row={"answer": pair.wanted})
        (part,) = await math.grade([item])
        wrong += [] if part.value == float(pair.is_right) else [pair]
    await tools.limited.close()
    assert wrong == []
