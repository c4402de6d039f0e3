"""Jobs that are paused: on request, or because too many rewards are missing. Nothing is lost,
nothing is done twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.orchestrator.store.folder import RunFolder
from shared.errors import BadRequest, Conflict, Unavailable
from shared.job import Job
from shared.wire import Part, ResumeRequest, ScoreItem
from tests.support import orchestrator_stack
from tests.support.fake_services import Hold
from tests.support.orchestrator_stack import Stack
from tests.support.slow_disk import SlowDisk

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures

JUDGE_AWAY = Part(value=None, verdict="error", detail="the judge answered 401")


def training(stack: Stack, step: int) -> Hold:
    """Holds the training of this step."""
    return stack.fakes.hold("train_step", lambda body: body.step == step)


async def test_a_paused_job_frees_the_worker_and_continues_where_it_was(stack: Stack) -> None:
    stack.fakes.remembers_jobs = True
    gate = training(stack, 4)
    first = (await stack.submit()).id
    await gate.arrival()
    assert (await stack.post(f"{first}/pause")).pause_requested
    paused = await stack.until(first, "paused")
    assert (paused.step, paused.error, paused.pause_requested, paused.finished_at) == (
        3,
        "paused on request",
        False,
        None,
    )
    gate.released.set()
    second = await stack.run()
    assert second.status == "succeeded", "another job runs meanwhile"
    await asyncio.sleep(0.1)
    assert (await stack.get(first)).status == "paused"
    sampled = stack.fakes.calls["generate"]
    assert (await stack.post(f"{first}/resume")).error is None
    done = await stack.until(first)
    assert (done.status, done.step, done.attempts) == ("succeeded", 8, 2)
    assert [row.step for row in stack.folder(first).metrics()] == list(range(9))
    messages = [event.message for event in await stack.events(first) if event.type == "status"]
    assert messages == ["queued", "running", "paused on request", "queued", "running", "succeeded"]
    # the other job took the fake trainer from it: steps 1 to 3 are in the checkpoint that the pause
    # wrote, and only 5 to 8 are sampled
    assert stack.fakes.calls["generate"] - sampled == 4 * 2 + 2 * 4
    trained = [body.step for body in stack.fakes.trained if body.job_id == first]
    assert trained == [1, 2, 3, 4, *range(4, 9)], "only step 4, which the pause broke off, is twice"


@pytest.mark.parametrize("ask", ["pause", "cancel"])
async def test_a_job_that_an_operator_stops_ends_with_a_checkpoint_of_the_trainers_step(
    stack: Stack, ask: str
) -> None:
    """Paused while the weights of step 4 are published: its row is not there yet, and the
    checkpoint is of the step all the same."""
    gate = stack.fakes.hold("publish", lambda body: body.version == 4)
    job_id = (await stack.submit()).id
    await gate.arrival()
    await stack.post(f"{job_id}/{ask}")
    await stack.until(job_id, "paused", "cancelled")
    gate.released.set()
    assert sorted(path.name for path in stack.folder(job_id).checkpoints.glob("step-*")) == [
        "step-000004"
    ]
    assert [row.step for row in stack.folder(job_id).metrics()] == list(range(4))


@pytest.mark.parametrize(
    ("error", "of_the_trainer", "said"),
    [
        (Unavailable("the disk is full"), True, "the disk is full"),
        (Conflict("got step 3, expected 4", code="out_of_order"), True, "expected 4"),
        (OSError(28, "No space left on device"), False, "No space left on device"),
    ],
)
async def test_a_job_is_stopped_without_a_checkpoint_where_none_can_be_written(
    stack: Stack,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    of_the_trainer: bool,
    said: str,
) -> None:
    async def fail(body: Any) -> None:
        raise error

    def fail_on_disk(*_: Any) -> None:
        raise error

    gate = training(stack, 4)
    if of_the_trainer:
        stack.fakes.fault["checkpoint"] = fail
    job_id = (await stack.submit()).id
    await gate.arrival()
    if not of_the_trainer:
        monkeypatch.setattr(RunFolder, "prune_batches", fail_on_disk)
    await stack.post(f"{job_id}/pause")
    assert (await stack.until(job_id, "paused")).error == "paused on request"
    warned = [event.message for event in await stack.events(job_id) if event.level == "warning"]
    assert any("no checkpoint was written: " in one and said in one for one in warned)
    gate.released.set()
    monkeypatch.undo()
    stack.fakes.fault.clear()
    await stack.post(f"{job_id}/resume")
    assert (await stack.until(job_id)).status == "succeeded", "the worker still takes jobs"


@pytest.mark.parametrize(
    "name", ["create", "start_at", "write_batch", "append_sync", "append_metrics", "write_summary"]
)
async def test_a_job_is_paused_only_once_nothing_of_it_is_written_any_more(
    stack: Stack, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user continues with it may be another worker, and what is written late would undo its
    rows or its batches."""
    disk, write = SlowDisk(), getattr(RunFolder, name)

    def slow(*args: Any, **more: Any) -> Any:
        disk.write(name)
        return write(*args, **more)

    monkeypatch.setattr(RunFolder, name, slow)
    job_id = (await stack.submit()).id
    await disk.until_begun()
    assert (await stack.post(f"{job_id}/pause")).pause_requested
    await asyncio.sleep(2.0)  # a heartbeat has heard of it
    assert (await stack.get(job_id)).status == "running"
    disk.goes_on.set()
    await stack.until(job_id, "paused")
    await stack.post(f"{job_id}/resume")
    assert (await stack.until(job_id)).status == "succeeded"
    assert [row.step for row in stack.folder(job_id).metrics()] == list(range(9))


