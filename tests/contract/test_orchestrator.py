"""The jobs API over real Redis and real HTTP, with fake services behind it to reach every fault."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.api import history
from services.orchestrator.loop.prompts import load_prompts
from services.orchestrator.loop.run import Outcome, Run
from services.orchestrator.queue import worker
from services.orchestrator.queue.resources import resource
from services.orchestrator.queue.store import Lease, Store
from services.orchestrator.record.folder import RunFolder
from shared.client import Client
from shared.config import Settings
from shared.errors import BadRequest, Conflict, NotFound
from shared.job import CheckpointSpec, Job, RolloutsSpec
from shared.wire import (
    TERMINAL,
    CheckpointList,
    EventList,
    GenerateRequest,
    JobList,
    JobRecord,
    MetricsList,
    ModelRequest,
    Part,
    RolloutList,
    SubmitRequest,
    ValidateRequest,
)
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.orchestrator_stack import Stack, finish, orchestrator
from tests.support.stream_proxy import StreamProxy

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures


async def test_a_job_runs_to_its_end_and_leaves_everything_in_its_folder(
    stack: Stack, tmp_path: Path
) -> None:
    record = await stack.until((await stack.submit()).id)
    assert (record.status, record.step, record.error) == ("succeeded", 8, None)
    assert (
        record.summary is not None
        and record.summary["eval_after"] > record.summary["eval_before"] == 0.0
    )
    folder = RunFolder(Path(record.run_dir))
    assert folder.path == (tmp_path / "runs" / record.id).resolve()
    assert [row.step for row in folder.metrics()] == list(range(9))
    assert folder.batch_steps() == list(range(1, 9))
    on_disk = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    assert on_disk == record.summary
    assert {"eval_before", "eval_after", "steps", "train_s", "wall_s", "versions"} <= set(on_disk)
    assert stack.fakes.calls["train_step"] == 8 and stack.fakes.calls["reload"] == 9


async def test_every_batch_is_sampled_by_the_weights_just_trained(stack: Stack) -> None:
    record = await stack.until((await stack.submit()).id)
    folder = RunFolder(Path(record.run_dir))
    assert [folder.batch(step).version for step in range(1, 9)] == list(range(8))
    assert all(row.metrics["staleness"] == 0 for row in folder.metrics() if row.step)


async def test_a_repeatable_job_asks_with_the_same_seeds_and_each_completion_has_its_own(
    stack: Stack,
) -> None:
    asked: list[dict[tuple[str, int | None], int | None]] = []

    async def note(body: GenerateRequest) -> None:
        assert isinstance(body.prompt, str)
        asked[-1][body.prompt, body.min_version] = body.sampling.seed

    stack.fakes.fault["generate"] = note
    jobs = [
        Job.model_validate(
            stack.job.model_dump() | {"steps": 2, "seed": seed, "sampling": sampling}
        )
        for seed, sampling in (
            (0, stack.job.sampling.model_dump() | {"repeatable": True}),
            (0, stack.job.sampling.model_dump() | {"repeatable": True}),
            (1, stack.job.sampling.model_dump() | {"repeatable": True}),
            (0, stack.job.sampling.model_dump()),
        )
    ]
    for job in jobs:
        asked.append({})
        assert (await stack.until((await stack.submit(job)).id)).status == "succeeded"
    first, again, other, free = asked
    assert first == again and set(free.values()) == {None}
    seeds = {seed for seed in first.values() if seed is not None}
    assert not seeds & set(other.values())
    groups = [range(seed, seed + 4) for seed in seeds]
    assert len({number for group in groups for number in group}) == 4 * len(seeds) > 4 * 12


async def test_a_job_that_truncates_asks_the_sampler_for_masks(stack: Stack) -> None:
    specs: list[ModelRequest] = []

    async def note(body: ModelRequest) -> None:
        specs.append(body)

    stack.fakes.fault["model"] = note
    for top_k in (0, 5):
        sampling = stack.job.sampling.model_copy(update={"top_k": top_k})
        job = stack.job.model_copy(update={"steps": 1, "sampling": sampling})
        assert (await stack.until((await stack.submit(job)).id)).status == "succeeded"
    assert [spec.sampling_masks for spec in specs] == [False, True]


@pytest.mark.parametrize("max_staleness", [1, 2])
async def test_sampling_runs_ahead_by_exactly_the_staleness_allowed(
    stack: Stack, max_staleness: int
) -> None:
    async def slow(_: Any) -> None:
        await asyncio.sleep(0.05)

    stack.fakes.fault["train_step"] = slow
    record = await stack.until(
        (await stack.submit(stack.job.model_copy(update={"max_staleness": max_staleness}))).id
    )
    staleness = [
        row.metrics["staleness"] for row in RunFolder(Path(record.run_dir)).metrics() if row.step
    ]
    assert max(staleness) == max_staleness and staleness[0] == 0
    assert stack.fakes.calls["generate"] == 8 * 6 + 3 * 4, "nothing sampled is thrown away"


async def test_groups_without_signal_are_replaced_by_the_same_fresh_prompts_each_time(
    stack: Stack,
) -> None:
    """Of 20 problems, the odd ones always have signal and the even ones never."""
    count = iter(range(1_000_000))
    stack.fakes.grade = lambda item: Part(
        value=float(next(count) % 2) if item.row["answer"] % 2 else 0.0
    )
    document = stack.job.model_dump(mode="json") | {"data": {"train": stack.job.data.train}}
    document["sampling"]["refills"] = 2
    runs = [
        await stack.until((await stack.submit(Job.model_validate(document))).id) for _ in range(2)
    ]
    first, second = (
        [
            [prompt.index for prompt in stack.folder(run.id).batch(step).prompts]
            for step in range(1, 9)
        ]
        for run in runs
    )
    assert first == second and all(len(set(indices)) == 6 for indices in first)
    batches = [stack.folder(runs[0].id).batch(step) for step in range(1, 9)]
    dropped = [len(batch.dropped) for batch in batches]
    assert [
        row.metrics["dropped_groups"] for row in stack.folder(runs[0].id).metrics() if row.step
    ] == dropped
    assert sum(dropped) > 0 and max(dropped) <= 6 * 2, "at most as many a round as prompts a step"
    assert stack.fakes.calls["generate"] == 2 * (8 * 6 + sum(dropped)), (
        "what was sampled is what was kept or dropped"
    )
    odd = [sum(index % 2 for index in indices) for indices in first]
    assert [len(request.examples) for request in stack.fakes.trained[:8]] == [
        4 * number for number in odd
    ]
    plain = await stack.until((await stack.submit(stack.job)).id)
    without = [
        sum(prompt.index % 2 for prompt in stack.folder(plain.id).batch(step).prompts)
        for step in range(1, 9)
    ]
    assert sum(odd) > sum(without), "more is learned from"


async def test_checkpoints_that_were_removed_since_are_not_listed(stack: Stack) -> None:
    spec = CheckpointSpec(every=1, keep_last=2, keep_every=3)
    record = await stack.until(
        (await stack.submit(stack.job.model_copy(update={"checkpoints": spec}))).id
    )
    listed = await stack.client.get(f"/v1/jobs/{record.id}/checkpoints", CheckpointList)
    assert [checkpoint.step for checkpoint in listed.checkpoints] == [3, 6, 7, 8]


async def test_submitting_twice_with_a_key_is_submitting_once(stack: Stack) -> None:
    first = await stack.submit(key="k1")
    assert (await stack.submit(key="k1")).id == first.id
    assert len((await stack.client.get("/v1/jobs", JobList)).jobs) == 1
    with pytest.raises(Conflict):
        await stack.submit(stack.job.model_copy(update={"steps": 3}), key="k1")
    assert (await stack.submit(key="k2")).id != first.id


async def test_a_key_is_free_again_once_its_job_was_deleted(stack: Stack) -> None:
    first = await stack.submit(key="mine")
    await stack.until(first.id)
    assert (await stack.submit(key="mine")).status == "succeeded", "as it is now"
    (await stack.http.delete(f"/v1/jobs/{first.id}")).raise_for_status()
    second = await stack.submit(key="mine")
    assert second.id != first.id and (await stack.get(second.id)).id == second.id


async def test_a_key_is_remembered_across_a_restart(
    settings: Settings, redis_url: str, job: Job
) -> None:
    fakes, ids = FakeServices(settings), []
    async with fakes.running(settings) as settings:
        for _ in range(2):
            async with orchestrator(settings, redis_url) as (_store, transport):
                client = Client("orchestrator", "http://localhost", transport=transport)
                body = SubmitRequest(job=job)
                ids.append(
                    (
                        await client.call(
                            "POST", "/v1/jobs", body, JobRecord, deadline_s=60, key="same"
                        )
                    ).id
                )
    assert ids[0] == ids[1]


async def test_jobs_are_listed_newest_first_in_pages(stack: Stack) -> None:
    ids = [(await stack.submit()).id for _ in range(3)]
    page = await stack.client.get("/v1/jobs?limit=2", JobList)
    assert [record.id for record in page.jobs] == ids[:0:-1] and page.next_after == ids[1]
    rest = await stack.client.get(f"/v1/jobs?limit=2&after={page.next_after}", JobList)
    assert [record.id for record in rest.jobs] == ids[:1] and rest.next_after is None


async def test_an_unknown_job_is_not_found(stack: Stack) -> None:
    for path in ("", "/events", "/metrics", "/rollouts", "/checkpoints"):
        with pytest.raises(NotFound, match="no job 'nope'"):
            await stack.client.get(f"/v1/jobs/nope{path}", JobRecord)


async def test_a_queued_job_is_cancelled_at_once_and_a_running_one_within_seconds(
    stack: Stack,
) -> None:
    blocked = asyncio.Event()
    stack.fakes.fault["train_step"] = lambda _: blocked.wait()
    running, queued = (await stack.submit()).id, (await stack.submit()).id
    await stack.until(running, "running")
    assert (await stack.http.post(f"/v1/jobs/{queued}/cancel")).json()["status"] == "cancelled"
    await stack.http.post(f"/v1/jobs/{running}/cancel")
    assert (await stack.until(running)).status == "cancelled"
    again = await stack.http.post(f"/v1/jobs/{running}/cancel")
    assert again.status_code == 200
    blocked.set()
    stack.fakes.fault.clear()
    assert (await stack.until((await stack.submit()).id)).status == "succeeded", (
        "the worker is free again"
    )


async def test_an_ended_job_cannot_be_cancelled(stack: Stack) -> None:
    record = await stack.until((await stack.submit()).id)
    response = await stack.http.post(f"/v1/jobs/{record.id}/cancel")
    assert response.status_code == 409 and "has succeeded" in response.json()["detail"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": {"train": "/nope/train.jsonl"}}, "no dataset file at '/nope/train.jsonl'"),
        ({"data": {"train": "TRAIN", "prompt_column": "question"}}, "has no column 'question'"),
        ({"model": "/nope/model"}, "there is no folder '/nope/model' here"),
        ({"model": "/"}, "the folder '/' has no config.json"),
        (
            {"sampling": {"group_size": 1}},
            "sampling.group_size is 1: a lone completion has nothing to be compared with",
        ),
        ({"rewards": [{"grader": "lenght"}]}, "unknown grader 'lenght'; did you mean 'length'?"),
    ],
)
async def test_a_job_that_cannot_run_is_refused_when_it_is_submitted(
    stack: Stack, changes: dict[str, Any], sentence: str
) -> None:
    document = stack.job.model_dump(mode="json") | changes
    if document["data"]["train"] == "TRAIN":
        document["data"]["train"] = stack.job.data.train
    with pytest.raises(BadRequest) as raised:
        await stack.submit(Job.model_validate(document))
    assert sentence in raised.value.detail
    assert (await stack.client.get("/v1/jobs", JobList)).jobs == ()


async def test_the_rewards_of_a_job_are_tried_on_the_first_rows_of_its_data(stack: Stack) -> None:
    tried: list[ValidateRequest] = []

    async def note(body: ValidateRequest) -> None:
        tried.append(body)

    stack.fakes.fault["validate"] = note
    await stack.until((await stack.submit()).id)
    of_submission, of_beginning = tried
    assert of_submission == of_beginning
    prompts = load_prompts(stack.job).for_step(1)
    assert of_submission.prompts == prompts[:8] and len(prompts) >= 2


async def test_an_unknown_key_in_a_posted_job_names_the_nearest(stack: Stack) -> None:
    document = stack.job.model_dump(mode="json")
    document["training"]["lerning_rate"] = 1
    response = await stack.http.post("/v1/jobs", json={"job": document})
    assert response.status_code == 422
    assert (
        "unknown key 'job.training.lerning_rate'; did you mean 'learning_rate'?"
        in response.json()["detail"]
    )


async def test_a_reward_service_that_refuses_the_job_fails_it_with_the_reason(stack: Stack) -> None:
    async def broken(_: Any) -> None:
        raise BadRequest("grader 'exact_match' needs the column 'answer'")

    stack.fakes.fault["score"] = broken
    record = await stack.until((await stack.submit()).id)
    assert (
        record.status == "failed"
        and record.error == "grader 'exact_match' needs the column 'answer'"
    )


async def test_a_service_that_hangs_pauses_the_job_by_its_deadline(
    settings: Settings, redis_url: str, job: Job
) -> None:
    fakes, released = FakeServices(settings), asyncio.Event()
    fakes.fault["train_step"] = lambda _: released.wait()
    settings = settings.model_copy(update={"train_deadline_s": 0.3})
    async with (
        fakes.running(settings) as settings,
        orchestrator(settings, redis_url) as (_, transport),
    ):
        client = Client("orchestrator", "http://localhost", transport=transport)
        found = await finish(client, job, "paused", "failed")
        released.set()
    assert found.status == "paused" and found.error is not None
    assert found.error.startswith("trainer at http://127.0.0.1:")
    assert "did not finish POST /train_step within 0.3 s" in found.error


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


async def test_a_bad_event_id_is_refused(stack: Stack) -> None:
    record = await stack.until((await stack.submit()).id)
    response = await stack.http.get(
        f"/v1/jobs/{record.id}/events",
        headers={"accept": "text/event-stream", "last-event-id": "yesterday"},
    )
    assert response.status_code == 422 and "'yesterday'" in response.json()["detail"]


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


async def test_an_orchestrator_that_dies_loses_nothing(
    settings: Settings, redis_url: str, job: Job
) -> None:
    """The first one is cut off at step 5; the second takes the job up where the trainer is, before
    the next one in the queue, and trains no step twice."""
    fakes = FakeServices(settings)
    reached = asyncio.Event()

    async def block(body: Any) -> None:
        if body.step == 5 and not reached.is_set():
            reached.set()
            await asyncio.sleep(0.2)

    fakes.fault["train_step"] = block
    settings = settings.model_copy(update={"lease_s": 3.0})
    async with fakes.running(settings) as settings:
        async with orchestrator(settings, redis_url) as (_, transport):
            client = Client("orchestrator", "http://localhost", transport=transport)
            record = await client.call(
                "POST", "/v1/jobs", SubmitRequest(job=job), JobRecord, deadline_s=60
            )
            waiting = await client.call(
                "POST", "/v1/jobs", SubmitRequest(job=job), JobRecord, deadline_s=60
            )
            await asyncio.wait_for(reached.wait(), 20)
        await asyncio.sleep(0.3)
        async with orchestrator(settings, redis_url) as (_, transport):
            client = Client("orchestrator", "http://localhost", transport=transport)
            async with asyncio.timeout(90):
                while (
                    await client.get(f"/v1/jobs/{waiting.id}", JobRecord)
                ).status not in TERMINAL:
                    await asyncio.sleep(0.05)
            found = await client.get(f"/v1/jobs/{record.id}", JobRecord)
    assert (found.status, found.attempts, found.step) == ("succeeded", 2, 8)
    assert [(request.job_id, request.step) for request in fakes.trained] == [
        (job_id, step) for job_id in (record.id, waiting.id) for step in range(1, 9)
    ]
    assert [row.step for row in RunFolder(Path(found.run_dir)).metrics()] == list(range(9))


async def test_a_batch_on_disk_is_replayed_and_not_sampled_again(
    settings: Settings, redis_url: str, job: Job
) -> None:
    fakes = FakeServices(settings)
    async with (
        fakes.running(settings) as settings,
        orchestrator(settings, redis_url) as (_, transport),
    ):
        client = Client("orchestrator", "http://localhost", transport=transport)
        record = await finish(client, job)
        first, fakes.trained = fakes.trained, []
        fakes.job = None  # the trainer lost everything and starts from the beginning
        sampled = fakes.calls["generate"]
        lease = Lease(record.id, first[0].attempt, resource(settings.trainer_url), 30)
        await Run(record, lease, SilentStore(), settings).run()  # type: ignore[arg-type]
        assert fakes.trained == first
        assert fakes.calls["generate"] == sampled, (
            "nothing was sampled again, nor evaluated: the keys are the same"
        )


class SilentStore:
    """A store that a run reports to when no worker holds its lease."""

    async def report(self, *_: Any, **__: Any) -> None:
        pass

    async def sampler_urls(self) -> list[str]:
        return []


# --- what the queue promises, seen from the API


async def test_an_orchestrator_that_is_stopped_gives_its_job_back_at_once(
    settings: Settings, redis_url: str, job: Job
) -> None:
    """With a lease of 30 s, another one goes on at once; the step under way is not trained
    twice."""
    fakes = FakeServices(settings)
    reached, released = asyncio.Event(), asyncio.Event()

    async def block(body: Any) -> None:
        if body.step == 3:
            reached.set()
            await released.wait()

    fakes.fault["train_step"] = block
    async with fakes.running(settings) as settings:
        async with orchestrator(settings, redis_url, stopped=True) as (_, transport):
            client = Client("orchestrator", "http://localhost", transport=transport)
            body = SubmitRequest(job=job)
            record = await client.call("POST", "/v1/jobs", body, JobRecord, deadline_s=60)
            await asyncio.wait_for(reached.wait(), 20)
        released.set()
        async with orchestrator(settings, redis_url) as (store, _):
            async with asyncio.timeout(10):
                while (found := await store.get(record.id)).attempts < 2:
                    await asyncio.sleep(0.02)
            async with asyncio.timeout(90):
                while (found := await store.get(record.id)).status not in TERMINAL:
                    await asyncio.sleep(0.02)
    assert (found.status, found.attempts, found.step) == ("succeeded", 2, 8)
    assert [request.step for request in fakes.trained] == list(range(1, 9))


async def test_a_worker_cut_off_from_redis_stops_before_another_one_takes_over(
    settings: Settings,
    redis_url: str,
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It still reaches the trainer; its connections to Redis hang and do not break."""
    began: dict[int, float] = {}
    ended: dict[int, float] = {}

    class Noted(Run):
        async def run(self) -> Outcome:
            attempt = self._peers.attempt
            began[attempt] = time.monotonic()
            try:
                return await super().run()
            finally:
                ended[attempt] = time.monotonic()

    async def block(body: Any) -> None:
        if body.step == 3 and body.attempt == min(began):
            reached.set()
            await released.wait()

    monkeypatch.setattr(worker, "Run", Noted)
    reached, released = asyncio.Event(), asyncio.Event()
    fakes = FakeServices(settings)
    fakes.fault["train_step"] = block
    settings = settings.model_copy(update={"lease_s": 3.0})
    async with (
        fakes.running(settings) as settings,
        StreamProxy(redis_url.removeprefix("unix://"), tmp_path / "proxy.sock") as proxy,
        orchestrator(settings, f"unix://{proxy.path}") as (_, transport),
    ):
        client = Client("orchestrator", "http://localhost", transport=transport)
        body = SubmitRequest(job=job)
        record = await client.call("POST", "/v1/jobs", body, JobRecord, deadline_s=60)
        await asyncio.wait_for(reached.wait(), 20)
        proxy.stall()
        cut_at = time.monotonic()
        async with orchestrator(settings, redis_url) as (store, _), asyncio.timeout(90):
            while len(began) < 2:
                await asyncio.sleep(0.02)
            first, second = sorted(began)
            assert ended[first] < cut_at + 3.0 and ended[first] < began[second]
            proxy.go_on()
            released.set()
            while (found := await store.get(record.id)).status not in TERMINAL:
                await asyncio.sleep(0.02)
            messages = [event.message for event in await store.events(record.id, "0")]
    assert (found.status, found.attempts) == ("succeeded", 2)
    assert messages.count("running") == 2 and messages.count("succeeded") == 1
    assert [text[:6] for text in messages if ": reward" in text] == [
        f"step {step}" for step in range(1, 9)
    ]


