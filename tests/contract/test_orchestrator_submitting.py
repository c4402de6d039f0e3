"""Submitting jobs: once for each key, and only what can run."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.orchestrator.grpo.prompts import load_prompts
from shared.errors import BadRequest, Conflict
from shared.wire import (
    DryRun,
    JobList,
    SubmitRequest,
    TriedReward,
    TriedRewards,
    ValidateRequest,
)
from tests.support import orchestrator_stack
from tests.support.orchestrator_stack import Stack

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures


async def test_submitting_twice_with_a_key_is_submitting_once(stack: Stack) -> None:
    first = await stack.submit(key="k1")
    assert (await stack.submit(key="k1")).id == first.id
    assert len((await stack.client.get("/v1/jobs", JobList)).jobs) == 1
    with pytest.raises(Conflict):
        await stack.submit(stack.job.model_copy(update={"steps": 3}), key="k1")
    assert (await stack.submit(key="k2")).id != first.id


async def test_a_repeated_submission_is_answered_without_its_data(
    stack: Stack, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "answer": "1"}\n' * 4)
    data = stack.job.data.model_copy(update={"train": str(rows), "eval": None, "epochs": 1.0})
    job = stack.job.model_copy(update={"data": data, "steps": 7})
    first = await stack.submit(job, key="k1")
    rows.unlink()
    assert (await stack.submit(job, key="k1")).id == first.id
    with pytest.raises(Conflict, match="with other content"):
        await stack.submit(job.model_copy(update={"steps": 8}), key="k1")
    with pytest.raises(BadRequest, match="no dataset file"):
        await stack.submit(job, key="k2")


async def test_a_new_job_is_answered_with_201_and_where_it_is(stack: Stack) -> None:
    body = {"job": stack.job.model_dump(mode="json", exclude_unset=True)}
    headers = {"idempotency-key": "k1"}
    made = await stack.http.post("/v1/jobs", json=body, headers=headers)
    assert made.status_code == 201
    assert made.headers["location"] == f"/v1/jobs/{made.json()['id']}"
    assert (await stack.http.get(made.headers["location"])).json()["id"] == made.json()["id"]
    again = await stack.http.post("/v1/jobs", json=body, headers=headers)
    assert (again.status_code, again.json()["id"]) == (200, made.json()["id"])
    assert "location" not in again.headers


async def test_a_job_that_was_polled_for_is_answered_with_201_too(stack: Stack) -> None:
    body = {"job": stack.job.model_dump(mode="json", exclude_unset=True)}
    prefers = {"prefer": "respond-async, wait=0"}
    accepted = await stack.http.post("/v1/jobs", json=body, headers=prefers)
    assert accepted.status_code == 202
    made = await stack.http.get(accepted.headers["location"] + "?wait=20")
    assert (made.status_code, made.headers["location"]) == (201, f"/v1/jobs/{made.json()['id']}")


async def test_a_key_is_free_again_once_its_job_was_deleted(stack: Stack) -> None:
    first = await stack.submit(key="mine")
    await stack.until(first.id)
    assert (await stack.submit(key="mine")).status == "succeeded", "as it is now"
    (await stack.http.delete(f"/v1/jobs/{first.id}")).raise_for_status()
    second = await stack.submit(key="mine")
    assert second.id != first.id and (await stack.get(second.id)).id == second.id


async def test_rewards_are_checked_on_the_first_steps_prompts_at_submission_and_start(
    stack: Stack,
) -> None:
    tried: list[ValidateRequest] = []

    async def note(body: ValidateRequest) -> None:
        tried.append(body)

    stack.fakes.fault["validate"] = note
    await stack.run()
    of_submission, of_beginning = tried
    assert of_submission == of_beginning
    prompts = load_prompts(stack.job, stack.settings).for_step(1)
    assert of_submission.prompts == prompts[:8] and len(prompts) >= 2


async def test_a_job_begins_by_saying_what_known_answers_earn(stack: Stack) -> None:
    wrong = TriedReward(
        reward="exact_match", empty=0.0, reference=0.0, num_references=2, full_mark=1.0
    )
    stack.fakes.change["try"] = lambda _: TriedRewards(rewards=(wrong,))
    record = await stack.submit()
    assert (await stack.until(record.id)).status == "succeeded", "a warning stops nothing"
    said = [
        event for event in await stack.events(record.id) if "reference answers" in event.message
    ]
    assert [(event.level, event.message.partition(":")[0]) for event in said] == [
        ("info", "rewards tried on 2 rows"),
        ("warning", "reward 'exact_match' gives the rows' own reference answers 0.00 of 1"),
    ]
    body = SubmitRequest(job=stack.job)
    tried = await stack.client.call("POST", "/v1/jobs/dry_run", body, DryRun, deadline_s=60)
    assert tried.trial == tuple(event.message for event in said)
    assert stack.fakes.calls["score"] > 0 and stack.fakes.calls["try"] == 2
