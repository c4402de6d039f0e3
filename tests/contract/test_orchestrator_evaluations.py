"""Jobs of 0 steps, which compare models on held-out problems: their reports, and that they are
jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from hone import long_calls
from hone.async_client import AsyncClient
from services.orchestrator.api import history
from services.orchestrator.store.records import Submission
from shared.errors import BadRequest, Failed, StateLost
from shared.http.client import Client
from shared.job import EvaluatedModel, Job
from shared.job.file import parse_job
from shared.wire import (
    DryRun,
    EvaluationReport,
    JobRecord,
    ResumeRequest,
    RolloutList,
    SubmitRequest,
)
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.orchestrator_stack import Stack

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures

GOOD, BAD = "m/good", "m/bad"
ROWS = [{"q": "1?", "answer": 1}, {"q": "2?", "answer": 2}, {"q": "3?", "answer": 3}]
HARD = {"source": ROWS, "columns": {"prompt": "q"}, "num_prompts": 2}
LEAST_S = 0.05


def evaluation(job: Job, *models: str, **sections: dict[str, Any]) -> Job:
    """Returns a job of 0 steps that evaluates the models; without any, the job's own."""
    document = job.model_dump(mode="json") | {"steps": 0}
    document["data"]["train"] = None
    document["evaluation"]["models"] = [{"model": model} for model in models]
    for section, values in sections.items():
        document[section] = document[section] | values
    return parse_job(document)


async def evaluated(stack: Stack, *models: str, **sections: dict[str, Any]) -> EvaluationReport:
    record = await stack.submit(evaluation(stack.job, *models, **sections))
    return report_of(await stack.until(record.id))


def report_of(record: JobRecord) -> EvaluationReport:
    assert record.status == "succeeded", record.error
    assert record.summary is not None
    return EvaluationReport.model_validate(record.summary["evaluation"])


def stops_at(
    fakes: FakeServices, model: str, number: int, act: Callable[[], Awaitable[Any]]
) -> asyncio.Event:
    """Lets `act` happen in place of answer `number` of the model, once; returns what is set
    then."""
    reached, asked = asyncio.Event(), list[int]()

    async def stop(_: Any) -> None:
        if fakes.serving.model == model:
            asked.append(1)
            if len(asked) == number:
                reached.set()
                await act()

    fakes.fault["generate"] = stop
    return reached


async def for_ever() -> None:
    await asyncio.sleep(60)


async def until_doing(stack: Stack, job_id: str, text: str) -> JobRecord:
    async with asyncio.timeout(20):
        while text not in ((found := await stack.get(job_id)).doing or ""):
            await asyncio.sleep(LEAST_S)
    return found


# --- the report ----------------------------------------------------------------------------------


async def test_models_are_compared_on_the_same_problems(stack: Stack) -> None:
    stack.fakes.skills = {GOOD: 1.0, BAD: 0.0, "m/half": 0.5}
    report = await evaluated(
        stack, BAD, GOOD, "m/half", evaluation={"samples": 4, "temperature": 1.0}
    )
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
    assert stack.fakes.calls["job"] == stack.fakes.calls["train_step"] == 0, "no trainer is loaded"
    for number, of_model in enumerate(held_out.models):
        path = f"/v1/jobs/{report.id}/held_out?step={number}"
        shown = (await stack.client.get(path, RolloutList)).rollouts
        assert [each.prompt_index for each in shown] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert number == 2 or {each.reward for each in shown} == {of_model.metrics["reward"].mean}


async def test_the_same_evaluation_again_draws_the_same_completions(stack: Stack) -> None:
    stack.fakes.skills = {GOOD: 0.5, BAD: 0.5}
    sampled = {"samples": 8, "temperature": 1.0}
    first, second = [await evaluated(stack, GOOD, BAD, evaluation=sampled) for _ in range(2)]
    assert first.sets == second.sets and first.id != second.id
    of_both = first.sets[0].models
    assert of_both[0].metrics == of_both[1].metrics, "the same seeds"
    same = of_both[1].differences["reward"]
    assert (same.mean, same.high) == (0, None)
    other = evaluation(stack.job, GOOD, evaluation=sampled).model_copy(update={"seed": 5})
    record = await stack.run(job=other)
    assert report_of(record).sets[0].models[0].metrics != of_both[0].metrics


