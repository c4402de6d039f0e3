"""Groups that are sampled and scored elsewhere, pushed to the orchestrator's real application over
its real store: what is acknowledged is on disk, and trained once, in order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import hone
from services.orchestrator.app import create_service
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.store import Store
from shared.http.client import Client
from shared.job import Job
from shared.job.file import make_job
from shared.settings import Settings
from shared.wire import JobRecord, SubmitRequest, TrainStepRequest
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.in_process import in_process
from tests.support.model_folders import VOCAB, make_model_folder
from tests.support.orchestrator_stack import Stack, ended, orchestrator
from tests.support.served_stack import served_stack

stack = orchestrator_stack.stack  # a fixture

STEPS, PROMPTS = 3, 2


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return pushed_job(tmp_path)


def pushed_job(tmp_path: Path, **changes: Any) -> Job:
    model = tmp_path / "model"
    if not model.exists():
        make_model_folder(model, window=16)
    document = {
        "name": "pushed",
        "model": str(model),
        "steps": STEPS,
        "environment": {"kind": "pushed"},
        "sampling": {"prompts_per_step": PROMPTS},
        **changes,
    }
    return make_job(document, (), "test")


def group(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A group of two rollouts, of which the first token is its number."""
    first = {"token_ids": [3 + number, 4], "reward": 1.0}
    second = {"token_ids": [3 + number, 5], "reward": 0.0}
    return {"prompt_token_ids": [1, 9], "rollouts": [first, second], **changes}


def by_versions(number: int, versions: int | list[int]) -> dict[str, Any]:
    """The group, sampled by these weights."""
    rollouts = [{**rollout, "versions": versions} for rollout in group(number)["rollouts"]]
    return group(number, rollouts=rollouts)


async def push(http: httpx.AsyncClient, job_id: str, body: dict[str, Any]) -> httpx.Response:
    return await http.post(f"/v1/jobs/{job_id}/groups", json=body)


async def push_all(http: httpx.AsyncClient, job_id: str, bodies: list[dict[str, Any]]) -> list[int]:
    """Pushes one group after the other, again while there is no room; returns their numbers."""
    numbers: list[int] = []
    async with asyncio.timeout(60):
        for body in bodies:
            while (answer := await push(http, job_id, body)).status_code == 429:
                await asyncio.sleep(0.02)
            assert answer.status_code == 200, answer.text
            numbers.append(answer.json()["number"])
    return numbers


def first_tokens(trained: list[TrainStepRequest]) -> list[list[int]]:
    """The first token of each group that each step trained, of two examples each."""
    return [[example.token_ids[0] for example in step.examples][::2] for step in trained]


async def test_groups_are_trained_in_the_order_in_which_they_came(stack: Stack) -> None:
    record = await stack.submit()
    bodies = [group(n) for n in range(STEPS * PROMPTS)]
    assert await push_all(stack.http, record.id, bodies) == [1, 2, 3, 4, 5, 6]
    assert (await stack.until(record.id)).status == "succeeded"
    assert first_tokens(stack.fakes.trained) == [[3, 4], [5, 6], [7, 8]]
    (example, other) = stack.fakes.trained[0].examples[:2]
    assert example.prompt_token_ids == [1, 9] and example.spans == ()
    assert example.old_logprobs == [] and example.advantages == []
    assert example.advantage == pytest.approx(0.7071, abs=1e-3) == -other.advantage
    batch = stack.folder(record.id).batch(2)
    assert [prompt.index for prompt in batch.prompts] == [3, 4] and batch.version is None
    counts = (await stack.http.get(f"/v1/jobs/{record.id}/groups")).json()
    assert counts == {
        **{"job_id": record.id, "accepted": 6, "trained": 6, "waiting": 0, "dropped": 0},
        **{"version": 3, "next_step": 4, "room": 0},
    }
    assert [*(stack.folder(record.id).path / "pushed").glob("*.msgpack")] == []
    late = await push(stack.http, record.id, group(9))
    assert late.status_code == 409 and "is succeeded; expected one" in late.json()["detail"]
    last = stack.folder(record.id).metrics()[-1].metrics
    assert last["reward"] == 0.5 and "staleness" not in last