async def test_a_paused_job_continues_with_other_memory_settings_and_steps(stack: Stack) -> None:
    gate = training(stack, 4)
    job_id = (await stack.submit()).id
    await gate.arrival()
    changes = ResumeRequest(set=("memory.micro_batch_tokens=128", "steps=5"))
    with pytest.raises(Conflict, match=r"is running; pause it before you change it"):
        await stack.post(f"{job_id}/resume", changes)
    await stack.post(f"{job_id}/pause")
    await stack.until(job_id, "paused")
    gate.released.set()
    for wrong, sentence in (
        ("training.learning_rate=1", "'training.learning_rate=1' changes what is learned"),
        ("steps=2", "steps: got 2, but 3 are done"),
        ("memory.micro_batch_token=1", "unknown key 'memory.micro_batch_token'"),
        ("evaluation.sets.more.source=/no/rows.jsonl", "no dataset file at '/no/rows.jsonl'"),
    ):
        with pytest.raises(BadRequest, match=sentence):
            await stack.post(f"{job_id}/resume", ResumeRequest(set=(wrong,)))
        assert (await stack.get(job_id)).status == "paused"
    await stack.post(f"{job_id}/resume", changes)
    done = await stack.until(job_id)
    assert (done.status, done.step, done.steps) == ("succeeded", 5, 5)
    assert done.job.memory.micro_batch_tokens == 128


@pytest.mark.parametrize("kept", [3, 0])
async def test_a_job_continues_whose_metrics_were_lost(stack: Stack, kept: int) -> None:
    """The trainer, at step 5, would refuse the step after the last row for ever."""
    gate = training(stack, 6)
    job_id = (await stack.submit()).id
    await gate.arrival()
    await stack.post(f"{job_id}/pause")
    await stack.until(job_id, "paused")
    path = stack.folder(job_id).path / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:kept]))
    gate.released.set()
    await stack.post(f"{job_id}/resume")
    done = await stack.until(job_id, "succeeded", "failed", "paused")
    assert (done.status, done.error) == ("succeeded", None)
    assert [request.step for request in stack.fakes.trained] == list(range(1, 9))
    rows = [row.step for row in stack.folder(job_id).metrics()]
    assert rows == [*range(kept), 6, 7, 8]
    events = [event.message for event in await stack.events(job_id)]
    assert any(message.startswith("metrics.jsonl has no rows of steps") for message in events)


