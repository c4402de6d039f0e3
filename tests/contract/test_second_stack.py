"""Two orchestrators, each with a Redis and a worker of its own, over one trainer and sampler."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.orchestrator.jobs import needs, recovery, worker
from shared.job import Job
from shared.settings import Settings
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.orchestrator_stack import full_stack
from tests.support.running import running_redis

pytestmark = pytest.mark.slow

job = orchestrator_stack.job  # fixture


async def test_a_second_stacks_job_waits_until_the_first_ones_has_ended(
    settings: Settings, redis_url: str, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "LOOK_AT_NEEDS_S", 0.05)
    monkeypatch.setattr(worker, "REGISTER_TRAINER_S", 0.05)
    monkeypatch.setattr(recovery, "PAUSES_S", (0.0,))
    monkeypatch.setattr(recovery, "LOOK_AT_MISSING_S", 0.05)
    fakes = FakeServices(settings)
    training = fakes.hold("train_step")
    with running_redis(tmp_path / "other-redis") as other_redis:
        async with fakes.running(settings) as own:
            theirs = own.model_copy(update={"runs_dir": tmp_path / "theirs"})
            async with (
                full_stack(fakes, own, redis_url, job) as first,
                full_stack(fakes, theirs, other_redis, job) as second,
            ):
                mine = await first.submit()
                await training.arrival()
                waiting = await second.submit()
                async with asyncio.timeout(90):
                    while not (found := await second.get(waiting.id)).waits_for:
                        await asyncio.sleep(0.02)
                (obstacle,) = found.waits_for.values()
                whose = f"has job {mine.id!r} of the orchestrator at "
                assert obstacle.away and f"the trainer {whose}" in obstacle.away
                assert f"the sampler {whose}" in obstacle.away
                assert (found.status, found.attempts) == ("queued", 0)
                training.released.set()
                done = await first.until(mine.id)
                assert (done.status, done.attempts, done.recoveries) == ("succeeded", 1, 0)
                ended = await second.until(waiting.id)
                assert (ended.status, ended.attempts) == ("succeeded", 1)
