"""Held-out evaluation: pass@k and confidence intervals, against values worked out by hand; and
prompts are sampled some at a time, and none are left under way."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.orchestrator.grpo import held_out as evaluation
from services.orchestrator.grpo.advantages import full_mark
from services.orchestrator.grpo.estimates import (
    differences,
    drop_partial_pass_at_k,
    estimate,
    estimates,
    ks,
    means,
    pass_at_k,
    problem_metrics,
    t_975,
)
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
from shared.job import EvaluationSpec, Job
from shared.wire import Prompt, RolloutGroup, Score, ScoredGroup
from tests.support.scored_batches import make_job, make_rollout, score


def answered(scores: tuple[Score, ...], *reasons: str, tokens: int = 1) -> ScoredGroup:
    """One problem's completions; `reasons` are why they ended, "stop" if not given."""
    rollouts = tuple(
        make_rollout(tokens + number, reason)
        for number, reason in enumerate(reasons or ("stop",) * len(scores))
    )
    group = RolloutGroup(prompt_token_ids=(1,), rollouts=rollouts)  # type: ignore[arg-type]
    return ScoredGroup(prompt=Prompt(index=0, content="?", row={}), group=group, scores=scores)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (5, 2, 1, 0.4),
        (5, 2, 2, 0.7),  # 1 - C(3, 2) / C(5, 2) = 1 - 3 / 10
        (5, 2, 3, 0.9),  # 1 - 1 / 10
        (5, 2, 4, 1.0),  # four of five cannot all be wrong
        (4, 0, 4, 0.0),
        (4, 4, 1, 1.0),
        (1024, 1, 512, 0.5),
        (6, 1, 1, 1 / 6),  # and 1 - 5 / 6 is less in floats
    ],
)
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(
    n: int, c: int, k: int, expected: float
) -> None:
    assert pass_at_k(n, c, k) == expected


def test_pass_at_k_is_shown_for_powers_of_two_and_for_all() -> None:
    assert [ks(1), ks(4), ks(6)] == [[1], [1, 2, 4], [1, 2, 4, 6]]
    with pytest.raises(ValueError, match="pass@3 of 2 completions"):
        pass_at_k(2, 1, 3)


def below(t: float, degrees: int, parts: int = 4000) -> float:
    """The probability that Student's t is below `t`: its density, by Simpson's rule."""
    half = degrees / 2
    constant = math.exp(math.lgamma(half + 0.5) - math.lgamma(half)) / math.sqrt(degrees * math.pi)

    def density(x: float) -> float:
        return constant * (1 + x * x / degrees) ** -(half + 0.5)

    width = t / parts
    inner = sum((2 + 2 * (part % 2)) * density(part * width) for part in range(1, parts))
    return 0.5 + width / 3 * (density(0) + inner + density(t))


def test_the_quantiles_are_those_of_students_distribution() -> None:
    for degrees in [*range(1, 40), 100, 1318]:
        assert below(t_975(degrees), degrees) == pytest.approx(0.975, abs=3e-5), degrees


def test_an_interval_is_over_problems_by_students_distribution() -> None:
    found = estimate([1.0, 0.0, 1.0, 1.0])
    # mean 3/4, s^2 = (3 * (1/4)^2 + (3/4)^2) / 3 = 1/4, so t s / sqrt(n) = 3.182 * 0.5 / 2
    assert (found.mean, found.num_problems) == (0.75, 4)
    assert (found.low, found.high) == pytest.approx((0.75 - 0.7955, 0.75 + 0.7955))
    alone = estimate([0.5])
    assert (alone.mean, alone.low, alone.high) == (0.5, None, None)


def test_a_difference_is_over_the_same_problems() -> None:
    """Problems differ much, models by 0.1 on each but one."""
    to = [{"reward": value} for value in (0.0, 0.9, 0.1, 0.8)]
    of = [{"reward": value} for value in (0.1, 1.0, 0.2, 0.8)]
    found = differences(of, to)["reward"]
    # differences 0.1, 0.1, 0.1, 0: mean 0.075, s^2 = (3 * 0.025^2 + 0.075^2) / 3 = 0.0025
    assert found.mean == pytest.approx(0.075)
    assert found.high == pytest.approx(0.075 + 3.182 * 0.05 / 2)
    assert found.low == pytest.approx(0.075 - 3.182 * 0.05 / 2)
    unpaired = estimates(of)["reward"]
    assert unpaired.high is not None and found.high is not None
    assert unpaired.high - unpaired.mean > 8 * (found.high - found.mean)