async def test_each_held_out_set_has_its_own_table(stack: Stack) -> None:
    stack.fakes.skills = {GOOD: 1.0}
    report = await evaluated(stack, GOOD, evaluation={"sets": {"hard": HARD}})
    assert [(each.name, each.num_problems) for each in report.sets] == [("", 4), ("hard", 2)]
    only = await evaluated(stack, GOOD, data={"eval": None}, evaluation={"sets": {"hard": HARD}})
    assert [each.name for each in only.sets] == ["hard"]


async def test_completions_that_went_wrong_are_counted_and_the_rest_scored(
    stack: Stack,
) -> None:
    stack.fakes.skills = {GOOD: 1.0}
    stack.fakes.errors = lambda body: "too long" if body.prompt == "1?" else None
    (held_out,) = (await evaluated(stack, GOOD)).sets
    (scores,) = held_out.models
    assert scores.errored_rollouts == 0.25
    assert (scores.metrics["reward"].mean, scores.metrics["reward"].num_problems) == (1, 3)


async def test_where_nothing_could_be_sampled_the_job_pauses_and_tries_again(
    stack: Stack,
) -> None:
    stack.fakes.skills = {GOOD: 1.0}
    stack.fakes.errors = lambda _: "too long"
    record = await stack.submit(evaluation(stack.job, GOOD))
    paused = await stack.until(record.id, "paused")
    assert paused.error and "could be sampled and graded" in paused.error
    stack.fakes.errors = lambda _: None
    await stack.post(f"{record.id}/resume")
    (held_out,) = report_of(await stack.until(record.id)).sets
    assert held_out.models[0].metrics["reward"].mean == 1


# --- it is a job ---------------------------------------------------------------------------------


async def test_a_job_of_0_steps_evaluates_its_own_model(stack: Stack) -> None:
    stack.fakes.skills = {"owner/model": 1.0}
    record = await stack.submit(evaluation(stack.job))
    done = await stack.until(record.id)
    (held_out,) = report_of(done).sets
    assert [model.name for model in held_out.models] == ["owner/model"]
    assert (done.step, done.steps, report_of(done).id) == (0, 0, record.id)
    events = await stack.events(record.id)
    assert [event.message for event in events if event.type == "eval"] == [
        "owner/model: held-out reward 1.000; pass@1 1.000"
    ]
    assert [event.message for event in events if event.type == "status"] == [
        "queued",
        "running",
        "succeeded",
    ]


async def test_it_waits_for_the_job_before_it_and_the_next_one_for_it(stack: Stack) -> None:
    stack.fakes.skills = {GOOD: 1.0, BAD: 0.0}
    reached = stops_at(stack.fakes, GOOD, 3, for_ever)
    first = await stack.submit(stack.job.model_copy(update={"steps": 1}))
    record = await stack.submit(evaluation(stack.job, BAD, GOOD))
    next_one = await stack.submit(stack.job.model_copy(update={"steps": 1}))
    await asyncio.wait_for(reached.wait(), 30)
    assert (await stack.get(first.id)).status == "succeeded"
    found = await until_doing(stack, record.id, "problems")
    assert found.doing and found.doing.startswith("evaluating m/good (2 of 2): ")
    assert " of 4 problems" in found.doing
    waiting = await stack.get(next_one.id)
    assert (waiting.status, waiting.place) == ("queued", 1)
    assert [obstacle.job for obstacle in waiting.waits_for.values()] == [record.id]
    assert (await stack.post(f"{record.id}/cancel")).cancel_requested
    stack.fakes.fault.clear()
    assert (await stack.until(record.id)).status == "cancelled"
    assert (await stack.until(next_one.id)).status == "succeeded"