async def test_pausing_and_resuming_twice_are_once_and_a_queued_job_is_paused_at_once(
    stack: Stack,
) -> None:
    gate = training(stack, 1)
    running = (await stack.submit()).id
    await gate.arrival()
    queued = (await stack.submit()).id
    for _ in range(2):
        assert (await stack.post(f"{queued}/pause")).status == "paused"
    gate.released.set()
    assert (await stack.until(running)).status == "succeeded"
    assert (await stack.get(queued)).attempts == 0, "a paused job is not taken up"
    for _ in range(2):
        await stack.post(f"{queued}/resume")
    done = await stack.until(queued)
    assert (done.status, done.attempts) == ("succeeded", 1)
    messages = [event.message for event in await stack.events(queued) if event.type == "status"]
    assert messages == ["queued", "paused on request", "queued", "running", "succeeded"]


async def test_an_ended_job_can_be_neither_paused_nor_resumed_nor_cancelled(stack: Stack) -> None:
    record = await stack.run()
    for action in ("pause", "resume", "cancel"):
        response = await stack.http.post(f"/v1/jobs/{record.id}/{action}")
        assert (
            response.status_code == 409
            and f"job {record.id!r} has succeeded" in response.json()["detail"]
        )
        assert (await stack.http.post(f"/v1/jobs/nope/{action}")).status_code == 404


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_missing_rewards_beyond_the_limit_pause_the_job_and_are_graded_again(
    stack: Stack, max_staleness: int
) -> None:
    def away(item: ScoreItem) -> Part:
        return JUDGE_AWAY if stack.fakes.step >= 3 else right(item)

    right, stack.fakes.grade = stack.fakes.grade, away
    job_id = (
        await stack.submit(
            stack.job.model_copy(update={"max_staleness": max_staleness, "evaluation": NO_EVAL})
        )
    ).id
    paused = await stack.until(job_id, "paused")
    assert paused.step in (3, 4) and paused.error is not None
    assert paused.error == (
        f"step {paused.step + 1}: 100% of the rewards are missing; expected at most 50%; right: "
        "the judge answered 401; look into the log of the reward service; a mistake in the job "
        "itself, such as its reward code, is stored with it: for that submit a corrected job, with "
        f"the newest checkpoint as its model if there is one (`hone download {job_id} --list`); "
        f"otherwise fix the cause, then `hone resume {job_id}` continues from there"
    )
    assert [request.step for request in stack.fakes.trained] == list(range(1, paused.step + 1)), (
        "not trained on"
    )
    waiting = stack.folder(job_id).batch(paused.step + 1)
    assert not waiting.graded
    (event,) = await stack.warnings(job_id)
    assert event.data == {"status": "paused"} and event.message == paused.error
    stack.fakes.grade = right
    await stack.post(f"{job_id}/resume")
    done = await stack.until(job_id)
    assert (done.status, done.step, done.error) == ("succeeded", 8, None)
    graded = stack.folder(job_id).batch(paused.step + 1)
    assert graded.graded and graded.groups == waiting.groups, "the same rollouts, graded"
    assert all(score.value is not None for scores in graded.scores for score in scores)
    assert [request.step for request in stack.fakes.trained] == list(range(1, 9))


NO_EVAL = Job.model_fields["evaluation"].default.model_copy(
    update={"every": 1000, "num_prompts": 1}
)


async def test_a_job_whose_rewards_are_still_missing_pauses_again(stack: Stack) -> None:
    stack.fakes.grade = lambda _: JUDGE_AWAY
    job_id = (await stack.submit()).id
    await stack.until(job_id, "paused")
    sampled = stack.fakes.calls["generate"]
    await stack.post(f"{job_id}/resume")
    assert (await stack.until(job_id, "paused", "running")).status in ("paused", "running")
    async with asyncio.timeout(90):
        while (await stack.get(job_id)).attempts < 2:
            await asyncio.sleep(0.02)
    again = await stack.until(job_id, "paused")
    assert again.error is not None and "100% of the rewards are missing" in again.error
    assert stack.fakes.calls["generate"] == sampled, "nothing is sampled again to be graded"
    assert stack.fakes.trained == []


async def test_a_share_of_missing_rewards_within_the_limit_is_a_metric(stack: Stack) -> None:
    count = iter(range(100_000))
    right = stack.fakes.grade
    stack.fakes.grade = lambda item: JUDGE_AWAY if next(count) % 4 == 0 else right(item)
    record = await stack.run()
    rows = [row for row in stack.folder(record.id).metrics() if row.step]
    assert (
        record.status == "succeeded"
        and [row.metrics["missing_rewards"] for row in rows] == [0.25] * 8
    )
