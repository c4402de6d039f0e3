"""Two orchestrators over one trainer and one Redis, and a partition between one of them and Redis:
one trains, the other has stopped by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.jobs import worker
from services.orchestrator.jobs.attempt import Attempt
from services.orchestrator.jobs.decisions import Outcome
from services.orchestrator.store.folder import RunFolder
from shared.http.client import Client
from shared.job import Job
from shared.settings import Settings
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.link import Link
from tests.support.orchestrator_stack import (
    finish,
    orchestrator,
    orchestrator_client,
    submit,
    until_ended,
)

pytestmark = pytest.mark.slow

job = orchestrator_stack.job  # a fixture

LEASE_S = 5.0
"""Long against the times that a busy machine keeps an event loop waiting."""

ROUTES = ("model", "job", "generate", "train_step", "publish", "reload", "checkpoint", "abort")


@pytest.mark.parametrize("partition", [Link.stall, Link.cut], ids=["bytes", "connections"])
async def test_of_two_orchestrators_one_trains_and_the_one_cut_off_has_stopped(
    settings: Settings,
    redis_url: str,
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    partition: Callable[[Link], None],
) -> None:
    """It still reaches the trainer. Nothing comes from Redis any more: no byte, or no connection.
    When Redis is back, it is as good as the other one."""
    began: dict[int, float] = {}
    ended: dict[int, float] = {}
    asked: list[int] = []

    class Noted(Attempt):
        async def run(self) -> Outcome:
            attempt = self._services.caller.attempt
            began[attempt] = time.monotonic()
            try:
                return await super().run()
            finally:
                ended[attempt] = time.monotonic()

    async def note(body: Any) -> None:
        asked.append(body.attempt)

    async def note_and_hold(body: Any) -> None:
        asked.append(body.attempt)
        if body.step == 3 and body.attempt == min(began):
            reached.set()
            await released.wait()

    monkeypatch.setattr(worker, "Attempt", Noted)
    monkeypatch.setattr(worker, "PAUSE_S", 0.1)
    reached, released = asyncio.Event(), asyncio.Event()
    fakes = FakeServices(settings)
    holding: dict[str, Callable[[Any], Awaitable[None]]] = {"train_step": note_and_hold}
    fakes.fault = dict.fromkeys(ROUTES, note) | holding
    settings = settings.model_copy(update={"lease_s": LEASE_S})
    at = tmp_path / "link.sock"
    async with (
        fakes.running(settings) as settings,
        Link(Path(redis_url.removeprefix("unix://")), at) as link,
        orchestrator_client(settings, f"unix://{at}") as client,
    ):
        record = await submit(client, job)
        await asyncio.wait_for(reached.wait(), 60)
        async with orchestrator(settings, redis_url, stopped=True) as (store, _):
            await asyncio.sleep(3 * worker.POLL_S)
            assert len(began) == 1, "the other one sees that the trainer is leased"
            partition(link)
            cut_at = time.monotonic()
            async with asyncio.timeout(90):
                while len(began) < 2:
                    await asyncio.sleep(0.02)
            first, second = sorted(began)
            assert first in ended, "it runs on beside the other one"
            assert ended[first] < cut_at + LEASE_S and ended[first] < began[second]
            released.set()
            found = await until_ended(store, record.id)
            messages = [event.message for event in await store.events(record.id, "0")]
            link.mend()
        async with asyncio.timeout(90):
            again = await finish(client, job.model_copy(update={"steps": 1}))
    assert (found.status, found.attempts) == ("succeeded", 2)
    assert [request.step for request in fakes.trained][:8] == list(range(1, 9))
    assert asked[: asked.index(second)] == [first] * asked.index(second)
    assert first not in asked[asked.index(second) :], "not even to say that it ends"
    assert messages.count("running") == 2 and messages.count("succeeded") == 1
    assert [text[:6] for text in messages if ": reward" in text] == [
        f"step {step}" for step in range(1, 9)
    ]
    rows = RunFolder(Path(found.run_dir)).metrics()
    assert [row.step for row in rows] == list(range(9))
    assert again.status == "succeeded"


async def test_a_job_is_taken_up_once_when_redis_is_back_after_the_lease(
    settings: Settings, redis_url: str, job: Job, tmp_path: Path
) -> None:
    """The lease is as old as the question for it, however long the worker waited before to give
    the old one back."""
    fakes = FakeServices(settings)
    step_3 = fakes.hold("train_step", lambda body: body.step == 3)
    settings = settings.model_copy(update={"lease_s": LEASE_S})
    at = tmp_path / "link.sock"
    async with (
        fakes.running(settings) as settings,
        Link(Path(redis_url.removeprefix("unix://")), at) as link,
        orchestrator(settings, f"unix://{at}") as (store, transport),
    ):
        client = Client("orchestrator", "http://localhost", transport=transport)
        record = await submit(client, job)
        await step_3.arrival()
        link.cut()
        await asyncio.sleep(1.5 * LEASE_S)
        step_3.released.set()
        link.mend()
        found = await until_ended(store, record.id)
    assert (found.status, found.attempts) == ("succeeded", 2)
    assert [request.step for request in fakes.trained] == list(range(1, 9))
