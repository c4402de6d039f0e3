"""What a job leaves, over the API: events, metrics, stored rollouts, checkpoints."""

from __future__ import annotations

import pytest

from services.orchestrator.api import history
from shared.job import CheckpointSpec, RolloutsSpec
from shared.wire import (
    CheckpointList,
    EventList,
    MetricsList,
    RolloutList,
)
from tests.support import orchestrator_stack
from tests.support.orchestrator_stack import Stack

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures


async def test_events_are_a_page_or_a_stream_that_resumes_without_a_gap(stack: Stack) -> None:
    record = await stack.until((await stack.submit()).id)
    page = (await stack.client.get(f"/v1/jobs/{record.id}/events", EventList)).events
    kinds = [event.type for event in page]
    assert (
        kinds[:2] == ["status", "status"] and kinds.count("step") == 8 and kinds.count("eval") == 3
    )
    assert kinds.count("checkpoint") == 1 and page[-1].message == "succeeded"
    streamed = [part async for part in stack.client.events(f"/v1/jobs/{record.id}/events")]
    assert [part[0] for part in streamed[:-1]] == [event.id for event in page] and streamed[-1][
        1
    ] == "end"
    middle = page[5].id
    rest = [
        part async for part in stack.client.events(f"/v1/jobs/{record.id}/events", last_id=middle)
    ]
    assert [part[0] for part in rest[:-1]] == [event.id for event in page[6:]]


async def test_one_follower_too_many_is_told_to_come_back(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MAX_FOLLOWERS", 0)
    record = await stack.until((await stack.submit()).id)
    accept = {"accept": "text/event-stream"}
    response = await stack.http.get(f"/v1/jobs/{record.id}/events", headers=accept)
    assert response.status_code == 429 and "follow events already" in response.json()["detail"]
    monkeypatch.setattr(history, "MAX_FOLLOWERS", 1)
    for _ in range(3):  # each leaves its place when it ends
        response = await stack.http.get(f"/v1/jobs/{record.id}/events", headers=accept)
        assert response.status_code == 200 and response.text.endswith("event: end\ndata: {}\n\n")


async def test_a_bad_event_id_is_refused(stack: Stack) -> None:
    record = await stack.until((await stack.submit()).id)
    response = await stack.http.get(
        f"/v1/jobs/{record.id}/events",
        headers={"accept": "text/event-stream", "last-event-id": "yesterday"},
    )
    assert response.status_code == 422 and "'yesterday'" in response.json()["detail"]


async def test_numbers_out_of_range_are_the_callers_fault(stack: Stack) -> None:
    record = await stack.until((await stack.submit()).id)
    huge = "9" * 30
    for path in (
        f"/events?after={huge}",
        f"/events?after={huge}-{huge}",
        "/events?after=-",
        f"/rollouts?step={huge}",
        "/rollouts?step=-1",
        f"/metrics?after_step={huge}",
    ):
        response = await stack.http.get(f"/v1/jobs/{record.id}{path}")
        assert response.status_code == 422, (path, response.text)
    headers = {"accept": "text/event-stream", "last-event-id": f"{huge}-0"}
    response = await stack.http.get(f"/v1/jobs/{record.id}/events", headers=headers)
    assert response.status_code == 422 and "Last-Event-ID" in response.json()["detail"]
    assert (await stack.http.get(f"/v1/jobs/{record.id}:events")).status_code == 404
    assert (await stack.http.get(f"/v1/jobs?after={huge}")).status_code == 404


async def test_metrics_and_rollouts_are_served_from_the_run_folder(stack: Stack) -> None:
    record = await stack.until((await stack.submit()).id)
    rows = (await stack.client.get(f"/v1/jobs/{record.id}/metrics?after_step=5", MetricsList)).rows
    assert [row.step for row in rows] == [6, 7, 8]
    listed = await stack.client.get(f"/v1/jobs/{record.id}/rollouts?step=4", RolloutList)
    assert listed.step == 4 and len(listed.rollouts) == 6 * 4
    assert {rollout.completion for rollout in listed.rollouts} <= {"right", "wrong"}
    assert all(
        rollout.reward == float(rollout.completion == "right") for rollout in listed.rollouts
    )
    assert (await stack.client.get(f"/v1/jobs/{record.id}/rollouts", RolloutList)).step == 8


async def test_events_metrics_and_rollouts_come_in_pages(stack: Stack) -> None:
    record = await stack.until((await stack.submit()).id)
    at = f"/v1/jobs/{record.id}"
    events = (await stack.client.get(f"{at}/events", EventList)).events
    first = (await stack.client.get(f"{at}/events?limit=2", EventList)).events
    rest = (await stack.client.get(f"{at}/events?after={first[1].id}", EventList)).events
    assert first + rest == events
    page = await stack.client.get(f"{at}/metrics?limit=3", MetricsList)
    assert ([row.step for row in page.rows], page.next_after_step) == ([0, 1, 2], 2)
    page = await stack.client.get(f"{at}/metrics?after_step=5&limit=3", MetricsList)
    assert ([row.step for row in page.rows], page.next_after_step) == ([6, 7, 8], None)
    whole = await stack.client.get(f"{at}/rollouts?step=4", RolloutList)
    page = await stack.client.get(f"{at}/rollouts?step=4&limit=20", RolloutList)
    assert (page.rollouts, page.next_after) == (whole.rollouts[:20], 20)
    page = await stack.client.get(f"{at}/rollouts?step=4&after=20&limit=4", RolloutList)
    assert (page.rollouts, page.next_after) == (whole.rollouts[20:], None)


async def test_rollouts_are_kept_as_far_back_as_the_job_says(stack: Stack) -> None:
    changes = {
        "rollouts": RolloutsSpec(keep_last=2),
        "checkpoints": CheckpointSpec(every=2, keep_last=2),
    }
    record = await stack.until((await stack.submit(stack.job.model_copy(update=changes))).id)
    assert stack.folder(record.id).batch_steps() == [7, 8]
    response = await stack.http.get(f"/v1/jobs/{record.id}/rollouts?step=3")
    assert response.status_code == 404 and "steps 7 to 8 have" in response.json()["detail"]


async def test_checkpoints_that_were_removed_since_are_not_listed(stack: Stack) -> None:
    spec = CheckpointSpec(every=1, keep_last=2, keep_every=3)
    record = await stack.until(
        (await stack.submit(stack.job.model_copy(update={"checkpoints": spec}))).id
    )
    listed = await stack.client.get(f"/v1/jobs/{record.id}/checkpoints", CheckpointList)
    assert [checkpoint.step for checkpoint in listed.checkpoints] == [3, 6, 7, 8]
