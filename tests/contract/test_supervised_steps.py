"""Supervised steps in the orchestrator's loop: what the services are asked for, and what a death
leaves."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from hone import view
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.store import Store
from shared.errors import StateLost
from shared.job import Job
from shared.settings import Settings
from shared.wire import Batch, DryRun, GenerateRequest, JobRecord, SubmitRequest, TrainStepRequest
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.orchestrator_stack import Stack, orchestrator, submit, until_ended

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures

STEPS, ROWS = 5, 4


@pytest.fixture
def supervised(tmp_path: Path, job: Job) -> Job:
    """A job that learns the rows' answers, four a step, and evaluates nothing."""
    rows = [{"prompt": f"{i}?", "answer": "ab" * (i + 1)} for i in range(20)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = job.model_dump(mode="json") | {
        "steps": STEPS,
        "data": {"train": str(tmp_path / "answers.jsonl")},
        "sampling": {"prompts_per_step": ROWS, "max_tokens": 8},
        "rewards": [],
        "training": {"objective": "sft"},
    }
    return Job.model_validate(document)


def learned(request: TrainStepRequest) -> set[tuple[Any, ...]]:
    return {
        (tuple(example.token_ids), tuple(example.advantages), bool(example.old_logprobs))
        for example in request.examples
    }


def batches(record: JobRecord) -> list[Batch]:
    folder = RunFolder(Path(record.run_dir))
    return [folder.batch(step) for step in folder.batch_steps()]


async def test_a_supervised_job_learns_its_rows_once_each_and_asks_for_nothing_else(
    stack: Stack, supervised: Job
) -> None:
    record = await stack.submit(supervised)
    assert (await stack.until(record.id)).status == "succeeded"
    fakes = stack.fakes
    answers = {(97, 98) * (i + 1) for i in range(20)}
    steps = [learned(request) for request in fakes.trained]
    assert [len(step) for step in steps] == [ROWS] * STEPS
    assert {ids for step in steps for ids, _, _ in step} == answers, "one pass over 20 rows"
    assert all(set(given) == {1.0} and not old for step in steps for _, given, old in step)
    assert (fakes.calls["generate"], fakes.calls["score"]) == (20, 0)
    assert [ref.version for ref in fakes.reloads] == [0, STEPS], "only the last weights serve"
    lines = [event.message for event in await stack.events(record.id)]
    assert [line for line in lines if line.startswith("step ")] == [
        f"step {step}/{STEPS}: loss 0.0000" for step in range(1, STEPS + 1)
    ]
    assert not any("reward" in line for line in lines)


async def test_after_a_trainers_death_its_steps_are_made_again_from_disk(
    stack: Stack, supervised: Job
) -> None:
    died: list[int] = []

    async def die(body: TrainStepRequest) -> None:
        if body.step == 4 and not died:
            died.append(len(stack.fakes.trained))
            stack.fakes.restart_trainer()  # it has no checkpoint
            raise StateLost("it is another trainer")

    stack.fakes.fault["train_step"] = die
    record = await stack.submit(supervised)
    assert (await stack.until(record.id)).status == "succeeded"
    assert died == [3]
    assert [request.step for request in stack.fakes.trained] == [1, 2, 3, 4, 5]
    whole = {ids for request in stack.fakes.trained for ids, _, _ in learned(request)}
    assert len(whole) == 20


async def test_no_sampler_sees_weights_of_a_warm_up_but_the_last(
    stack: Stack, supervised: Job
) -> None:
    asked: list[GenerateRequest] = []

    async def note(body: GenerateRequest) -> None:
        asked.append(body)

    stack.fakes.fault["generate"] = note
    changes = {
        "training": {},
        "rewards": stack.job.model_dump(mode="json")["rewards"],
        "warmup": {"steps": 3},
        "max_staleness": 2,
    }
    job = Job.model_validate(supervised.model_dump(mode="json") | changes)
    record = await stack.submit(job)
    assert (await stack.until(record.id)).status == "succeeded"
    assert [ref.version for ref in stack.fakes.reloads] == [0, 3, 4, 5]
    given = [bool(body.answers) for body in asked]
    assert given == [True] * 3 * ROWS + [False] * 2 * ROWS
    assert {body.min_version for body in asked if not body.answers} == {3}


async def test_a_preference_is_asked_for_and_trained_as_a_pair(
    stack: Stack, supervised: Job, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{i}?", "chosen": "ab", "rejected": "b" * (i + 1)} for i in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "data": {"train": str(tmp_path / "pairs.jsonl")},
        "training": {"objective": "dpo"},
    }
    job = Job.model_validate(supervised.model_dump(mode="json") | changes)
    record = await stack.submit(job)
    assert (await stack.until(record.id)).status == "succeeded"
    assert stack.fakes.calls["generate"] == 20
    for request in stack.fakes.trained:
        assert [example.advantage for example in request.examples] == [1.0, -1.0] * ROWS
        chosen, rejected = request.examples[::2], request.examples[1::2]
        assert {tuple(example.token_ids) for example in chosen} == {(97, 98)}
        assert all(set(example.token_ids) == {98} for example in rejected)


async def test_the_loss_on_held_out_answers_is_evaluated_without_rewards(
    stack: Stack, supervised: Job, tmp_path: Path
) -> None:
    """Answers of 1 and 3 tokens, each token of -0.5 and -1.5 nats: a mean of 5 / 4."""
    rows = [{"prompt": "1?", "answer": "a"}, {"prompt": "2?", "answer": "bcd"}]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = supervised.model_dump(mode="json")
    document["data"]["eval"] = str(tmp_path / "held_out.jsonl")
    job = Job.model_validate(document | {"evaluation": {"every": 2}})
    record = await stack.submit(job)
    assert (await stack.until(record.id)).status == "succeeded"
    rows = {row.step: row.metrics for row in stack.folder(record.id).metrics()}
    evaluated = {step: row["eval/loss"] for step, row in rows.items() if "eval/loss" in row}
    assert evaluated == {0: 1.25, 2: 1.25, 4: 1.25, 5: 1.25}
    lines = [event.message for event in await stack.events(record.id)]
    assert "step 2: held-out loss 1.250" in lines
    assert stack.fakes.calls["score"] == 0


async def test_preferences_are_evaluated_on_held_out_pairs(
    stack: Stack, supervised: Job, tmp_path: Path
) -> None:
    """The chosen answer's log-ratio is 0.5, the rejected one's 2 * (-1 + 1) = 0: a margin of
    0.2 * 0.5, and the other way round."""
    pairs = [("a", "bc"), ("bc", "a"), ("b", "cd")]
    rows = [{"prompt": "1?", "chosen": one, "rejected": two} for one, two in pairs]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = supervised.model_dump(mode="json")
    document["data"] = {
        "train": str(tmp_path / "pairs.jsonl"),
        "eval": str(tmp_path / "pairs.jsonl"),
    }
    document["training"] = {"objective": "dpo", "dpo_beta": 0.2}
    record = await stack.submit(Job.model_validate(document | {"evaluation": {"every": 100}}))
    assert (await stack.until(record.id)).status == "succeeded"
    last = stack.folder(record.id).metrics()[-1].metrics
    better, worse = math.log(1 + math.exp(-0.1)), math.log(1 + math.exp(0.1))
    assert last["eval/loss"] == pytest.approx((2 * better + worse) / 3)
    assert last["eval/rewards/margins"] == pytest.approx(0.1 / 3)
    assert last["eval/rewards/accuracies"] == pytest.approx(2 / 3)


@pytest.fixture
async def fakes(settings: Settings) -> AsyncGenerator[tuple[FakeServices, Settings]]:
    fakes = FakeServices(settings)
    async with fakes.running(settings) as running:
        yield fakes, running


async def test_an_orchestrators_death_changes_no_batch(
    fakes: tuple[FakeServices, Settings], redis_url: str, supervised: Job
) -> None:
    services, settings = fakes
    reached = asyncio.Event()

    async def hold(body: TrainStepRequest) -> None:
        while body.step == 3 and services.fault:
            reached.set()
            await asyncio.sleep(0.01)

    services.fault["train_step"] = hold
    async with orchestrator(settings, redis_url) as (store, transport):
        client = orchestrator_stack.Client("orchestrator", "http://localhost", transport=transport)
        record = await submit(client, supervised)
        await asyncio.wait_for(reached.wait(), 60)
    before = batches(record)
    assert [batch.step for batch in before] == [1, 2, 3]
    store = Store(redis_url)
    for lease in [key async for key in store._redis.scan_iter("hone:lease:*")]:
        await store._redis.delete(lease)
    await store.close()
    services.fault.clear()
    async with orchestrator(settings, redis_url) as (store, _):
        found = await until_ended(store, record.id)
    assert (found.status, found.attempts) == ("succeeded", 2)
    assert batches(found)[:3] == before
    assert [request.step for request in services.trained] == [1, 2, 3, 4, 5]


async def test_a_dry_run_shows_what_would_be_learned(
    stack: Stack, supervised: Job, tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [{"prompt": chat, "rejected": "b"}] * 20
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = supervised.model_dump(mode="json", exclude_unset=True) | {
        "data": {"train": str(tmp_path / "pairs.jsonl")},
        "training": {"objective": "dpo"},
    }
    for job, line in (
        (supervised, "answer: " + "ab"),
        (Job.model_validate(pairs), "user: q\nchosen: a\nrejected: b"),
    ):
        body = SubmitRequest(job=job)
        tried = await stack.client.call("POST", "/v1/jobs/dry_run", body, DryRun, deadline_s=60)
        assert line in view.dry_run(tried).plain
