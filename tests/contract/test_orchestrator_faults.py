"""What goes wrong in the middle of a job, and what becomes of it: rollouts that end in an error,
weights that do not arrive, full disks, deadlines, workers that were superseded."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from services.orchestrator.extensions import trackers as tracking
from shared.errors import BadRequest, Failed, StateLost, Unavailable
from shared.job import Job, WandbSpec
from shared.wire import (
    FolderWeights,
    GenerateRequest,
    RolloutGroup,
    ServingWeights,
    Span,
)
from tests.support import orchestrator_stack
from tests.support.orchestrator_stack import Stack

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures


def first(times: int, matches: Callable[[Any], bool], act: Callable[[], None]) -> Any:
    """A fault: `act` at the first `times` calls that match."""
    left = iter(range(times))

    async def fault(body: Any) -> None:
        if matches(body) and next(left, None) is not None:
            act()

    return fault


def raising(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


async def warnings(stack: Stack, job_id: str) -> list[str]:
    return [warning.message for warning in await stack.warnings(job_id)]


# --- weights that do not arrive


def garble(stack: Stack, times: int, version: int = 3) -> None:
    """Makes the sampler answer with another digest, that many times."""
    left = iter(range(times))

    def garbled(serving: ServingWeights) -> ServingWeights:
        if serving.version != version or next(left, None) is None:
            return serving
        return serving.model_copy(update={"digest": "other"})

    stack.fakes.change["reload"] = garbled


async def test_a_digest_that_differs_once_costs_one_warning(stack: Stack) -> None:
    garble(stack, 1)
    record = await stack.run()
    assert (record.status, record.recoveries) == ("succeeded", 0)
    assert [ref.version for ref in stack.fakes.reloads] == [0, 1, 2, 3, 3, 4, 5, 6, 7, 8]
    assert await warnings(stack, record.id) == [
        "weight sync: the trainer published version 3 with digest digest-3, but the sampler serves "
        "version 3 with digest other; the weights are pushed again"
    ]


async def test_a_digest_that_differs_twice_is_recovered_from(stack: Stack) -> None:
    garble(stack, 2)
    record = await stack.run()
    assert (record.status, record.recoveries) == ("succeeded", 1)
    assert [ref.epoch for ref in stack.fakes.reloads if ref.version == 3] == [1, 1, 2, 2]
    assert [request.step for request in stack.fakes.trained] == list(range(1, 9))


@pytest.mark.parametrize(
    "error",
    [
        Failed("loading version 3 failed halfway"),
        StateLost("no model is loaded; PUT /model loads one"),
        Unavailable("the engine died", code="unreachable"),
    ],
    ids=["failed", "state lost", "away"],
)
async def test_an_engine_that_dies_in_the_middle_of_a_sync_is_loaded_again(
    stack: Stack, error: Exception
) -> None:
    stack.settings.__dict__["patience_s"] = 0.3
    loads_before = stack.fakes.calls["model"]

    async def dead_until_loaded(ref: FolderWeights) -> None:
        if ref.version == 3 and stack.fakes.calls["model"] == loads_before + 1:
            raise error

    stack.fakes.fault["reload"] = dead_until_loaded
    record = await stack.run()
    assert (record.status, record.recoveries) == ("succeeded", 1)
    assert stack.fakes.calls["model"] == 2
    assert [request.step for request in stack.fakes.trained] == list(range(1, 9))


# --- what a person can fix


FULL = Failed("no space to write '/runs/x'", code="disk_full")


async def test_a_full_disk_pauses_the_job_and_it_continues_once_there_is_space(
    stack: Stack,
) -> None:
    stack.fakes.fault["checkpoint"] = first(1_000_000, lambda _: True, raising(FULL))
    job_id = (await stack.submit()).id
    paused = await stack.until(job_id, "paused", "failed")
    assert (paused.status, paused.recoveries) == ("paused", 3)
    assert paused.error == (
        "no space to write '/runs/x'; free some space, "
        f"then `hone resume {job_id}` continues from there"
    )
    del stack.fakes.fault["checkpoint"]
    await stack.post(f"{job_id}/resume")
    done = await stack.until(job_id)
    assert (done.status, done.step, done.error) == ("succeeded", 8, None)
    assert [request.step for request in stack.fakes.trained] == list(range(1, 9))


async def test_a_group_past_its_deadline_pauses_the_job(stack: Stack) -> None:
    stack.settings.__dict__["generate_deadline_s"] = 0.5
    slow = stack.fakes.fault["generate"] = lambda _: asyncio.sleep(3.0)
    job_id = (await stack.submit(quiet(stack.job))).id
    paused = await stack.until(job_id, "paused", "failed")
    assert paused.status == "paused" and paused.error is not None
    assert "did not finish POST /generate within 0.6 s; find out why, or raise" in paused.error
    assert slow is stack.fakes.fault.pop("generate")
    stack.settings.__dict__["generate_deadline_s"] = 60.0
    await stack.post(f"{job_id}/resume")
    assert (await stack.until(job_id)).status == "succeeded"


async def test_a_bug_pauses_the_job_rather_than_losing_it(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "services.orchestrator.jobs.attempt.summarize",
        lambda *_: raising(ZeroDivisionError("1/0"))(),
    )
    job_id = (await stack.submit()).id
    paused = await stack.until(job_id, "paused", "failed")
    assert paused.status == "paused" and paused.error == (
        "a bug in Hone: ZeroDivisionError: 1/0; look at the trace in the orchestrator's log, "
        f"then `hone resume {job_id}` continues from there"
    )


async def test_a_request_that_is_refused_late_pauses_the_job(stack: Stack) -> None:
    """As a step whose body is over the limit, or a service of another version, is refused."""

    async def refuse(body: Any) -> None:
        if body.step == 5:
            raise BadRequest("body of 2000 bytes; at most 1000 are taken")

    stack.fakes.fault["train_step"] = refuse
    job_id = (await stack.submit()).id
    paused = await stack.until(job_id, "paused", "failed")
    assert (paused.status, paused.step) == ("paused", 4)
    del stack.fakes.fault["train_step"]
    await stack.post(f"{job_id}/resume")
    assert (await stack.until(job_id)).status == "succeeded"


async def test_work_that_is_cancelled_from_within_pauses_the_job_and_not_the_worker(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a library does whose own time-out gets out of it."""
    with monkeypatch.context() as patched:
        patched.setattr(
            "services.orchestrator.jobs.attempt.summarize",
            lambda *_: raising(asyncio.CancelledError())(),
        )
        job_id = (await stack.submit()).id
        paused = await stack.until(job_id, "paused", "failed")
    assert paused.error is not None and "cancelled the job's work" in paused.error
    await stack.post(f"{job_id}/resume")
    assert (await stack.until(job_id)).status == "succeeded"


