"""What ends a job early, how many steps epochs are, which problems and checkpoints it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from hone import view
from services.orchestrator.jobs import results
from services.orchestrator.store.folder import RunFolder
from shared.errors import BadRequest
from shared.job import Job
from shared.job.file import parse_job
from shared.settings import Settings
from shared.wire import (
    TERMINAL,
    CheckpointList,
    DryRun,
    JobRecord,
    JobState,
    Part,
    ResumeRequest,
    ScoreItem,
    SubmitRequest,
)
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.orchestrator_stack import Stack, orchestrator_client

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures


def changed(job: Job, **changes: Any) -> Job:
    document = job.model_dump(mode="json")
    for key, value in changes.items():
        document[key] = document[key] | value if isinstance(value, dict) else value
    return parse_job(document)


async def run(stack: Stack, **changes: Any) -> JobRecord:
    return await stack.run(job=changed(stack.job, **changes))


def metrics(record: JobRecord, step: int) -> dict[str, float]:
    return {row.step: row.metrics for row in RunFolder(Path(record.run_dir)).metrics()}[step]


async def paused_within(
    stack: Stack,
    operation: str,
    job: Job | None = None,
    *,
    when: Callable[[Any], bool] = lambda _: True,
) -> JobRecord:
    """Returns the record of a job that was paused during its first `operation` with a body for
    which `when` holds."""
    hold = stack.fakes.hold(operation, when)
    job_id = (await stack.submit(job)).id
    await hold.arrival()
    await stack.post(f"{job_id}/pause")
    paused = await stack.until(job_id, "paused")
    del stack.fakes.fault[operation]
    return paused


# --- targets -------------------------------------------------------------------------------------


async def test_a_target_ends_the_job_with_a_checkpoint(stack: Stack) -> None:
    stack.fakes.grade = lambda _: Part(value=0.2 * stack.fakes.step)
    record = await run(stack, evaluation={"every": 2}, stop={"target": 0.8})
    assert (record.status, record.step, record.error) == ("succeeded", 4, None)
    why = "stopped after step 4: eval/reward is 0.8, and stop.target is 0.8"
    assert record.stopped == why and record.summary is not None
    assert (record.summary["steps"], record.summary["stopped"]) == (4, why)
    assert record.summary["checkpoint"].endswith("step-000004")
    assert [row.step for row in RunFolder(Path(record.run_dir)).metrics()] == [0, 1, 2, 3, 4]
    assert why in [event.message for event in await stack.events(record.id)]
    assert stack.fakes.calls["train_step"] == 4


async def test_a_target_that_is_met_before_training_ends_the_job_there(stack: Stack) -> None:
    stack.fakes.skills = {"m": 1.0}
    record = await run(stack, stop={"target": 1.0, "metric": "pass@1"})
    assert (record.status, record.step, stack.fakes.calls["train_step"]) == ("succeeded", 0, 0)
    assert record.stopped is not None and record.stopped.startswith("stopped after step 0")


async def test_a_target_that_is_met_by_the_last_step_is_no_early_end(stack: Stack) -> None:
    stack.fakes.grade = lambda _: Part(value=0.1 * stack.fakes.step)
    record = await run(stack, stop={"target": 0.8})
    assert (record.status, record.step, record.stopped) == ("succeeded", 8, None)
    assert record.summary is not None and record.summary["stopped"] is None


async def test_a_job_that_has_met_its_target_trains_no_further_when_it_continues(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut off between its last row and its summary."""
    stack.fakes.grade = lambda _: Part(value=0.2 * stack.fakes.step)

    def full(*_: Any) -> None:
        raise RuntimeError("cut off")

    monkeypatch.setattr(RunFolder, "write_summary", full)
    job = changed(stack.job, evaluation={"every": 2}, stop={"target": 0.8})
    paused = await stack.run("paused", job=job)
    monkeypatch.undo()
    await stack.post(f"{paused.id}/resume", ResumeRequest())
    record = await stack.until(paused.id)
    assert (record.status, record.step, stack.fakes.calls["train_step"]) == ("succeeded", 4, 4)
    assert record.stopped is not None and "eval/reward is 0.8" in record.stopped


