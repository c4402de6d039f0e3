"""Services that lose their state in the middle of a job, and come back: the job continues from what
they have, by replaying."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from services.orchestrator.jobs import recovery
from services.orchestrator.samplers import clients
from shared.errors import BadRequest, Failed, Unavailable
from shared.http import connecting
from shared.job import CheckpointSpec, Job
from shared.wire import ServingWeights
from tests.support import orchestrator_stack
from tests.support.orchestrator_stack import Stack

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures


def once(step: int, act: Callable[[], None]) -> Callable[[Any], Any]:
    """A fault: `act` at the first call for `step`."""
    done: list[int] = []

    async def fault(body: Any) -> None:
        if body.step == step and not done:
            done.append(step)
            act()

    return fault


def checkpointing(job: Job, every: int) -> Job:
    return job.model_copy(update={"checkpoints": CheckpointSpec(every=every)})


def away(stack: Stack, route: str, times: int) -> Callable[[Any], Any]:
    """A fault: the service answers 503 that many times, once the job is submitted (which asks for
    the validation of its rewards)."""
    left = iter(range(times))

    async def fault(_: Any) -> None:
        of_the_submission = route == "validate" and stack.fakes.calls[route] == 1
        if not of_the_submission and next(left, None) is not None:
            raise Unavailable("the service has no GPU")

    return fault


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_a_trainer_that_comes_back_from_a_checkpoint_is_brought_up_to_date(
    stack: Stack, max_staleness: int
) -> None:
    stack.fakes.fault["train_step"] = once(6, stack.fakes.restart_trainer)
    submitted = checkpointing(stack.job, 3).model_copy(update={"max_staleness": max_staleness})
    record = await stack.run(job=submitted)
    assert (record.status, record.step, record.recoveries, record.error) == (
        "succeeded",
        8,
        1,
        None,
    )
    assert [request.step for request in stack.fakes.trained] == list(range(1, 9))
    folder = stack.folder(record.id)
    assert [row.step for row in folder.metrics()] == list(range(9)), (
        "rows of replayed steps are there once"
    )
    epochs = [ref.epoch for ref in stack.fakes.reloads]
    assert epochs == [1] * 6 + [2] * 6, "back from version 5 to 3 is another life of the weights"
    assert [ref.version for ref in stack.fakes.reloads] == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8]
    (warning,) = await stack.warnings(record.id)
    assert warning.message == (
        "the trainer is at another step (got step 6, expected 4); loading the job again (recovery "
        "1 of 3)"
    )
    steps = [event.data["step"] for event in await stack.events(record.id) if event.type == "step"]
    assert steps == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]


async def test_replayed_steps_train_on_what_was_sampled_the_first_time(stack: Stack) -> None:
    seen: dict[int, list[Any]] = {}

    async def remember(body: Any) -> None:
        seen.setdefault(body.step, []).append(body)
        if body.step == 5 and len(seen[5]) == 1:
            stack.fakes.restart_trainer()

    stack.fakes.fault["train_step"] = remember
    for every, replays in ((3, [1, 1, 1, 2, 2, 1, 1, 1]), (0, [2, 2, 2, 2, 2, 1, 1, 1])):
        seen.clear()
        record = await stack.run(job=checkpointing(stack.job, every))
        assert record.status == "succeeded" and [len(seen[step]) for step in range(1, 9)] == replays
        for first, *_, last in ([*bodies, bodies[-1]] for bodies in seen.values()):
            assert (first.step, first.examples, first.totals) == (
                last.step,
                last.examples,
                last.totals,
            )


async def test_the_events_say_what_killed_a_trainer(stack: Stack) -> None:
    def is_killed() -> None:
        stack.fakes.last_failure = "rank 0 was killed by SIGKILL (signal 9)"
        stack.fakes.restart_trainer()

    stack.fakes.fault["train_step"] = once(6, is_killed)
    record = await stack.run(job=checkpointing(stack.job, 3))
    assert record.status == "succeeded"
    _, killed = await stack.warnings(record.id)
    assert killed.message == f"the trainer was started again: {stack.fakes.last_failure}"
    said = [event.message for event in await stack.events(record.id)]
    assert any("resumed at step 3: steps 4 to 5 are trained again" in each for each in said)


async def test_recoveries_in_a_row_are_bounded_and_the_job_then_pauses(stack: Stack) -> None:
    async def restart(body: Any) -> None:
        if body.step == 4 and stack.fakes.calls["job"] <= 4:
            stack.fakes.restart_trainer()

    stack.fakes.fault["train_step"] = restart
    job_id = (await stack.submit(checkpointing(stack.job, 2))).id
    paused = await stack.until(job_id, "paused", "failed")
    assert (paused.status, paused.recoveries, paused.step) == ("paused", 3, 3)
    assert paused.error == (
        "the trainer is at another step (got step 4, expected 3); "
        "make sure that it works (`hone doctor` shows how the services are), "
        f"then `hone resume {job_id}` continues from there"
    )
    assert len(await stack.warnings(job_id)) == 3 + 1
    await stack.post(f"{job_id}/resume")
    done = await stack.until(job_id)
    assert (done.status, done.recoveries) == ("succeeded", 0)
    assert [request.step for request in stack.fakes.trained] == list(range(1, 9))


async def test_progress_counts_recoveries_again(stack: Stack) -> None:
    """Five failures, each after a step that was not done before: more than are allowed in a row."""
    seen: set[int] = set()

    async def fail(body: Any) -> None:
        if body.step in (2, 3, 4, 5, 6) and body.step not in seen:
            seen.add(body.step)
            raise Failed("rank 0: connection closed by peer")

    stack.fakes.fault["train_step"] = fail
    record = await stack.run()
    assert (record.status, record.recoveries) == ("succeeded", 5)
    messages = [event.message for event in await stack.warnings(record.id)]
    assert all(message.endswith("(recovery 1 of 3)") for message in messages)


async def test_a_trainer_that_lost_everything_is_given_the_job_again(stack: Stack) -> None:
    stack.fakes.fault["train_step"] = once(5, stack.fakes.lose_trainer)
    record = await stack.run(job=checkpointing(stack.job, 2))
    assert (record.status, record.recoveries) == ("succeeded", 1)
    assert [request.step for request in stack.fakes.trained] == list(range(1, 9))


async def test_a_sampler_that_lost_its_weights_is_given_them_again(stack: Stack) -> None:
    def lose() -> None:
        stack.fakes.serving = ServingWeights()

    async def forget(_: Any) -> None:
        if stack.fakes.step == 4 and stack.fakes.calls["model"] == 1:
            lose()

    stack.fakes.fault["generate"] = forget
    record = await stack.run()
    assert (record.status, record.recoveries) == ("succeeded", 1)
    assert stack.fakes.calls["model"] == 2 and [
        request.step for request in stack.fakes.trained
    ] == list(range(1, 9))


@pytest.mark.parametrize("route", ["validate", "job", "model"])
async def test_a_service_that_cannot_work_at_the_start_is_waited_for(
    stack: Stack, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More often than a job that fails is tried again. The last pause is longer than two of the
    heartbeats that say what the job waits for."""
    monkeypatch.setattr(recovery, "PAUSES_S", (*[0.0] * 5, 2.5))
    stack.settings.__dict__["patience_s"] = 0.1
    stack.fakes.fault[route] = away(stack, route, 1_000_000)
    job_id = (await stack.submit()).id
    async with asyncio.timeout(90):
        while (record := await stack.get(job_id)).recoveries < 6 or not record.waits:
            assert record.status in ("queued", "running"), record.error
            await asyncio.sleep(0.05)
    reasons = "the service has no GPU", "service is unreachable since"
    assert any(reason in record.waits for reason in reasons)
    stack.fakes.fault.clear()
    done = await stack.until(job_id)
    assert (done.status, done.attempts, done.waits) == ("succeeded", 1, None)