async def test_after_a_pause_what_was_evaluated_is_not_sampled_again(stack: Stack) -> None:
    """Two sets and two models; it is paused in the second model's first set."""
    stack.fakes.skills = {GOOD: 1.0, BAD: 0.0}
    reached = stops_at(stack.fakes, GOOD, 2, for_ever)
    record = await stack.submit(
        evaluation(stack.job, BAD, GOOD, evaluation={"sets": {"hard": HARD}})
    )
    await asyncio.wait_for(reached.wait(), 30)
    rows = stack.folder(record.id).scores()
    assert [(row["model"], row["set"]) for row in rows] == [(BAD, ""), (BAD, "hard")]
    assert [problem["reward"] for problem in rows[0]["problems"]] == [0, 0, 0, 0]
    await stack.post(f"{record.id}/pause")
    await stack.until(record.id, "paused")
    stack.fakes.fault.clear()
    sampled, loaded = stack.fakes.calls["generate"], stack.fakes.calls["model"]
    await stack.post(f"{record.id}/resume")
    report = report_of(await stack.until(record.id))
    assert stack.fakes.calls["generate"] - sampled == 4 + 2, "the problems of the second model"
    assert stack.fakes.calls["model"] - loaded == 1, "which alone was loaded"
    assert [
        [model.metrics["reward"].mean for model in held_out.models] for held_out in report.sets
    ] == [[0, 1], [0, 1]]


async def test_a_sampler_that_loses_its_model_is_given_it_again(stack: Stack) -> None:
    stack.fakes.skills = {GOOD: 1.0, BAD: 0.0}

    async def lose() -> None:
        raise StateLost("the engine is gone")

    stops_at(stack.fakes, GOOD, 2, lose)
    (held_out,) = (await evaluated(stack, BAD, GOOD)).sets
    assert [model.metrics["reward"].mean for model in held_out.models] == [0, 1]
    assert stack.fakes.calls["model"] == 3, "the first model was evaluated by then"


async def test_a_dry_run_shows_held_out_prompts_and_plans_nothing(stack: Stack) -> None:
    body = SubmitRequest(job=evaluation(stack.job, GOOD, evaluation={"sets": {"hard": HARD}}))
    tried = await stack.client.call("POST", "/v1/jobs/dry_run", body, DryRun, deadline_s=30)
    assert (tried.num_train, tried.num_held_out, tried.plan) == (0, 6, None)
    assert [prompt.content for prompt in tried.prompts] == ["0?", "1?", "1?", "2?"], "in turn"


async def test_what_cannot_be_evaluated_is_refused_when_it_is_submitted(stack: Stack) -> None:
    for changes, models, sentence in (
        ({"data": {"eval": "/nowhere/x.jsonl"}}, [GOOD], "/nowhere/x.jsonl"),
        ({}, [GOOD, "/nowhere/model"], "no folder '/nowhere/model'"),
        ({"evaluation": {"sets": {"a": {"source": [{"x": 1}]}}}}, [], "no column 'prompt'"),
        ({"rewards": [{"grader": "lenght"}]}, [GOOD], "did you mean 'length'"),
    ):
        document = stack.job.model_dump(mode="json") | {"steps": 0}
        for section, values in changes.items():
            is_table = isinstance(values, dict)
            document[section] = document[section] | values if is_table else values
        document["evaluation"]["models"] = [{"model": model} for model in models]
        with pytest.raises(BadRequest, match=sentence):
            await stack.submit(parse_job(document))
    assert stack.fakes.calls["model"] == 0