# --- budgets -------------------------------------------------------------------------------------


async def test_a_budget_of_tokens_ends_the_job_after_the_step_that_reaches_it(
    stack: Stack,
) -> None:
    """A step samples 2 groups of 4 completions of 2 tokens: 16. The third does not sync, for
    which its evaluation is no reason to wait for ever."""
    record = await run(stack, max_staleness=2, sync_every=2, stop={"max_tokens": 40})
    assert (record.status, record.step) == ("succeeded", 3)
    assert [metrics(record, step)["total/tokens"] for step in (1, 2, 3)] == [16, 32, 48]
    assert record.stopped == (
        "stopped after step 3: 48 tokens were sampled, and stop.max_tokens is 40"
    )
    assert "eval/reward" in metrics(record, 3) and 3 in stack.fakes.checkpointed
    assert [ref.version for ref in stack.fakes.reloads] == [0, 2, 3]


async def test_tokens_of_replaced_groups_are_counted(stack: Stack) -> None:
    stack.fakes.grade = lambda item: Part(value=float(item.row["answer"] >= 20))  # none
    record = await run(stack, steps=1, sampling={"refills": 1})
    assert metrics(record, 1)["dropped_groups"] == 2
    assert metrics(record, 1)["total/tokens"] == 32
    (batch,) = [RunFolder(Path(record.run_dir)).batch(1)]
    of_both = {*batch.dropped_prompts, *(prompt.index for prompt in batch.prompts)}
    assert len(batch.dropped_prompts) == 2 and len(of_both) == 4


async def test_a_budget_continues_counting_and_can_be_raised(stack: Stack) -> None:
    job = changed(stack.job, stop={"max_tokens": 40})
    id = (await paused_within(stack, "train_step", job, when=lambda body: body.step == 3)).id
    await stack.post(f"{id}/resume", ResumeRequest(set=("stop.max_tokens=70",)))
    record = await stack.until(id)
    assert (record.status, record.step) == ("succeeded", 5)
    assert [metrics(record, step)["total/tokens"] for step in (3, 5)] == [48, 80]
    assert 0 < metrics(record, 2)["total/hours"] < metrics(record, 3)["total/hours"]


async def test_a_job_that_has_cost_what_it_may_pauses_until_it_may_cost_more(
    settings: Settings, redis_url: str, job: Job
) -> None:
    """An hour is so dear that each step costs more than 1."""
    dear = settings.model_copy(update={"price_per_hour": 1e6, "currency": "EUR"})
    fakes = FakeServices(dear)
    async with (
        fakes.running(dear) as running,
        orchestrator_client(running, redis_url) as client,
    ):

        async def go_on(id: str, *statuses: str, changes: tuple[str, ...] = ()) -> JobRecord:
            path, body = f"/v1/jobs/{id}/resume", ResumeRequest(set=changes)
            await client.call("POST", path, body, JobState, deadline_s=30)
            return await orchestrator_stack.ended(client, id, *statuses)

        wanted = changed(job, stop={"max_cost": 1.0}, checkpoints={"every": 0})
        paused = await orchestrator_stack.finish(client, wanted, "paused")
        assert paused.step == 1 and 1 in fakes.checkpointed
        assert paused.error is not None
        assert paused.error.startswith("after step 1: it has cost ")
        assert "at 1e+06 each), and stop.max_cost is 1; `hone " in paused.error
        assert f"`hone resume {paused.id} --set stop.max_cost=COST` raises it" in paused.error
        found = metrics(paused, 1)
        assert found["total/cost"] == pytest.approx(1e6 * found["total/hours"])
        assert (paused.cost, paused.currency) == (pytest.approx(found["total/cost"]), "EUR")
        (table,) = view.job_details(paused).renderables
        assert isinstance(table, Table)
        assert f"{paused.cost:.2f} EUR" in str([*table.columns[1].cells])
        asked = fakes.calls.copy()
        again = await go_on(paused.id, "paused")
        assert again.error is not None and again.error.startswith("it has cost ")
        assert fakes.calls["train_step"] == asked["train_step"] == 1, "nothing was loaded"
        record = await go_on(paused.id, changes=("stop.max_cost=1e12",))
        assert (record.status, record.step, fakes.calls["train_step"]) == ("succeeded", 8, 8)


