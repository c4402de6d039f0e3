"""Two orchestrators, each with a Redis of its own, ask one trainer and one sampler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from services.trainer.app import create_service
from shared.errors import Conflict
from shared.http import ownership
from shared.http.client import Client
from shared.settings import Settings
from shared.wire import (
    Aborted,
    AbortRequest,
    ModelRequest,
    Released,
    ReleaseRequest,
    RolloutGroup,
    ServingWeights,
    StepResult,
    TrainerState,
    Wire,
)
from tests.support.rollout_bench import RolloutBench
from tests.support.trainer_fakes import Engines, job_request, make_trainer, step_request


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[RolloutBench]:
    """A sampler; attempt 9 of job "mine" of the orchestrator "a" has it."""
    bench = RolloutBench(tmp_path)
    async with bench.client:
        bench.client = client_of(bench, "a", "mine")
        await bench.put(ModelRequest(model="tiny", job_id="mine", attempt=9, epoch=1))
        await bench.reload(bench.publish(5, "mine", (9, 1)))
        yield bench


def client_of(bench: RolloutBench, identity: str, job_id: str) -> Client:
    headers = ownership.headers(identity, Settings(), job_id)
    return Client(
        "rollout", "http://localhost", binary=True, transport=bench.transport, headers=headers
    )


@contextlib.asynccontextmanager
async def taken_for(job_id: str):
    with pytest.raises(Conflict) as caught:
        yield
    assert caught.value.code == "taken", caught.value
    assert f"has job {job_id!r} of the orchestrator at" in caught.value.detail


async def test_a_sampler_with_a_job_is_taken_by_no_other_orchestrator(bench: RolloutBench):
    bench.client = client_of(bench, "b", "theirs")
    before = list(bench.engine.calls)
    async with taken_for("mine"):
        await bench.put(ModelRequest(model="tiny", job_id="theirs", attempt=99))
    async with taken_for("mine"):
        await bench.reload(bench.publish(1, "theirs", (99, 1)))
    async with taken_for("mine"):
        await bench.generate(job_id="mine", attempt=9, epoch=1)
    async with taken_for("mine"):
        abort = AbortRequest(job_id="mine", attempt=99)
        await bench.client.call("POST", "/abort", abort, Aborted, deadline_s=1)
    assert bench.engine.calls == before
    assert "has job 'mine'" in ((await weights(bench)).taken or "")
    bench.client = client_of(bench, "a", "mine")
    assert (await weights(bench)).taken is None
    assert (await bench.generate(job_id="mine", attempt=9, epoch=1)).rollouts[0].versions == (5,)


async def weights(bench: RolloutBench) -> ServingWeights:
    return await bench.client.get("/weights", ServingWeights)


async def test_a_sampler_that_a_job_has_left_is_anothers_though_its_fences_are_lower(
    bench: RolloutBench,
):
    abort = AbortRequest(job_id="mine", attempt=9, epoch=1)
    await bench.client.call("POST", "/abort", abort, Aborted, deadline_s=1)
    bench.client = client_of(bench, "b", "theirs")
    await bench.put(ModelRequest(model="tiny", job_id="theirs", attempt=2))
    await bench.reload(bench.publish(1, "theirs", (2, 1)))
    group = await bench.generate(job_id="theirs", attempt=2, epoch=1)
    assert group.rollouts[0].versions == (1,)


async def test_what_a_silent_job_has_under_way_ends_once_another_takes_the_sampler(
    bench: RolloutBench, monkeypatch: pytest.MonkeyPatch
):
    waiting = await bench.frozen_generate(job_id="mine", attempt=9, epoch=1)
    monkeypatch.setattr(ownership, "SILENT_S", 0.0)
    bench.client = client_of(bench, "b", "theirs")
    await bench.put(ModelRequest(model="tiny", job_id="theirs", attempt=2))
    with pytest.raises(Conflict) as caught:
        await waiting
    assert caught.value.code == "taken"
    assert bench.engine.under_way == 0


async def test_agents_are_answered_for_any_owner_of_the_sampler(bench: RolloutBench):
    by_hand = Client("rollout", "http://localhost", binary=True, transport=bench.transport)
    bench.client = by_hand
    group: RolloutGroup = await bench.generate()
    assert group.rollouts[0].versions == (5,)


class Trainers:
    """A trainer in process, and its clients by who they are."""

    def __init__(self, folder: Path) -> None:
        self.engines: Engines
        self.trainer, self.engines = make_trainer(folder)
        self.service = create_service(Settings(), self.trainer, self._run, {})
        self.transport = httpx2.ASGITransport(app=self.service.app)

    async def _run(self, name: str, body: Wire):
        return await asyncio.to_thread(getattr(self.trainer, name), body)

    async def call(self, who: str, job_id: str, method: str, path: str, body: Wire, result):
        headers = ownership.headers(who, Settings(), job_id)
        async with Client(
            "trainer", "http://localhost", transport=self.transport, headers=headers
        ) as client:
            return await client.call(method, path, body, result, deadline_s=5)

    async def load(self, who: str, job_id: str, attempt: int) -> TrainerState:
        body = job_request(job_id).model_copy(update={"attempt": attempt})
        return await self.call(who, job_id, "PUT", "/job", body, TrainerState)

    async def step(self, who: str, job_id: str, attempt: int, step: int) -> StepResult:
        body = step_request(step, job_id=job_id).model_copy(update={"attempt": attempt})
        return await self.call(who, job_id, "POST", "/train_step", body, StepResult)


async def test_a_trainer_with_a_job_is_taken_by_no_other_orchestrator(tmp_path: Path):
    trainers = Trainers(tmp_path)
    await trainers.load("a", "mine", 9)
    async with taken_for("mine"):
        await trainers.load("b", "theirs", 99)
    async with taken_for("mine"):
        await trainers.step("b", "mine", 9, 1)
    async with taken_for("mine"):
        body = ReleaseRequest(job_id="mine", attempt=99)
        await trainers.call("b", "mine", "POST", "/release", body, Released)
    assert (await trainers.step("a", "mine", 9, 1)).step == 1


async def test_a_trainer_that_a_job_has_left_is_anothers_though_its_fences_are_lower(
    tmp_path: Path,
):
    trainers = Trainers(tmp_path)
    await trainers.load("a", "mine", 9)
    body = ReleaseRequest(job_id="mine", attempt=9)
    assert (await trainers.call("a", "mine", "POST", "/release", body, Released)).job_id == "mine"
    assert (await trainers.load("b", "theirs", 2)).job_id == "theirs"
    assert (await trainers.step("b", "theirs", 2, 1)).step == 1
    async with taken_for("theirs"):
        await trainers.load("a", "mine", 10)
    assert trainers.engines.remembered is not None
    assert trainers.engines.remembered.orchestrator is not None
    assert trainers.engines.remembered.orchestrator.identity == "b"