async def test_the_columns_of_a_group_reach_the_trainer(stack: Stack) -> None:
    record = await stack.submit(stack.job.model_copy(update={"steps": 1}))
    rollout = {
        "token_ids": [3, 4, 5],
        "sampled": [1, 0, 1],
        "logprobs": [-0.5, 1.0, -0.25],
        "versions": [0, 7, 0],
        "advantages": [0.5, 0.0, -1.5],
        "reward": None,
        "messages": [{"role": "assistant", "content": "w3"}],
        "finish_reason": "length",
    }
    chat = [{"role": "w3", "content": "w4"}]
    both = [group(1, rollouts=[rollout], prompt=chat, prompt_token_ids=[]), group(2)]
    await push_all(stack.http, record.id, both)
    assert (await stack.until(record.id)).status == "succeeded"
    (example, *_) = stack.fakes.trained[0].examples
    assert example.prompt_token_ids == [3, 4] and example.sampled == [1, 0, 1]
    assert example.old_logprobs == [-0.5, 1.0, -0.25] and example.advantages == [0.5, 0.0, -1.5]
    assert [(span.version, span.start) for span in example.spans] == [(0, 0)]
    totals = stack.fakes.trained[0].totals
    assert totals and (totals.num_sequences, totals.num_tokens) == (3, 6)
    shown = (await stack.http.get(f"/v1/jobs/{record.id}/rollouts")).json()["rollouts"]
    assert shown[0]["prompt"] == chat and shown[0]["completion"] == "w5"
    assert shown[0]["advantage"] == -0.5 and shown[0]["reward"] is None
    assert shown[1]["prompt"] == "<s> w9" and shown[1]["reward"] == 1.0


async def test_a_group_pushed_twice_is_one_group(
    stack: Stack, settings: Settings, redis_url: str
) -> None:
    record = await stack.submit(stack.job.model_copy(update={"max_staleness": 3}))
    body = group(1, key="a")
    answers = await asyncio.gather(*(push(stack.http, record.id, body) for _ in range(4)))
    assert {answer.json()["number"] for answer in answers} == {1}
    keyless = [await push(stack.http, record.id, group(2)) for _ in range(2)]
    assert [answer.json()["number"] for answer in keyless] == [2, 2]
    other = await push(stack.http, record.id, group(2, key="a"))
    assert other.status_code == 409 and other.json()["code"] == "body_differs"
    assert "the key 'a' was used before with another body, as group 1" in other.json()["detail"]
    store = Store(redis_url)  # of another process that has no worker
    await store.open()
    elsewhere = create_service(stack.settings, store, works=False)
    async with in_process(elsewhere.app) as http:
        assert (await push(http, record.id, body)).json()["number"] == 1
        assert (await push(http, record.id, group(3))).json()["number"] == 3
    await store.close()
    assert (await push(stack.http, record.id, group(4))).json()["number"] == 4
    await stack.post(f"{record.id}/cancel")


async def test_a_job_has_no_more_groups_than_its_staleness_allows(stack: Stack) -> None:
    record = await stack.submit(stack.job.model_copy(update={"max_staleness": 1}))

    async def hold(_: object) -> None:
        while stack.fakes.fault:
            await asyncio.sleep(0.01)

    stack.fakes.fault["train_step"] = hold
    await push_all(stack.http, record.id, [group(n, key=str(n)) for n in range(4)])
    full = await push(stack.http, record.id, group(5, key="5"))
    assert (full.status_code, full.headers["retry-after"]) == (429, "2")
    assert "has 4 groups that are not trained on, expected fewer than 4" in full.json()["detail"]
    counts = (await stack.http.get(f"/v1/jobs/{record.id}/groups")).json()
    assert (counts["waiting"], counts["next_step"], counts["room"]) == (4, 3, 0)
    stack.fakes.fault.clear()
    assert await push_all(stack.http, record.id, [group(5, key="5"), group(6)]) == [5, 6]
    assert (await stack.until(record.id)).status == "succeeded"