# --- one rollout's fault


def quiet(job: Job) -> Job:
    """The job without evaluation data."""
    return job.model_copy(update={"data": job.data.model_copy(update={"eval": None})})


async def test_a_prompt_that_cannot_be_sampled_is_counted_and_stops_nothing(stack: Stack) -> None:
    def errors(body: GenerateRequest) -> str | None:
        return "a prompt of 9000 tokens; the model holds 4096" if body.prompt == "3?" else None

    stack.fakes.errors = errors
    graded: list[int] = []
    grade = stack.fakes.grade
    stack.fakes.grade = lambda item: (graded.append(item.num_tokens or 0), grade(item))[1]
    sampling = stack.job.sampling.model_copy(update={"prompts_per_step": 6})
    submitted = stack.job.model_copy(update={"sampling": sampling})
    record = await stack.run(job=submitted)
    assert record.status == "succeeded" and await warnings(stack, record.id) == []
    folder = stack.folder(record.id)
    rows = folder.metrics()
    assert rows[0].metrics["eval/errored_rollouts"] == pytest.approx(1 / 4)
    shares = [round(row.metrics["errored_rollouts"] * 6) for row in rows if row.step]
    assert sum(shares) in (2, 3), "8 steps of 6 prompts take each of 20 twice or three times"
    assert all(row.metrics["missing_rewards"] == 0.0 for row in rows if row.step)
    assert 0 not in graded, "what was not sampled is not graded"
    for request in stack.fakes.trained:
        assert all(len(example.token_ids) == 2 for example in request.examples)


# --- W&B


