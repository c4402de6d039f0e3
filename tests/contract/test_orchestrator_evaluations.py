"""Models compared on held-out problems: what they got, and that no job is harmed by it."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import pytest

from hone import evaluating
from services.orchestrator.evals.comparison import Comparison
from services.orchestrator.store import keys
from services.orchestrator.store.leases import Lease, LeaseLost
from shared.errors import BadRequest, Conflict, Failed, NotFound, Unavailable
from shared.job import Job
from shared.job.file import parse_job
from shared.wire import (
    EvaluatedModel,
    EvaluationEnded,
    EvaluationReport,
    EvaluationRequest,
    EvaluationState,
)
from tests.support import orchestrator_stack
from tests.support.orchestrator_stack import Stack

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures

GOOD, BAD = "m/good", "m/bad"


def changed(job: Job, **sections: dict[str, Any]) -> Job:
    document = job.model_dump(mode="json")
    for section, values in sections.items():
        document[section] = document[section] | values
    return parse_job(document)


async def evaluate(
    stack: Stack, *models: str, id: str | None = None, job: Job | None = None
) -> EvaluationReport:
    body = EvaluationRequest(
        id=id or f"eval-{secrets.token_hex(4)}",
        models=tuple(EvaluatedModel(name=model, model=model) for model in models or (GOOD,)),
        job=job or stack.job,
    )
    return await stack.client.call("POST", "/v1/evaluations", body, EvaluationReport, deadline_s=30)


async def leases(stack: Stack) -> list[str]:
    return await stack.store._redis.keys(f"{keys.LEASE}*")


async def samples_for_ever(stack: Stack) -> asyncio.Event:
    """Makes /generate wait; returns what is set once it does."""
    sampling = asyncio.Event()

    async def wait(_: Any) -> None:
        sampling.set()
        await asyncio.sleep(60)

    stack.fakes.fault["generate"] = wait
    return sampling


async def test_models_are_compared_on_the_same_problems(stack: Stack) -> None:
    stack.fakes.skills = {GOOD: 1.0, BAD: 0.0, "m/half": 0.5}
    job = changed(stack.job, evaluation={"samples": 4, "temperature": 1.0})
    report = await evaluate(stack, BAD, GOOD, "m/half", job=job)
    (held_out,) = report.sets
    assert (held_out.name, held_out.num_problems, held_out.num_samples) == ("", 4, 4)
    bad, good, half = held_out.models
    assert [bad.metrics[name].mean for name in ("reward", "pass@1", "pass@4")] == [0, 0, 0]
    assert [good.metrics[name].mean for name in ("reward", "pass@1", "pass@4")] == [1, 1, 1]
    assert good.metrics["completions/mean_length"].mean == 2
    assert (bad.differences, good.differences["pass@1"].mean) == ({}, 1)
    found = half.metrics["reward"]
    assert found.low is not None and found.low < found.mean == half.metrics["pass@1"].mean
    assert half.metrics["pass@4"].mean >= half.metrics["pass@2"].mean >= found.mean
    assert (half.missing_rewards, half.errored_rollouts) == (0, 0)


async def test_the_same_evaluation_again_draws_the_same_completions(stack: Stack) -> None:
    stack.fakes.skills = {GOOD: 0.5}
    job = changed(stack.job, evaluation={"samples": 8, "temperature": 1.0})
    first, second = [await evaluate(stack, GOOD, GOOD, job=job) for _ in range(2)]
    assert first.sets == second.sets
    of_both = first.sets[0].models
    assert of_both[0].metrics == of_both[1].metrics
    same = of_both[1].differences["reward"]
    assert (same.mean, same.high) == (0, None)
    other = await evaluate(stack, GOOD, job=job.model_copy(update={"seed": 5}))
    assert other.sets[0].models[0].metrics != of_both[0].metrics


async def test_each_held_out_set_has_its_own_table(stack: Stack) -> None:
    stack.fakes.skills = {GOOD: 1.0}
    rows = [{"q": "1?", "answer": 1}, {"q": "2?", "answer": 2}, {"q": "3?", "answer": 3}]
    hard = {"source": rows, "columns": {"prompt": "q"}, "num_prompts": 2}
    job = changed(stack.job, evaluation={"sets": {"hard": hard}})
    report = await evaluate(stack, job=job)
    assert [(held_out.name, held_out.num_problems) for held_out in report.sets] == [
        ("", 4),
        ("hard", 2),
    ]
    only = job.model_copy(update={"data": job.data.model_copy(update={"eval": None})})
    assert [held_out.name for held_out in (await evaluate(stack, job=only)).sets] == ["hard"]


async def test_an_id_sent_again_is_the_same_evaluation(stack: Stack) -> None:
    both = await asyncio.gather(*(evaluate(stack, id="eval-1") for _ in range(2)))
    assert both[0] == both[1] and stack.fakes.calls["model"] == 1
    with pytest.raises(Conflict) as caught:
        await evaluate(stack, BAD, id="eval-1")
    assert caught.value.code == "body_differs"


async def test_while_a_job_has_the_samplers_an_evaluation_is_refused(stack: Stack) -> None:
    sampling = await samples_for_ever(stack)
    running = await stack.submit()
    await sampling.wait()
    spec = stack.fakes.spec
    with pytest.raises(Conflict, match=rf"job '{running.id}' trains .* `hone pause {running.id}`"):
        await evaluate(stack)
    assert stack.fakes.spec is spec, "no sampler was asked"
    del stack.fakes.fault["generate"]
    await stack.post(f"{running.id}/cancel")


async def test_a_job_waits_for_an_evaluation_and_then_runs(stack: Stack) -> None:
    sampling = await samples_for_ever(stack)
    evaluating = asyncio.create_task(evaluate(stack, id="eval-1"))
    await sampling.wait()
    waiting = await stack.submit(stack.job.model_copy(update={"steps": 1}))
    state = await stack.client.get("/v1/evaluations/eval-1", EvaluationState)
    assert (state.model, state.number, state.num_done, state.num_problems) == (GOOD, 1, 0, 4)
    await asyncio.sleep(0.5)  # several looks into the queue
    found = await stack.get(waiting.id)
    assert (found.status, found.place) == ("queued", 1)
    assert [obstacle.evaluation for obstacle in found.waits_for.values()] == ["eval-1"]
    assert stack.fakes.calls["job"] == 0
    del stack.fakes.fault["generate"]
    ended = await stack.client.call(
        "DELETE", "/v1/evaluations/eval-1", None, EvaluationEnded, deadline_s=5
    )
    assert ended.ended
    with pytest.raises(Failed, match="was ended"):
        await evaluating
    assert (await stack.until(waiting.id)).status == "succeeded"
    with pytest.raises(NotFound, match="no evaluation 'eval-1' is under way"):
        await stack.client.get("/v1/evaluations/eval-1", EvaluationState)


async def test_after_an_evaluation_the_samplers_are_free_whatever_became_of_it(
    stack: Stack,
) -> None:
    await evaluate(stack)
    assert await leases(stack) == []

    async def breaks(_: Any) -> None:
        raise Failed("no memory for this model", code="out_of_memory")

    stack.fakes.fault["model"] = breaks
    with pytest.raises(Failed, match="no memory for this model"):
        await evaluate(stack)
    assert await leases(stack) == []


async def test_an_evaluation_whose_lease_is_lost_stops(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = await samples_for_ever(stack)

    async def lost(_: Any) -> None:
        raise LeaseLost("eval-1")

    monkeypatch.setattr(stack.client, "_patience_s", 0.0)
    evaluating = asyncio.create_task(evaluate(stack, id="eval-1"))
    await sampling.wait()
    monkeypatch.setattr(stack.store.loans, "beat", lost)
    with pytest.raises(Unavailable, match="no longer lent to the evaluation"):
        await evaluating


async def test_a_result_is_kept_where_redis_is_emptied_as_the_evaluation_ends(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All was sampled and graded while the samplers were lent."""
    stack.fakes.skills = {GOOD: 1.0}
    give_back = Comparison._give_back

    async def emptied(comparison: Comparison, lease: Lease) -> None:
        await stack.store._redis.flushall()
        await give_back(comparison, lease)

    monkeypatch.setattr(Comparison, "_give_back", emptied)
    (held_out,) = (await evaluate(stack)).sets
    assert held_out.models[0].metrics["reward"].mean == 1


