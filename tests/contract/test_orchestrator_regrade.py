"""Stored rollouts graded again by other rewards: what would flip, over the API and from the
shell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.errors import BadRequest, NotFound
from shared.job import RewardSpec
from shared.wire import (
    JobRecord,
    Part,
    RegradeReport,
    RegradeRequest,
    RolloutList,
    Score,
    ScoreItem,
    ScoreRequest,
)
from tests.support import orchestrator_stack
from tests.support.orchestrator_stack import Stack, until_noted

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures

NEW = (RewardSpec(grader="regex", name="other"),)


async def regrade(
    stack: Stack, job_id: str, first: int, last: int, **changes: Any
) -> RegradeReport:
    body = RegradeRequest(first_step=first, last_step=last, rewards=NEW, **changes)
    return await stack.client.call(
        "POST", f"/v1/jobs/{job_id}/regrade", body, RegradeReport, deadline_s=60
    )


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
async def done(stack: Stack) -> JobRecord:
    sampling = stack.job.sampling.model_copy(update={"prompts_per_step": 6})
    record = await stack.run(steps=5, sampling=sampling)
    await until_noted(stack.folder(record.id), "succeeded")  # after which nothing is written
    return record


async def test_the_same_reward_changes_nothing_and_one_turned_round_every_advantage(
    stack: Stack, done: JobRecord
) -> None:
    before = files(Path(done.run_dir))
    report = await regrade(stack, done.id, 1, 5)
    assert [(step.num_changed, step.flipped) for step in report.steps] == [(0, ())] * 5
    assert report.examples == ()
    stack.fakes.grade = lambda item: Part(
        value=float(item.completion == "wrong"), detail="turned round"
    )
    report = await regrade(stack, done.id, 3, 5, num_examples=4)
    assert [step.step for step in report.steps] == [3, 4, 5]
    for step in report.steps:
        path = f"/v1/jobs/{done.id}/rollouts?step={step.step}"
        listed = (await stack.client.get(path, RolloutList)).rollouts
        assert (step.num_rollouts, step.num_changed) == (24, 24)
        assert (step.old_missing, step.new_missing) == (0, 0)
        assert step.old_reward is not None and step.new_reward == pytest.approx(1 - step.old_reward)
        assert step.flipped == tuple(
            position for position, rollout in enumerate(listed) if rollout.advantage
        )
        assert step.flipped, "a step in which nothing was learned would show nothing"
    assert len(report.examples) == 4
    first = report.examples[0]
    assert (first.old.reward, first.new.reward) in ((1.0, 0.0), (0.0, 1.0))
    assert first.new.parts["right"].detail == "turned round"
    assert files(Path(done.run_dir)) == before


async def test_new_rewards_are_checked_and_missing_ones_counted_and_shown_first(
    stack: Stack, done: JobRecord
) -> None:
    """They are graded under no job's id."""
    asked: list[ScoreRequest] = []

    async def remember(body: ScoreRequest) -> None:
        asked.append(body)

    count = iter(range(1000))
    right = stack.fakes.grade

    def sometimes(item: ScoreItem) -> Part:
        slow = Part(value=None, verdict="time_limit", detail="slow")
        return slow if next(count) == 5 else right(item)

    stack.fakes.fault["score"], stack.fakes.grade = remember, sometimes
    report = await regrade(stack, done.id, 2, 2)
    assert (report.steps[0].new_missing, report.steps[0].num_changed) == (1, 1)
    (example,) = report.examples
    assert example.old.reward is not None and example.new.reward is None
    assert example.new.parts["right"].detail == "slow"
    assert asked and all((request.rewards, request.job_id) == (NEW, None) for request in asked)
    body = RegradeRequest(first_step=1, last_step=1, rewards=(RewardSpec(grader="lenght"),))
    with pytest.raises(BadRequest, match="did you mean 'length'"):
        await stack.client.call(
            "POST", f"/v1/jobs/{done.id}/regrade", body, RegradeReport, deadline_s=60
        )


async def test_a_run_grades_with_its_id_and_the_length_in_tokens(stack: Stack) -> None:
    asked: list[ScoreRequest] = []

    async def remember(body: ScoreRequest) -> None:
        asked.append(body)

    stack.fakes.fault["score"] = remember
    record = await stack.run(steps=1)
    assert {request.job_id for request in asked} == {record.id}
    assert {item.num_tokens for request in asked for item in request.items} == {2}


async def test_a_regrade_is_polled_once_by_key_and_refuses_missing_steps(
    stack: Stack, done: JobRecord
) -> None:
    for job_id, steps, error, sentence in (
        (done.id, (5, 3), BadRequest, "steps 5:3: expected the last step not to come before the"),
        (done.id, (4, 6), NotFound, "step 6 has no stored rollouts; steps 1 to 5 have"),
        ("nope", (1, 2), NotFound, "no job 'nope'"),
    ):
        with pytest.raises(error, match=sentence):
            await regrade(stack, job_id, *steps)
    body = RegradeRequest(first_step=1, last_step=2, rewards=NEW).model_dump(mode="json")
    headers = {"prefer": "respond-async, wait=0", "idempotency-key": "k"}
    path = f"/v1/jobs/{done.id}/regrade"
    answers = [await stack.http.post(path, json=body, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 202]
    location = answers[0].headers["location"]
    assert location == answers[1].headers["location"], "asked twice, graded once"
    report = RegradeReport.model_validate((await stack.http.get(f"{location}?wait=20")).json())
    assert [step.step for step in report.steps] == [1, 2]
    other = await stack.http.post(path, json=body | {"last_step": 3}, headers=headers)
    assert other.status_code == 409


async def test_the_verdict_of_each_grader_is_kept_beside_the_rollout(stack: Stack) -> None:
    verdict = Part(
        value=0.0,
        verdict="wrong",
        detail="2 of 3 tests",
        stdout="hello",
        seconds=0.25,
        errors=("e",),
    )
    right = Part(value=1.0, verdict="ok", seconds=0.5, cached=True)
    stack.fakes.grade = lambda item: right if item.completion == "right" else verdict
    record = await stack.run()
    stored = [score for scores in stack.folder(record.id).batch(4).scores for score in scores]
    assert (
        Score(value=0.0, parts={"right": verdict}) in stored
        and Score(value=1.0, parts={"right": right}) in stored
    )
    listed = (await stack.client.get(f"/v1/jobs/{record.id}/rollouts?step=4", RolloutList)).rollouts
    assert [rollout.parts["right"] for rollout in listed] == [
        score.parts["right"] for score in stored
    ]