async def test_a_job_that_has_reached_its_end_does_not_pause_at_its_cost(
    settings: Settings, redis_url: str, job: Job
) -> None:
    """It died after the row that ends it: to end costs nothing more."""
    dear = settings.model_copy(update={"price_per_hour": 1e6})
    fakes = FakeServices(dear)
    async with (
        fakes.running(dear) as running,
        orchestrator_client(running, redis_url) as client,
    ):
        paused = await orchestrator_stack.finish(
            client, changed(job, stop={"max_cost": 1.0}), "paused"
        )
        path, body = f"/v1/jobs/{paused.id}/resume", ResumeRequest(set=("stop.max_tokens=1",))
        await client.call("POST", path, body, JobState, deadline_s=30)
        record = await orchestrator_stack.ended(client, paused.id)
        assert (record.status, record.step, record.error) == ("succeeded", 1, None)


async def test_a_cost_needs_a_price(stack: Stack) -> None:
    with pytest.raises(BadRequest) as raised:
        await stack.submit(changed(stack.job, stop={"max_cost": 5}))
    assert raised.value.detail.startswith(
        "stop.max_cost is 5, and what an hour costs is not known; set HONE_PRICE_PER_HOUR"
    )


async def test_a_paused_job_is_given_no_cost_where_no_price_is_known(stack: Stack) -> None:
    job_id = (await paused_within(stack, "train_step")).id
    with pytest.raises(BadRequest, match=r"stop\.max_cost is 5, and what an hour costs is not"):
        await stack.post(f"{job_id}/resume", ResumeRequest(set=("stop.max_cost=5",)))
    assert (await stack.get(job_id)).status == "paused"


async def test_a_job_that_ends_as_it_continues_keeps_its_best_and_is_evaluated(
    stack: Stack,
) -> None:
    """Step 2 did best; the budget is lowered while the job is paused after step 3."""
    stack.fakes.grade = lambda _: Part(value=0.9 if stack.fakes.step == 2 else 0.1)
    checkpoints = {"every": 2, "keep_last": 1}
    job = changed(stack.job, evaluation={"every": 2}, checkpoints=checkpoints)
    id = (await paused_within(stack, "train_step", job, when=lambda body: body.step == 4)).id
    await stack.post(f"{id}/resume", ResumeRequest(set=("stop.max_tokens=1",)))
    record = await stack.until(id)
    assert (record.status, record.step) == ("succeeded", 3)
    assert stack.fakes.kept == {2: (), 3: (2,)}
    assert metrics(record, 3)["eval/reward"] == pytest.approx(0.1)
    assert record.summary is not None and record.summary["best_step"] == 2
    assert record.summary["eval_after"] == pytest.approx(0.1)
    assert [step for step, _ in record.summary["evals"]] == [0, 2, 3]


async def test_a_budget_lowered_after_an_unrecorded_step_ends_the_job_after_that(
    stack: Stack,
) -> None:
    """Paused between the training of step 4 and its row: the trainer has no other weights."""
    id = await paused_after_training(stack, 4)
    await stack.post(f"{id}/resume", ResumeRequest(set=("stop.max_tokens=1",)))
    record = await stack.until(id, *TERMINAL, "paused")
    assert (record.status, record.step, record.error) == ("succeeded", 4, None)
    assert (record.stopped or "").startswith("stopped after step 4: ")
    assert [body.step for body in stack.fakes.trained] == [1, 2, 3, 4]


async def test_steps_lowered_below_what_is_trained_pause_the_job_with_a_remedy(
    stack: Stack,
) -> None:
    id = await paused_after_training(stack, 4)
    await stack.post(f"{id}/resume", ResumeRequest(set=("steps=3",)))
    paused = await stack.until(id, *TERMINAL, "paused")
    assert (paused.status, stack.fakes.calls["checkpoint"]) == ("paused", 1)  # by the pause
    assert (paused.error or "").startswith(
        "the trainer has done step 4, and steps is 3; expected 4 or more: "
        f"`hone resume {id} --set steps=4`"
    )
    await stack.post(f"{id}/resume", ResumeRequest(set=("steps=4",)))
    assert (await stack.until(id)).status == "succeeded"