async def test_a_wandb_that_is_unreachable_costs_two_warnings_and_no_job(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def begin(job: Job, job_id: str, _: Any) -> Any:
        begun.append(job_id)
        raise ConnectionError("no route to api.wandb.ai")

    monkeypatch.setattr(tracking, "begin_wandb", begin)
    submitted = stack.job.model_copy(update={"wandb": WandbSpec(project="p")})
    record = await stack.run(job=submitted)
    assert record.status == "succeeded" and set(begun) == {record.id}
    assert len(begun) >= 8, "it is tried again at each step"
    first, at_the_end = await warnings(stack, record.id)
    away = "ConnectionError: no route to api.wandb.ai"
    assert first.startswith(f"W&B has nothing of this run so far: {away}; the job continues")
    assert at_the_end == f"W&B has nothing of this run: {away}; metrics.jsonl has all"


# --- versions and epochs


def age(stack: Stack, times: int, by: int) -> None:
    """Makes the sampler say that weights older `by` so many versions sampled, while version 4
    serves and that many times."""
    left = iter(range(times))

    def older(group: RolloutGroup) -> RolloutGroup:
        if group.rollouts[0].versions != (4,) or next(left, None) is None:
            return group
        spans = (Span(version=4 - by, start=0),)
        rollouts = [rollout.model_copy(update={"spans": spans}) for rollout in group.rollouts]
        return group.model_copy(update={"rollouts": tuple(rollouts)})

    stack.fakes.change["generate"] = older


@pytest.mark.parametrize(("max_staleness", "by"), [(0, 1), (0, -1), (1, 4)])
async def test_a_group_of_other_versions_than_asked_for_is_sampled_again(
    stack: Stack, max_staleness: int, by: int
) -> None:
    """Older than the bound, or newer than what the step is taken from: another life's."""
    age(stack, 2, by)
    submitted = quiet(stack.job).model_copy(update={"max_staleness": max_staleness})
    record = await stack.run(job=submitted)
    assert record.status == "succeeded"
    folder = stack.folder(record.id)
    for step in range(1, 9):
        versions = {
            version
            for group in folder.batch(step).groups
            for rollout in group.rollouts
            for version in rollout.versions
        }
        assert min(versions) >= max(step - 1 - max_staleness, 0) and max(versions) <= step - 1
    rows = [row.metrics for row in folder.metrics() if row.step]
    assert sum(metrics["resampled_groups"] for metrics in rows) == 2
    assert all(0 <= metrics["staleness"] <= max_staleness for metrics in rows)
    (warning,) = await warnings(stack, record.id)
    assert warning.endswith(
        "2 extra sampling(s), of groups by weights of another version than requested"
    )


async def test_a_sampler_that_never_has_the_versions_asked_for_pauses_the_job(stack: Stack) -> None:
    age(stack, 1_000_000, 2)
    paused = await stack.run("paused", "failed", job=quiet(stack.job))
    assert paused.status == "paused" and paused.error is not None
    assert paused.error.startswith(
        "step 5: the sampler was asked for versions 4 to 4 and sampled with [2], 3 times; "
        "make sure that nothing else loads weights into it, and start it again; a mistake "
        "in the job itself"
    )


async def test_nothing_that_was_asked_for_before_a_rewind_is_joined_after_it(stack: Stack) -> None:
    bodies: list[GenerateRequest] = []

    async def note(body: GenerateRequest) -> None:
        bodies.append(body)

    stack.fakes.fault["generate"] = note
    stack.fakes.fault["train_step"] = first(
        1, lambda body: body.step == 5, stack.fakes.restart_trainer
    )
    submitted = quiet(stack.job).model_copy(update={"max_staleness": 2})
    record = await stack.run(job=submitted)
    assert (record.status, record.recoveries) == ("succeeded", 1)
    assert {body.job_id for body in bodies} == {record.id}
    assert [body.epoch for body in bodies] == sorted(body.epoch for body in bodies)
    assert {body.epoch for body in bodies} == {1, 2} and len({body.attempt for body in bodies}) == 1
    folder = stack.folder(record.id)
    for step in range(1, 9):
        assert folder.batch(step).version >= max(step - 3, 0)


# --- workers that were superseded, and jobs that are stopped


async def test_a_superseded_worker_stops_and_gives_back_the_lease_that_it_has(
    stack: Stack,
) -> None:
    """Another attempt has the trainer by the time that this one trains step 3."""

    def supersede() -> None:
        attempt, epoch = stack.fakes.fence
        stack.fakes.fence = (attempt + 1, epoch)

    stack.settings.__dict__["lease_s"] = 3600.0
    stack.fakes.fault["train_step"] = first(1, lambda body: body.step == 3, supersede)
    job_id = (await stack.submit()).id
    record = await stack.until(job_id)
    assert (record.status, record.recoveries) == ("succeeded", 0), "by the next attempt"
    (why,) = await warnings(stack, job_id)
    assert record.attempts >= 2
    assert re.fullmatch(r"got \(.*\), superseded by \(.*\); does another stack .*", why)
    assert [request.step for request in stack.fakes.trained] == list(range(1, 9))


@pytest.mark.parametrize("action", ["cancel", "pause"])
async def test_what_a_stopped_job_has_under_way_is_aborted(stack: Stack, action: str) -> None:
    sampling = stack.fakes.hold("generate", lambda _: stack.fakes.step == 3)
    job_id = (await stack.submit(quiet(stack.job))).id
    await sampling.arrival()
    await stack.post(f"{job_id}/{action}")
    await stack.until(job_id, "cancelled", "paused")
    async with asyncio.timeout(90):
        while not stack.fakes.aborted:
            await asyncio.sleep(0.02)
    (abort,) = stack.fakes.aborted
    assert (abort.job_id, abort.fence) == (job_id, stack.fakes.reloads[-1].fence)
    sampling.released.set()


async def test_a_sampler_that_cannot_abort_keeps_no_one_waiting(stack: Stack) -> None:
    stack.fakes.fault["abort"] = first(9, lambda _: True, raising(Failed("no")))
    assert (await stack.run()).status == "succeeded"
    assert (await stack.run()).status == "succeeded"
