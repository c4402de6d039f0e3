"""Sampler and trainer on one GPU: the sampler sleeps exactly while the trainer has it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from services.orchestrator.jobs.preflight import check_colocation
from shared.errors import BadRequest
from shared.job import Job, MemorySpec
from shared.settings import Settings
from shared.wire import ResumeRequest
from tests.support import orchestrator_stack
from tests.support.orchestrator_stack import Stack

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"colocate": True})


@pytest.fixture
async def order(stack: Stack) -> AsyncGenerator[list[str]]:
    """What the services were asked for, in order, without what is asked for many times."""
    asked: list[str] = []

    def noting(route: str):
        async def note(_: object) -> None:
            asked.append(route)

        return note

    for route in ("model", "job", "sleep", "train_step", "publish", "reload"):
        stack.fakes.fault[route] = noting(route)
    yield asked


async def test_the_sampler_sleeps_before_each_step_and_wakes_with_its_weights(
    stack: Stack, order: list[str]
) -> None:
    record = await stack.run()
    assert (record.status, record.recoveries) == ("succeeded", 0)
    step = ["sleep", "train_step", "publish", "reload"]
    assert order == ["model", "sleep", "job", "publish", "reload", *step * 8]


async def test_a_change_that_needs_another_gpu_is_refused_when_the_job_is_resumed(
    stack: Stack,
) -> None:
    paused = await stack.submit()
    await stack.post(f"{paused.id}/pause")
    await stack.until(paused.id, "paused")
    with pytest.raises(BadRequest, match=r"HONE_COLOCATE is set.*got memory.zero_stage 3"):
        await stack.post(f"{paused.id}/resume", ResumeRequest(set=("memory.zero_stage=3",)))
    assert (await stack.get(paused.id)).status == "paused"


async def test_a_sampler_that_dies_asleep_is_loaded_again(stack: Stack, order: list[str]) -> None:
    died: list[int] = []

    async def dies(body: object) -> None:
        order.append("train_step")
        if not died:
            died.append(1)
            stack.fakes.serving = stack.fakes.serving.model_copy(update={"model": None})

    stack.fakes.fault["train_step"] = dies
    record = await stack.run()
    assert (record.status, record.recoveries) == ("succeeded", 1)
    again = order[order.index("train_step") :]
    recovery = ["model", "sleep", "job", "publish", "reload"]
    assert again[:8] == ["train_step", "publish", "reload", *recovery]


async def test_a_job_that_cannot_take_turns_is_refused_when_it_is_submitted(
    stack: Stack, job: Job
) -> None:
    for changes, message in (
        ({"max_staleness": 2}, "take turns on one GPU: got max_staleness 2, expected 0"),
        ({"weight_sync": "reload"}, 'sleeps at each step anyway: got weight_sync "reload"'),
        ({"memory": MemorySpec(zero_stage=3)}, "got memory.zero_stage 3, expected 2, or"),
    ):
        with pytest.raises(BadRequest, match=message):
            await stack.submit(job.model_copy(update=changes))


def test_several_samplers_cannot_take_turns_with_one_trainer(job: Job) -> None:
    settings = Settings(colocate=True, rollout_url="http://a:1,http://b:1")
    with pytest.raises(BadRequest, match="got HONE_ROLLOUT_URL 'http://a:1,http://b:1'"):
        check_colocation(job, settings)


def test_a_sampler_that_registers_itself_takes_turns_as_under_compose(job: Job) -> None:
    check_colocation(job, Settings(colocate=True, rollout_url="registered"))