@pytest.mark.parametrize(
    ("differing", "p_value"),
    [
        ((1.0,) * 4, 2 / 16),  # all the one way or all the other
        ((-1.0,) * 6, 2 / 64),
        ((1.0,) * 7 + (-1.0,), 2 * (1 + 8) / 256),  # at most 1 of 8 the other way
        ((1.0,) * 9 + (-1.0,), 2 * (1 + 10) / 1024),
        ((0.1, 0.2, -0.3), 1.0),  # the sum is 0, rounding apart
        ((0.5, 0.25, -0.25), 6 / 8),  # 2 of 8 sums are 0; others are 0.5 or 1 from it
        ((0.5, 0.5, 0.25), 2 / 8),
        ((), 1.0),
        ((1.0,) * 16, 2 / 65536),
        ((1.0,) * 17, None),
    ],
)
def test_few_differing_problems_have_an_exact_p_value(
    differing: tuple[float, ...], p_value: float | None
) -> None:
    unlike = [{"reward": 1.0 + value} for value in differing]
    to = [{"reward": 1.0}] * (len(differing) + 100)
    found = differences([*unlike, *to[len(differing) :]], to)["reward"]
    assert found.p_value == (p_value and pytest.approx(p_value, abs=1e-12))
    assert estimates(to)["reward"].p_value is None, "no difference"


def test_a_difference_leaves_out_problems_that_one_model_has_no_value_for() -> None:
    found = differences(
        [{"reward": 1.0}, {"reward": 1.0, "pass@2": 1.0}, {}],
        [{"reward": 0.0}, {"reward": 1.0}, {"reward": 1.0}],
    )
    assert [*found] == ["reward"]
    assert (found["reward"].mean, found["reward"].num_problems) == (0.5, 2)


def test_a_problems_metrics_are_over_its_completions() -> None:
    job = make_job()
    one = answered(
        (score(job, 1.0), score(job, 0.0), score(job, 1.0), score(job, 0.5)),
        *("stop", "length", "stop", "stop"),
        tokens=2,
    )
    assert problem_metrics(one, job) == pytest.approx(
        {
            "reward": 0.625,
            "pass@1": 0.5,
            "pass@2": 1 - 1 / 6,  # C(2, 2) / C(4, 2)
            "pass@4": 1.0,
            "rewards/right/mean": 0.625,
            "completions/mean_length": 3.5,  # 2, 3, 4 and 5 tokens
            "completions/clipped_ratio": 0.25,
        }
    )


def test_what_went_wrong_or_has_no_reward_is_neither_right_nor_wrong() -> None:
    job = make_job()
    one = answered(
        (score(job, 1.0), NOT_GRADED, score(job, None), score(job, 0.0)),
        *("stop", "error", "stop", "stop"),
    )
    found = problem_metrics(one, job)
    assert (found["reward"], found["pass@1"], found["pass@2"]) == (0.5, 0.5, 1.0)
    assert "pass@4" not in found
    assert found["completions/mean_length"] == pytest.approx(8 / 3), "1, 3 and 4 tokens"
    nothing = answered((NOT_GRADED,), "error")
    assert problem_metrics(nothing, job) == {}


def with_mark(job: Job, mark: float) -> Job:
    return job.model_copy(update={"evaluation": EvaluationSpec(pass_reward=mark)})


