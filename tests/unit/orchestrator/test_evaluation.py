"""Held-out prompts are sampled some at a time, and none are left under way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.orchestrator.grpo import held_out as evaluation
from services.orchestrator.grpo.held_out import (
    Answers,
    Scores,
    bounded_prompt,
    ignored_metrics,
    prefixed_metrics,
    sample_held_out,
    set_metrics,
)
from services.orchestrator.samplers.clients import NOT_GRADED
from shared.errors import StateLost
from shared.wire import Prompt, RolloutGroup, Score
from tests.support.scored_batches import make_job, score

PROMPTS = tuple(Prompt(index=index, content=f"{index}?", row={}) for index in range(10))


class FakeServices:
    """Samples nothing; `generate` is what sampling does."""

    owner = "job:1:1"
    job_id = "job"

    def __init__(self, generate: Callable[[int], Awaitable[None]], score: Score) -> None:
        self._generate = generate
        self._score = score
        self.caller = self.samplers = self.reward = self

    async def sample(self, prompt: Prompt, *_: Any, **__: Any) -> RolloutGroup:
        await self._generate(prompt.index)
        return RolloutGroup(prompt_token_ids=(), rollouts=())  # type: ignore[arg-type]

    async def score(self, prompt: Prompt, *_: Any, **__: Any) -> tuple[Score, ...]:
        return (self._score if prompt.index else NOT_GRADED,)


async def test_a_bounded_number_of_prompts_is_sampled_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluation, "MAX_PROMPTS", 3)
    running: set[int] = set()
    most: list[int] = []

    async def generate(index: int) -> None:
        running.add(index)
        most.append(len(running))
        await asyncio.sleep(0)
        running.remove(index)

    services: Any = FakeServices(generate, score(make_job(), 0.5))
    answers_P = await sample_held_out(make_job(), "", PROMPTS, services, 3)
    metrics = prefixed_metrics("", answers_P)
    assert max(most) == 3 and len(most) == 10
    assert metrics["eval/reward"] == pytest.approx(0.5), "of the nine that were graded"
    assert metrics["eval/errored_rollouts"] == pytest.approx(1 / 10)
    assert metrics["eval/missing_rewards"] == 0.0


async def test_if_one_prompt_fails_the_others_have_ended() -> None:
    ended: list[int] = []

    async def generate(index: int) -> None:
        try:
            await asyncio.sleep(0 if index == 4 else 60)
        finally:
            ended.append(index)
        raise StateLost("the engine is gone")

    services: Any = FakeServices(generate, NOT_GRADED)
    with pytest.raises(StateLost):
        await sample_held_out(make_job(), "", PROMPTS, services, 3)
    assert sorted(ended) == list(range(10))


def test_shares_are_of_all_completions_and_rewards_of_problems() -> None:
    job = make_job()
    answers = [
        Answers((score(job, None), NOT_GRADED, NOT_GRADED, score(job, 1.0)), {"rewards/a/mean": 1}),
        Answers((score(job, 0.0), score(job, 0.0), NOT_GRADED, NOT_GRADED), {"rewards/a/mean": 0}),
    ]
    found = set_metrics(answers)
    assert found == {"missing_rewards": 1 / 8, "errored_rollouts": 4 / 8, "rewards/a/mean": 0.5}
    metrics = {f"eval/hard/{name}": value for name, value in found.items()}
    assert ignored_metrics(metrics, ["hard"]) == {"eval/hard/ignored": 5 / 8}
    metrics["eval/hard/missing_rewards"] = 0.0
    assert ignored_metrics(metrics, ["hard"]) == {}


@pytest.mark.parametrize(
    ("problems", "any_graded"),
    [([{"completions/mean_length": 3.0}], False), ([{}, {"reward": 0.0, "pass@1": 0.0}], True)],
)
def test_scores_without_any_reward_are_none(
    problems: list[dict[str, float]], any_graded: bool
) -> None:
    scores = Scores(
        key="k",
        model="m",
        set="",
        problems=tuple(problems),
        missing_rewards=1.0,
        errored_rollouts=0.0,
    )
    assert scores.has_any is any_graded


def test_a_stored_prompt_has_a_bound_and_a_chat_keeps_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluation, "STORED_CHARS", 100)
    assert bounded_prompt("x" * 101) == "x" * 100
    empty = len("{'role': 'user', 'content': ''}")
    first, last = [{"role": "user", "content": letter * 60} for letter in "ab"]
    assert bounded_prompt((first,)) == (first,)
    assert empty == 31 and bounded_prompt((first, last)) == (last,)
    short = {"role": "user", "content": "b" * 10}
    assert bounded_prompt((first, short)) == ({"role": "user", "content": "a" * 28}, short)
    image = {"role": "user", "content": [{"type": "image", "data": "x" * 100}]}
    assert bounded_prompt((image, short)) == (short,)
    assert bounded_prompt((image,)) == ()