async def test_a_job_whose_service_stays_unreachable_pauses_once_the_operator_says_so(
    stack: Stack,
) -> None:
    stack.settings.__dict__.update(patience_s=0.1, wait_limit_s=1.0)
    stack.fakes.fault["job"] = away(stack, "job", 1_000_000)
    paused = await stack.run("paused", "failed")
    assert paused.status == "paused" and paused.error is not None
    assert paused.error.startswith("the service has no GPU; it has waited for 1 s, ")


async def test_a_reward_service_that_stays_unreachable_is_waited_for_once(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "AWAY_S", 0.2)
    stack.settings.__dict__.update(patience_s=0.1, wait_limit_s=8.0)
    stack.fakes.fault["score"] = away(stack, "score", 1_000_000)
    job_id = (await stack.submit()).id
    while not stack.fakes.calls["score"]:
        await asyncio.sleep(0.05)
    began = time.monotonic()
    paused = await stack.until(job_id, "paused", "failed")
    assert paused.status == "paused" and "; it has waited for 8 s, " in str(paused.error)
    assert time.monotonic() - began < 15.5


async def test_a_reward_service_that_is_slow_to_check_a_job_that_begins_is_waited_for(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What hangs of the job's own there, its reward's code, the service ends itself."""
    slow = iter([0.0, 5.0, 5.0, 5.0])

    async def validate(_: Any) -> None:
        await asyncio.sleep(next(slow, 0.0))

    monkeypatch.setattr(clients, "VALIDATE_DEADLINE_S", 0.5)
    stack.fakes.fault["validate"] = validate
    done = await stack.run("paused", "failed", "succeeded")
    assert (done.status, done.recoveries, done.error) == ("succeeded", 3, None)


async def test_a_reward_service_that_is_unreachable_in_the_middle_costs_nothing_but_time(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a call is patient: what was sampled is graded then."""
    monkeypatch.setattr(connecting, "AWAY_S", 0.2)
    stack.settings.__dict__["patience_s"] = 0.1
    stack.fakes.fault["score"] = away(stack, "score", 40)
    job_id = (await stack.submit()).id
    async with asyncio.timeout(90):
        while not (record := await stack.get(job_id)).waits:
            await asyncio.sleep(0.05)
    assert record.waits.startswith("the reward service is unreachable since ")
    done = await stack.until(job_id)
    assert (done.status, done.recoveries, stack.fakes.calls["model"]) == ("succeeded", 0, 1)


async def test_followers_are_told_who_is_unreachable_since_when_and_who_is_back(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "AWAY_S", 0.2)
    stack.fakes.fault["train_step"] = away(stack, "train_step", 3)
    record = await stack.run()
    assert (record.status, record.recoveries) == ("succeeded", 0)
    (gone,) = await stack.warnings(record.id)
    since = time.strftime("%H:%M", time.gmtime(gone.time - 0.3))
    assert gone.message.startswith(f"the trainer service is unreachable since {since}:")
    assert gone.message.endswith(" UTC: the service has no GPU; waiting for it")
    messages = [event.message for event in await stack.events(record.id)]
    assert messages.count("the trainer service is back after 1 s") == 1


@pytest.mark.parametrize("route", ["job", "model"])
async def test_a_hub_that_is_unreachable_is_named_and_not_the_service_that_asks_it(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    """Though the service answers meanwhile what it does."""
    monkeypatch.setattr(connecting, "AWAY_S", 0.2)
    monkeypatch.setattr(recovery, "LOOK_AT_SERVICES_S", 0.05)

    async def fault(_: Any) -> None:
        raise Unavailable("'task/modell' is no folder, and no Hub", code="hub_away")

    stack.fakes.fault[route] = fault
    job_id = (await stack.submit()).id
    async with asyncio.timeout(90):
        while not (record := await stack.get(job_id)).waits:
            await asyncio.sleep(0.05)
    assert record.waits.startswith("the Hugging Face Hub is unreachable since ")
    (gone,) = await stack.warnings(job_id)
    assert gone.message.startswith("the Hugging Face Hub is unreachable since ")
    assert gone.message.endswith(" UTC: 'task/modell' is no folder, and no Hub; waiting for it")
    stack.fakes.fault.clear()
    assert (await stack.until(job_id)).status == "succeeded"
    said = [event.message for event in await stack.events(job_id)]
    assert any(message.startswith("the Hugging Face Hub is back after ") for message in said)


async def test_followers_are_told_what_takes_a_sampler_long_while_it_loads(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "LOOK_AT_SERVICES_S", 0.05)

    async def starts(_: Any) -> None:
        stack.fakes.doing = "starting the engine"
        await asyncio.sleep(0.5)
        stack.fakes.doing = None

    stack.fakes.fault["model"] = starts
    record = await stack.run()
    messages = [event.message for event in await stack.events(record.id)]
    assert messages.count("the sampler is starting the engine") == 1


@pytest.mark.parametrize("route", ["job", "model"])
async def test_a_model_that_cannot_be_loaded_as_asked_pauses_the_job_in_its_words(
    stack: Stack, route: str
) -> None:
    words = "vLLM refuses to serve 'owner/model' with max_model_len 1000000 and dtype auto"

    async def refuse(_: Any) -> None:
        raise BadRequest(words)

    stack.fakes.fault[route] = refuse
    record = await stack.run("failed", "paused", "succeeded")
    assert (record.status, record.recoveries) == ("paused", 0)
    assert record.error is not None and record.error.startswith(f"{words}; correct the service")


async def test_checkpoints_that_the_trainer_found_damaged_are_told(stack: Stack) -> None:
    stack.fakes.damaged = ("the checkpoint step-000004 is damaged: model.safetensors is cut short",)
    record = await stack.run()
    assert [event.message for event in await stack.warnings(record.id)] == list(stack.fakes.damaged)


async def test_only_what_the_newest_weights_sampled_is_held_against_them(
    stack: Stack,
) -> None:
    # What older weights sampled differs from the trained ones' however well all works.
    for older, current, is_said in ((0.4, 0.01, False), (0.4, 0.3, True)):
        stack.fakes.trainer_metrics = {
            "mismatch/logprob_diff_mean": older,
            "mismatch/older/logprob_diff_mean": older,
            "mismatch/current/logprob_diff_mean": current,
        }
        record = await stack.run(max_staleness=2)
        found = [event.data.get("finding") or {} for event in await stack.events(record.id)]
        assert ("mismatch" in [each.get("code") for each in found]) == is_said


async def test_an_update_that_was_refused_is_counted_and_said(stack: Stack) -> None:
    stack.fakes.skipped = {3}
    record = await stack.run()
    rows = [row for row in stack.folder(record.id).metrics() if row.step]
    assert [row.metrics["skipped_steps"] for row in rows] == [0, 0, 1, 0, 0, 0, 0, 0]
    (warning,) = await stack.warnings(record.id)
    assert (
        warning.message == "step 3: loss or gradient were not finite, so the step changed no weight"
    )
    assert record.summary is not None and record.summary["skipped_steps"] == 1