async def test_the_event_of_a_step_that_a_crash_left_out_is_there_after_it(
    settings: Settings, redis_url: str, job: Job
) -> None:
    fakes = FakeServices(settings)
    async with fakes.running(settings) as settings:
        async with orchestrator(settings, redis_url) as (store, transport):
            report, cut = store.report, asyncio.Event()

            async def cut_off(lease: Lease, type: str, *rest: Any, **fields: Any) -> None:
                if type == "eval" and rest[1]["step"] == 4:
                    cut.set()
                    await asyncio.Event().wait()
                await report(lease, type, *rest, **fields)

            store.report = cut_off  # type: ignore[method-assign]
            client = Client("orchestrator", "http://localhost", transport=transport)
            body = SubmitRequest(job=job)
            record = await client.call("POST", "/v1/jobs", body, JobRecord, deadline_s=60)
            await asyncio.wait_for(cut.wait(), 30)
        folder = RunFolder(Path(record.run_dir))
        assert [row.step for row in folder.metrics()] == [0, 1, 2, 3, 4], "written, not yet said"
        settings = settings.model_copy(update={"lease_s": 3.0})
        store = Store(redis_url)
        for lease_key in [key async for key in store._redis.scan_iter("hone:lease:*")]:
            await store._redis.delete(lease_key)
        await store.close()
        async with orchestrator(settings, redis_url) as (store, _):
            async with asyncio.timeout(90):
                while (await store.get(record.id)).status not in TERMINAL:
                    await asyncio.sleep(0.02)
            events = await store.events(record.id, "0")
    steps = [event.data["step"] for event in events if event.type == "step"]
    evals = [event.data["step"] for event in events if event.type == "eval"]
    assert steps == list(range(1, 9)) and evals == [0, 4, 8]