async def test_a_group_of_weights_that_are_too_old_is_refused(stack: Stack) -> None:
    record = await stack.submit()
    of_zero = [
        group(n, rollouts=[{**r, "versions": 0} for r in group(n)["rollouts"]]) for n in (1, 2)
    ]
    await push_all(stack.http, record.id, of_zero)
    async with asyncio.timeout(30):
        while (await stack.get(record.id)).step < 1:
            await asyncio.sleep(0.02)
    stale = await push(stack.http, record.id, {**of_zero[0], "key": "again"})
    assert (stale.status_code, stale.json()["code"]) == (422, "too_stale")
    assert stale.json()["detail"] == (
        "rollout 0, versions: got 0 at token 0; expected 1 to 2: step 2 trains the group, and "
        "max_staleness is 0"
    )
    refused = await push(stack.http, record.id, by_versions(3, [1, 9]))
    assert refused.json()["detail"] == (
        "rollout 0, versions: got 9 at token 1; expected at most 2, the newest version that there "
        "is"
    )
    await stack.post(f"{record.id}/cancel")


async def test_groups_that_cannot_be_trained_on_are_refused_and_others_are_waited_for(
    stack: Stack,
) -> None:
    record = await stack.submit()
    first, second = group()["rollouts"]
    for change, detail in (
        ({"token_ids": [3, VOCAB]}, "rollout 1, token_ids: got 24 at token 1; expected 0 to 23"),
        ({"token_ids": []}, "rollout 1, token_ids: got none; expected at least 1"),
        ({"token_ids": [3] * 15}, "rollout 1, token_ids: got 15 after a prompt of 2; expected at"),
        ({"logprobs": [-1.0]}, "rollout 1, logprobs: got 1; expected 2, one for each of token_ids"),
        ({"logprobs": [-1.0, 0.5]}, "rollout 1, logprobs: got 0.5 at token 1; expected a finite"),
        ({"sampled": [1, 2]}, "rollout 1, sampled: got 2 at token 1; expected 0 or 1"),
        ({"sampled": [0, 0]}, "rollout 1, sampled: got no 1 among 2; expected at least one"),
        ({"advantages": [1.0]}, "rollout 1, advantages: got 1; expected 2"),
        ({"versions": [0]}, "rollout 1, versions: got 1; expected 2"),
        ({"versions": -1}, "rollout 1, versions: got -1 at token 0; expected 0 or more"),
        ({"reward": 1e999}, "'rollouts.1.reward'"),
        ({"reward": 1e308}, "'rollouts.1.reward'"),
        ({"logprobs": [-1.0, 1e999]}, "got inf at index 1, expected finite numbers only"),
    ):
        body = group(rollouts=[first, {**second, **change}])
        content = json.dumps(body).replace("Infinity", "1e999")
        headers = {"content-type": "application/json"}
        path = f"/v1/jobs/{record.id}/groups"
        answer = await stack.http.post(path, content=content, headers=headers)
        assert answer.status_code == 422 and detail in answer.json()["detail"], answer.text
    for body, detail in (
        (group(prompt_token_ids=[]), "expected prompt_token_ids, or prompt"),
        (
            group(rollouts=[{"token_ids": [3], "reward": None}]),
            "none of the 1 rollouts has a reward or advantages",
        ),
    ):
        assert detail in (await push(stack.http, record.id, body)).json()["detail"]
    assert (await stack.http.get(f"/v1/jobs/{record.id}/groups")).json()["accepted"] == 0
    await push_all(stack.http, record.id, [group(1)])
    async with asyncio.timeout(30):
        while "pushed groups: 1 of the 2 that step 1 needs are here" not in str(
            (await stack.get(record.id)).doing
        ):
            await asyncio.sleep(0.05)
    await stack.post(f"{record.id}/cancel")


async def test_a_ratio_of_the_sequence_takes_one_advantage_for_all_tokens(
    stack: Stack, tmp_path: Path
) -> None:
    record = await stack.submit(pushed_job(tmp_path, training={"loss": "gspo"}))
    first, second = group()["rollouts"]
    alike = await push(
        stack.http, record.id, group(rollouts=[first, {**second, "advantages": [0.5, 0.5]}])
    )
    assert alike.status_code == 200, alike.text
    refused = await push(
        stack.http, record.id, group(1, rollouts=[first, {**second, "advantages": [0.5, -1.0]}])
    )
    assert refused.status_code == 422
    assert "rollout 1, advantages: got 0.5 and -1, and training.loss" in refused.json()["detail"]
    await stack.post(f"{record.id}/cancel")