async def test_two_evaluations_do_not_share_samplers(stack: Stack) -> None:
    sampling = await samples_for_ever(stack)
    first = asyncio.create_task(evaluate(stack, id="eval-1"))
    await sampling.wait()
    with pytest.raises(Conflict, match="another evaluation runs"):
        await evaluate(stack, BAD)
    await stack.client.call("DELETE", "/v1/evaluations/eval-1", None, EvaluationEnded, deadline_s=5)
    with pytest.raises(Failed):
        await first


@pytest.mark.parametrize(
    ("sections", "models", "sentence"),
    [
        ({"data": {"eval": None}}, [GOOD], "no held-out problems; expected data.eval"),
        ({"data": {"eval": "/nowhere/x.jsonl"}}, [GOOD], "/nowhere/x.jsonl"),
        ({}, ["/nowhere/model"], "no folder '/nowhere/model'"),
        ({"evaluation": {"sets": {"a": {"source": [{"x": 1}]}}}}, [GOOD], "no column 'prompt'"),
    ],
)
async def test_what_cannot_be_evaluated_is_a_sentence(
    stack: Stack, sections: dict[str, Any], models: list[str], sentence: str
) -> None:
    with pytest.raises(BadRequest, match=sentence):
        await evaluate(stack, *models, job=changed(stack.job, **sections))
    assert stack.fakes.calls["model"] == 0 and await leases(stack) == []


async def test_rewards_that_do_not_fit_the_problems_are_refused_before_anything_is_loaded(
    stack: Stack,
) -> None:
    document = stack.job.model_dump(mode="json") | {"rewards": [{"grader": "lenght"}]}
    with pytest.raises(BadRequest, match="did you mean 'length'"):
        await evaluate(stack, job=parse_job(document))
    assert stack.fakes.calls["model"] == 0


async def test_completions_that_went_wrong_are_counted_and_the_rest_scored(
    stack: Stack,
) -> None:
    stack.fakes.skills = {GOOD: 1.0}
    stack.fakes.errors = lambda body: "too long" if body.prompt == "1?" else None
    (held_out,) = (await evaluate(stack)).sets
    (scores,) = held_out.models
    assert scores.errored_rollouts == 0.25
    assert (scores.metrics["reward"].mean, scores.metrics["reward"].num_problems) == (1, 3)


async def test_the_python_client_hears_how_far_an_evaluation_is(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluating, "PROGRESS_S", 0.05)
    sampling = await samples_for_ever(stack)
    states: list[EvaluationState] = []
    body = EvaluationRequest(
        id="eval-1", models=(EvaluatedModel(name="good", model=GOOD),), job=stack.job
    )
    asked = asyncio.create_task(evaluating.evaluate(stack.client, body, states.append))
    await sampling.wait()
    while not any(state.number for state in states):
        await asyncio.sleep(0.01)
    assert (states[-1].model, states[-1].num_done, states[-1].num_problems) == ("good", 0, 4)
    await stack.client.call("DELETE", "/v1/evaluations/eval-1", None, EvaluationEnded, deadline_s=5)
    with pytest.raises(Failed, match="was ended"):
        await asked