async def test_a_paused_job_stays_an_evaluation_of_the_same_models_or_a_training(
    stack: Stack,
) -> None:
    evaluates = evaluation(stack.job, GOOD)
    for job, changes, sentence in (
        (evaluates, ("steps=3", "data.train=a/b"), "changes what is learned"),
        (evaluates, ('evaluation.models=[{model="a/b"}]',), "got other models than the job began"),
        (stack.job, ("steps=0",), "steps: got 0, but the job began with 8; expected steps"),
    ):
        submitted = await stack.store.submit(Submission(job, stack.settings.runs_dir))
        await stack.post(f"{submitted.id}/pause")
        await stack.until(submitted.id, "paused")
        with pytest.raises(BadRequest, match=sentence):
            await stack.post(f"{submitted.id}/resume", ResumeRequest(set=changes))


async def test_a_checkpoint_stays_while_a_job_that_evaluates_it_waits(stack: Stack) -> None:
    ended = await stack.run()
    step_4, step_8 = (f"{ended.run_dir}/checkpoints/step-00000{step}" for step in (4, 8))
    job = evaluation(stack.job, "owner/other", step_4, step_8)
    waiting = await stack.store.submit(Submission(job, stack.settings.runs_dir))
    await stack.store.pause(waiting.id)
    used = await stack.store.models_below(Path(ended.run_dir))
    assert [(str(use.path), use.job_id) for use in used] == [
        (str(Path(step_4).resolve()), waiting.id),
        (str(Path(step_8).resolve()), waiting.id),
    ]


# --- the Python client ---------------------------------------------------------------------------


@pytest.fixture
def client(stack: Stack) -> AsyncClient:
    client = AsyncClient("http://localhost")
    transport: Any = stack.http._transport
    client._calls.client = Client("orchestrator", "http://localhost", transport=transport)
    return client


async def test_the_client_returns_the_report_and_hears_how_far_it_is(
    stack: Stack, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "PROGRESS_S", LEAST_S)
    stack.fakes.skills = {GOOD: 1.0}
    gate, told = asyncio.Event(), list[str]()
    reached = stops_at(stack.fakes, GOOD, 2, gate.wait)
    models = [EvaluatedModel(model=GOOD, name="good")]
    asked = asyncio.create_task(
        client.evaluate(stack.job, models, lambda now: told.append(now.message))
    )
    await asyncio.wait_for(reached.wait(), 30)
    (found,) = (await client.list(name="eval-demo")).jobs
    await until_doing(stack, found.id, "of 4 problems")
    await asyncio.sleep(2 * LEAST_S)  # the stream says it, too
    gate.set()
    report = await asked
    assert report.sets[0].models[0].metrics["reward"].mean == 1
    assert any(line.startswith("evaluating good (1 of 1): ") for line in told)
    record = await stack.get(report.id)
    assert (record.name, record.steps, record.job.data.train) == ("eval-demo", 0, None)


async def test_an_interrupted_call_of_the_client_cancels_the_evaluation(
    stack: Stack, client: AsyncClient
) -> None:
    reached = stops_at(stack.fakes, GOOD, 1, for_ever)
    asked = asyncio.create_task(client.evaluate(stack.job, [{"model": GOOD}]))
    await asyncio.wait_for(reached.wait(), 30)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    (found,) = (await client.list(name="eval-demo")).jobs
    assert found.cancel_requested or found.status == "cancelled"
    stack.fakes.fault.clear()
    assert (await stack.until(found.id)).status == "cancelled"


async def test_the_client_says_that_the_evaluation_is_paused_or_cancelled(
    stack: Stack, client: AsyncClient
) -> None:
    for action, kind in (("pause", long_calls.Paused), ("cancel", Failed)):
        reached = stops_at(stack.fakes, GOOD, 1, for_ever)
        asked = asyncio.create_task(client.evaluate(stack.job, [{"model": GOOD}]))
        await asyncio.wait_for(reached.wait(), 30)
        (found, *_) = (await client.list(name="eval-demo")).jobs
        await stack.post(f"{found.id}/{action}")
        with pytest.raises(kind, match=f"job {found.id} is {action}"):
            await asked
        stack.fakes.fault.clear()