async def test_another_workers_batch_ends_the_work_and_not_the_job(stack: Stack) -> None:
    """As if a worker that was superseded had stored its batch at the last moment."""

    async def slip_in(_: Any) -> None:
        if stack.fakes.step == 3 and stack.fakes.job:
            del stack.fakes.fault["generate"]
            folder = stack.folder(stack.fakes.job.job_id)
            folder.write_batch(folder.batch(3).model_copy(update={"step": 4}))

    stack.settings.__dict__["lease_s"] = 3.0
    stack.fakes.fault["generate"] = slip_in
    record = await stack.until((await stack.submit()).id)
    assert record.status == "succeeded" and record.attempts >= 2
    stored = stack.folder(record.id).batch(4)
    assert stored.groups == stack.folder(record.id).batch(3).groups, "what was there first"


async def test_a_deleted_job_is_gone_and_its_files_stay_unless_they_are_asked_for(
    stack: Stack,
) -> None:
    kept, removed = [await stack.until((await stack.submit()).id) for _ in range(2)]
    for record, query, files in ((kept, "", False), (removed, "?files=true", True)):
        for _ in range(2):
            response = await stack.http.delete(f"/v1/jobs/{record.id}{query}")
            assert response.status_code == 200
            assert response.json() == {"id": record.id, "files": files}
        assert Path(record.run_dir).exists() is not files
        for path in ("", "/events", "/metrics", "/rollouts", "/checkpoints"):
            assert (await stack.http.get(f"/v1/jobs/{record.id}{path}")).status_code == 404
    assert (await stack.client.get("/v1/jobs", JobList)).jobs == ()
    assert (await stack.http.delete("/v1/jobs/nope")).status_code == 404