async def paused_after_training(stack: Stack, step: int) -> str:
    """Returns the id of a job that was paused when the trainer had done the step, and no row of
    it was there yet."""
    paused = await paused_within(stack, "publish", when=lambda body: body.version == step)
    assert paused.step == step - 1
    return paused.id


async def test_hours_of_an_attempt_without_a_row_are_counted(stack: Stack) -> None:
    job = changed(stack.job, steps=1, data={"eval": None})
    paused = await paused_within(stack, "train_step", job)
    folder = RunFolder(Path(paused.run_dir))
    assert folder.spent()[0] > 0
    folder.write_spent(5.0, 0.0)
    folder.write_spent(4.0, 0.0)  # of a worker that was superseded
    await stack.post(f"{paused.id}/resume", ResumeRequest())
    record = await stack.until(paused.id)
    assert metrics(record, 1)["total/hours"] == pytest.approx(5.0, abs=0.1)
    assert folder.spent()[0] >= metrics(record, 1)["total/hours"]


async def test_what_an_attempt_takes_is_on_disk_before_it_ends(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be killed, before it has recorded a row and while its data is checked, too."""
    monkeypatch.setattr(results, "NOTE_SPENT_S", 0.01)
    training = stack.fakes.hold("train_step")
    id = (await stack.submit(changed(stack.job, steps=1, data={"eval": None}))).id
    folder = stack.folder(id)
    async with asyncio.timeout(90):
        while folder.spent()[0] == 0:
            await asyncio.sleep(0.02)
    training.released.set()
    await stack.until(id)


# --- epochs --------------------------------------------------------------------------------------


async def test_epochs_are_steps_once_the_rows_are_counted(stack: Stack) -> None:
    for given, data, steps in (
        (0, {"epochs": 2}, 20),  # 2 * 20 rows, 2 a step
        (0, {"epochs": 0.3}, 3),
        (0, {"epochs": 1, "max_samples": 9}, 5),
        (2, {"epochs": 2}, 2),
        (30, {"epochs": 2}, 20),
    ):
        job = changed(stack.job, steps=given, data=data)
        for _ in range(2):  # what was counted counts the same again
            body = SubmitRequest(job=job)
            tried = await stack.client.call("POST", "/v1/jobs/dry_run", body, DryRun, deadline_s=30)
            job = tried.job
            assert job.steps == steps


async def test_a_job_of_epochs_has_its_steps_in_its_record(stack: Stack) -> None:
    record = await run(stack, steps=0, data={"epochs": 0.2})
    assert (record.status, record.step, record.steps, record.job.steps) == ("succeeded", 2, 2, 2)
    paused = await stack.submit(changed(stack.job, steps=0, data={"epochs": 1}))
    await stack.post(f"{paused.id}/pause")
    with pytest.raises(BadRequest, match="steps: got 0, but 0 are done"):
        await stack.post(f"{paused.id}/resume", ResumeRequest(set=("steps=0",)))


# --- difficulty ----------------------------------------------------------------------------------

EASY = 10
"""Rows below are always answered right, and the others never."""


def by_difficulty(item: ScoreItem) -> Part:
    return Part(value=float(int(str(item.row["answer"])) < EASY))


def skipping(job: Job, **changes: Any) -> Job:
    sampling, difficulty = {"prompts_per_step": 6}, {"skip_right": 1}
    return changed(job, data={"eval": None}, sampling=sampling, difficulty=difficulty, **changes)


def taken(record: JobRecord) -> list[list[int]]:
    folder = RunFolder(Path(record.run_dir))
    batches = [folder.batch(step) for step in folder.batch_steps()]
    return [[prompt.index for prompt in batch.prompts] for batch in batches]


async def test_problems_that_are_solved_are_not_sampled_again(stack: Stack) -> None:
    stack.fakes.grade = by_difficulty
    record = await stack.run(job=skipping(stack.job))
    steps = taken(record)
    easy = [number for numbers in steps for number in numbers if number < EASY]
    assert sorted(easy) == list(range(EASY)), "each of them once"
    assert len(steps) == 8 and {len(numbers) for numbers in steps} == {6}
    assert [metrics(record, step)["skipped_problems"] for step in (1, 8)] == [0, EASY]


async def test_a_job_that_was_cut_off_skips_what_it_would_have_skipped(
    settings: Settings, redis_url: str, job: Job
) -> None:
    """Twice the same job; the second time the orchestrator dies, and the trainer goes back to a
    checkpoint: batches since are replayed, and later ones are of the same problems."""
    job = skipping(job, checkpoints={"every": 3})
    settings = settings.model_copy(update={"lease_s": 5.0})
    undisturbed = FakeServices(settings)
    undisturbed.grade = by_difficulty
    async with (
        undisturbed.running(settings) as of_first,
        orchestrator_client(of_first, redis_url) as client,
    ):
        expected = await orchestrator_stack.finish(client, job)
    fakes, reached = FakeServices(settings), asyncio.Event()
    fakes.grade = by_difficulty

    async def cut_off(body: Any) -> None:
        if body.step == 5 and not reached.is_set():
            reached.set()
            await asyncio.sleep(60)

    fakes.fault["train_step"] = cut_off
    async with fakes.running(settings) as of_second:
        async with orchestrator_client(of_second, redis_url) as client:
            record = await orchestrator_stack.submit(client, job)
            await asyncio.wait_for(reached.wait(), 60)
        fakes.restart_trainer()
        async with orchestrator_client(of_second, redis_url) as client:
            async with asyncio.timeout(90):
                while record.status != "succeeded":
                    record = await client.get(f"/v1/jobs/{record.id}", JobRecord)
                    await asyncio.sleep(0.05)
    assert record.attempts == 2 and fakes.step == 8
    assert taken(record) == taken(expected)
    assert sorted(RunFolder(Path(record.run_dir)).verdicts()) == list(range(1, 9))


# --- evaluation and checkpoints ------------------------------------------------------------------


async def test_the_best_checkpoint_is_kept(stack: Stack) -> None:
    stack.fakes.grade = lambda _: Part(value=0.9 if stack.fakes.step == 4 else 0.1)
    checkpoints = {"every": 2, "keep_last": 1}
    record = await run(stack, evaluation={"every": 2}, checkpoints=checkpoints)
    assert stack.fakes.kept == {2: (), 4: (2,), 6: (4,), 8: (4,)}
    listed = await stack.client.get(f"/v1/jobs/{record.id}/checkpoints", CheckpointList)
    assert [checkpoint.step for checkpoint in listed.checkpoints] == [4, 8]
    assert record.summary is not None and record.summary["best_step"] == 4


async def test_held_out_sets_with_names_are_evaluated_beside_the_first(stack: Stack) -> None:
    rows = [{"prompt": "8?", "answer": 8}]
    stack.fakes.grade = lambda item: Part(value=float(item.row["answer"] == 8))
    record = await run(
        stack,
        evaluation={"sets": {"hard": {"source": rows}}, "samples": 2, "temperature": 1.0},
        steps=4,
    )
    for step in (0, 4):
        found = metrics(record, step)
        assert (found["eval/reward"], found["eval/hard/reward"]) == (0, 1)
        assert (found["eval/pass@2"], found["eval/hard/pass@2"]) == (0, 1)
        assert found["eval/hard/completions/mean_length"] == 2
        assert found["eval/hard/completions/clipped_ratio"] == 0
    evals = [event for event in await stack.events(record.id) if event.type == "eval"]
    assert evals[0].message == (
        "step 0: held-out reward 0.000, 1.000 (hard); pass@1 0.000, 1.000 (hard)"
    )


async def test_a_job_with_nothing_but_named_sets_evaluates_them(stack: Stack) -> None:
    stack.fakes.grade = lambda _: Part(value=0.25 * stack.fakes.step)
    sets = {"hard": {"source": [{"prompt": "8?", "answer": 8}]}}
    record = await run(
        stack,
        data={"eval": None},
        evaluation={"sets": sets, "every": 1},
        stop={"target": 0.5, "metric": "hard/reward"},
        checkpoints={"keep_best": "hard/reward", "every": 1},
    )
    assert (record.status, record.step) == ("succeeded", 2)
    assert record.summary is not None and record.summary["best_step"] == 2