def test_right_is_the_full_mark_of_what_is_no_shaping_unless_the_job_says_else() -> None:
    job = make_job(
        {"grader": "right", "weight": 2.0},
        {"grader": "form", "weight": 0.5, "shaping": True},
        {"grader": "long", "weight": -1.0},
    )
    assert full_mark(score(job, 0.0, 0.0, 0.0), job) == 2.0
    # outcomes: 2 * 1, 2 * 1 - 1, 2 * 0.9; form counts for neither
    one = answered(
        (score(job, 1.0, 0.0, 0.0), score(job, 1.0, 1.0, 1.0), score(job, 0.9, 1.0, 0.0))
    )
    assert problem_metrics(one, job)["pass@1"] == pytest.approx(1 / 3)
    assert problem_metrics(one, job)["reward"] == pytest.approx((2.0 + 1.0 + 1.8) / 3)
    assert problem_metrics(one, with_mark(job, 1.5))["pass@1"] == pytest.approx(2 / 3)
    assert problem_metrics(one, with_mark(job, 1.0))["pass@1"] == 1.0


def test_a_mark_that_rounding_takes_from_a_completion_is_full() -> None:
    job = make_job(*({"grader": f"g{i}", "weight": 0.1} for i in range(3)))
    assert score(job, 1.0, 1.0, 1.0).value != 0.3, "0.1 + 0.1 + 0.1 is a little more"
    less = with_mark(job, math.nextafter(0.1 + 0.1 + 0.1, 1))
    one = answered((score(job, 1.0, 1.0, 1.0),))
    assert problem_metrics(one, less)["pass@1"] == 1.0


def test_the_full_mark_is_that_of_the_rewards_that_apply() -> None:
    job = make_job({"grader": "right"}, {"grader": "code"}, {"grader": "form", "shaping": True})
    one = answered(
        (
            score(job, 1.0, "skipped", 0.0),  # all of the one that applies
            score(job, 1.0, 0.0, 1.0),  # 1 of 2
            score(job, "skipped", "skipped", 1.0),  # nothing says whether it is right
        )
    )
    found = problem_metrics(one, job)
    assert found["pass@1"] == 0.5 and "pass@3" not in found
    assert found["rewards/form/mean"] == pytest.approx(2 / 3)
    assert found["reward"] == 1.0, "of the two that an outcome reward judges"


def test_a_held_out_reward_of_shaping_alone_is_none() -> None:
    """No completion is right, and each earns 0.1 for its form."""
    job = make_job({"grader": "right"}, {"grader": "form", "weight": 0.1, "shaping": True})
    found = problem_metrics(answered((score(job, 0.0, 1.0), score(job, 0.0, 1.0))), job)
    assert (found["reward"], found["pass@1"], found["rewards/form/mean"]) == (0.0, 0.0, 1.0)


def test_pass_at_k_is_left_out_where_a_problem_with_a_verdict_has_fewer_completions() -> None:
    full = {"reward": 1.0, "pass@1": 0.5, "pass@2": 1.0}
    found = drop_partial_pass_at_k([full, {"reward": 0.0, "pass@1": 0.0}, {}])
    assert means(found) == {"reward": 0.5, "pass@1": 0.25}
    assert drop_partial_pass_at_k([full, {}]) == [full, {}], (
        "a problem without verdicts is none of either"
    )


def test_equal_values_have_no_interval_and_shares_stay_within_0_and_1() -> None:
    problems = [{"reward": 0.5, "pass@1": 0.0}] * 10
    found = estimates(problems)
    assert (found["reward"].low, found["reward"].high) == (None, None)
    # Wilson, none of 10: z^2 / (n + z^2) = 3.8415 / 13.8415
    assert (found["pass@1"].low, found["pass@1"].high) == (0.0, pytest.approx(0.27753, abs=1e-5))
    right = estimates([{"pass@1": 1.0}] * 10)["pass@1"]
    assert (right.low, right.high) == (pytest.approx(0.72247, abs=1e-5), 1.0)
    most = estimates([{"pass@1": value} for value in (1.0, 0.0, 1.0, 1.0)])["pass@1"]
    assert (most.low, most.high) == (0.0, 1.0), "0.75 +- 0.7955"
    above = differences([{"reward": 1.1}, {"reward": 2.1}], [{"reward": 1.0}, {"reward": 2.0}])
    assert above["reward"].low is None, "equal but for rounding"
    alone = estimates([{"pass@1": 1.0}])["pass@1"]
    assert (alone.low, alone.high) == (None, None)


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