async def test_a_job_that_has_not_ended_is_not_deleted(stack: Stack) -> None:
    blocked = asyncio.Event()
    stack.fakes.fault["train_step"] = lambda _: blocked.wait()
    running, queued = (await stack.submit()).id, (await stack.submit()).id
    await stack.until(running, "running")
    for job_id, status in ((running, "running"), (queued, "queued")):
        response = await stack.http.delete(f"/v1/jobs/{job_id}?files=true")
        assert response.status_code == 409
        assert f"job {job_id!r} is {status}; cancel it" in response.json()["detail"]
    assert stack.folder(running).path.exists()
    await stack.post(f"{queued}/cancel")
    assert (await stack.http.delete(f"/v1/jobs/{queued}")).status_code == 200
    blocked.set()


async def test_rollouts_are_kept_as_far_back_as_the_job_says(stack: Stack) -> None:
    changes = {
        "rollouts": RolloutsSpec(keep_last=2),
        "checkpoints": CheckpointSpec(every=2, keep_last=2),
    }
    record = await stack.until((await stack.submit(stack.job.model_copy(update=changes))).id)
    assert stack.folder(record.id).batch_steps() == [7, 8]
    response = await stack.http.get(f"/v1/jobs/{record.id}/rollouts?step=3")
    assert response.status_code == 404 and "steps 7 to 8 have" in response.json()["detail"]


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


async def test_a_job_that_cannot_be_read_is_paused_and_the_next_one_runs(
    settings: Settings, redis_url: str, job: Job
) -> None:
    store = Store(redis_url)
    await store.open()
    ids = [(await store.submit(job, settings.runs_dir, None)).id for _ in range(2)]
    await store._redis.hset(f"hone:job:{ids[0]}", "job", '{"name": "demo"}')
    fakes = FakeServices(settings)
    async with fakes.running(settings) as settings, orchestrator(settings, redis_url):
        async with asyncio.timeout(90):
            while (await store.get(ids[1])).status not in TERMINAL:
                await asyncio.sleep(0.02)
        assert await store.status(ids[0]) == "paused"
        last = (await store.events(ids[0], "0"))[-1]
        assert last.level == "warning" and "cannot be read by this version" in last.message
        page = await store.list(None, 10)
    assert page.unreadable == (ids[0],) and [record.id for record in page.jobs] == [ids[1]]
    await store.close()