async def test_a_job_that_samples_itself_takes_no_groups(stack: Stack, tmp_path: Path) -> None:
    rows = [{"prompt": "w3", "answer": "w4"}] * 4
    plain = {
        "data": {"train": rows},
        "rewards": [{"grader": "exact_match"}],
        "sampling": {"max_tokens": 4},
    }
    record = await stack.submit(pushed_job(tmp_path, environment=None, **plain))
    answer = await push(stack.http, record.id, group())
    assert answer.status_code == 409
    assert "samples its groups itself; expected a job with [environment]" in answer.json()["detail"]
    await stack.post(f"{record.id}/cancel")


async def test_held_out_problems_are_evaluated_between_pushed_groups(
    stack: Stack, tmp_path: Path
) -> None:
    held_out = [{"prompt": "w3", "answer": "right"}] * 2
    graded = {"data": {"eval": held_out}, "rewards": [{"grader": "exact_match"}]}
    record = await stack.submit(
        pushed_job(tmp_path, sampling={"prompts_per_step": 1, "max_tokens": 4}, **graded)
    )
    await push_all(stack.http, record.id, [group(n) for n in range(3)])
    assert (await stack.until(record.id)).status == "succeeded"
    rows = {row.step: row.metrics for row in stack.folder(record.id).metrics()}
    assert {"eval/reward"} <= rows[0].keys() & rows[3].keys()
    assert rows[1]["rewards/environment/mean"] == 0.5


def test_the_client_pushes_and_waits_for_room(tmp_path: Path) -> None:
    """And so does it with the REST body's names, as docs/pushed.md has it."""
    with served_stack(tmp_path / "stack") as served, hone.Client(served.url) as client:
        job = client.submit(pushed_job(tmp_path)).id
        numbers = [
            client.push(job, group(n)["rollouts"], prompt_token_ids=[1, 9]).number
            for n in range(STEPS * PROMPTS)
        ]
        assert numbers == [1, 2, 3, 4, 5, 6]
        assert client.wait(job).status == "succeeded"
        counts = client.groups("pushed")
        assert (counts.trained, counts.waiting, counts.room) == (6, 0, 0)
        with pytest.raises(hone.BadRequest, match="'rollouts': got"):
            client.push(job, [], prompt_token_ids=[1])
        with pytest.raises(hone.BadRequest, match=r'has environment\.kind "pushed", so its'):
            hone.work(lambda row, url, key: 1.0, job=job, url=served.url)


@pytest.fixture
async def fakes(settings: Settings) -> AsyncGenerator[tuple[FakeServices, Settings]]:
    fakes = FakeServices(settings)
    async with fakes.running(settings) as running:
        yield fakes, running


async def test_a_killed_orchestrator_loses_no_group_and_trains_none_twice(
    fakes: tuple[FakeServices, Settings], redis_url: str, job: Job
) -> None:
    services, settings = fakes
    settings = settings.model_copy(update={"lease_s": 2.0})
    job = job.model_copy(update={"max_staleness": 2, "steps": 6})
    pushed, record = 0, None
    for life in range(5):  # each is killed once it has acknowledged two more groups
        async with orchestrator(settings, redis_url) as (_, transport):
            client = Client("orchestrator", "http://localhost", transport=transport)
            if record is None:
                body = SubmitRequest(job=job)
                record = await client.call("POST", "/v1/jobs", body, JobRecord, deadline_s=60)
            http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
            bodies = [group(n) for n in range(pushed, pushed + 3)]
            numbers = await push_all(http, record.id, bodies[:2])
            assert numbers == [pushed + 1, pushed + 2]
            pushed += 2
            if life == 4:
                await push_all(http, record.id, [group(n) for n in (10, 11)])
                assert (await ended(client, record.id)).status == "succeeded"
    assert record is not None
    folder = RunFolder(settings.runs_dir / record.id)
    taken = [prompt.index for step in range(1, 7) for prompt in folder.batch(step).prompts]
    assert taken == [*range(1, 13)]
    assert first_tokens(services.trained) == [[3 + n, 4 + n] for n in range(0, 12, 2)]
