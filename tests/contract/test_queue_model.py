"""The queue against a model of it in plain Python: random operations by several orchestrators on a
real Redis, and after each the same jobs in the same states and places."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis

from services.orchestrator.store import keys
from services.orchestrator.store.leases import MAX_TRIES, Lease, LeaseLost
from services.orchestrator.store.records import Submission
from services.orchestrator.store.store import Store
from shared.wire import Obstacle
from tests.support.job_records import JOB

RUNS = Path("/runs")
LONG_JOB = JOB.model_copy(update={"steps": 1000})
SAMPLERS = {"t1": ("s1", "s2"), "t2": ("s3",), "t3": ("s2", "s4")}
"""Trainers and their samplers. Orchestrators that were set up differently share `s2`."""

NUM_OPERATIONS = 120
FAST = (3, 8)
"""Seeds that meet each rule of who goes first."""

SEEDS = [
    *FAST,
    *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(60) if seed not in FAST),
]


@dataclass
class Modelled:
    """A job as the model has it. `order` counts submissions."""

    id: str
    order: int
    priority: int
    status: str = "queued"
    begun: bool = False
    trainer: str | None = None
    attempt: int = 0
    tries: int = 0
    asked: set[str] = field(default_factory=set[str])
    step: int = 0

    @property
    def turn(self) -> tuple[int, int]:
        return -self.priority, self.order


class Model:
    def __init__(self) -> None:
        self.jobs: dict[str, Modelled] = {}
        self.leases: dict[str, int] = {}
        """Resource -> attempt."""
        self.registered: dict[str, str | None] = {}
        """Trainer -> why it is unreachable, None if it is not."""
        self.last_attempt = 0
        self.num_submitted = 0

    def has_lease(self, job: Modelled) -> bool:
        return job.trainer is not None and self.leases.get(job.trainer) == job.attempt

    def is_waiting(self, job: Modelled) -> bool:
        return job.status == "queued" or (job.status == "running" and not self.has_lease(job))

    def waiting(self) -> tuple[list[Modelled], list[Modelled]]:
        """Returns the jobs that were begun, and the jobs that were not, each by turn."""
        found = [
            job
            for job in sorted(self.jobs.values(), key=lambda job: job.turn)
            if self.is_waiting(job)
        ]
        return [job for job in found if job.begun], [job for job in found if not job.begun]

    def places(self) -> dict[str, int]:
        begun, queued = self.waiting()
        return {job.id: place for place, job in enumerate(begun + queued, 1)}

    def obstacles(self) -> dict[str, Obstacle]:
        taken = {
            job.trainer or "": Obstacle(job=job.id)
            for job in self.jobs.values()
            if self.has_lease(job)
        }
        return {**self._obstacles_of_free_ones(), **taken}

    def _obstacles_of_free_ones(self) -> dict[str, Obstacle]:
        found: dict[str, Obstacle] = {}
        for trainer, away in self.registered.items():
            attempts = [self.leases[name] for name in SAMPLERS[trainer] if name in self.leases]
            holders = [job.id for job in self.jobs.values() if job.attempt in attempts]
            if holders:
                found[trainer] = Obstacle(job=holders[0])
            elif away:
                found[trainer] = Obstacle(away=away)
        return found

    def is_ready(self, trainer: str | None) -> bool:
        """Whether it is registered as there, and free."""
        if trainer not in self.registered or self.registered[trainer]:
            return False
        return not any(name in self.leases for name in (trainer, *SAMPLERS[trainer]))

    def take(self, trainer: str) -> Modelled | None:
        resources = (trainer, *SAMPLERS[trainer])
        if any(name in self.leases for name in resources):
            return None
        begun, queued = self.waiting()
        own = [job for job in begun if job.trainer == trainer]
        others = [job for job in begun if job not in own and not self.is_ready(job.trainer)]
        for job in [*own, *others, *queued]:
            if job.asked:
                self.end(job, "cancelled" if "cancel" in job.asked else "paused")
                continue
            job.tries += 1
            if job.tries > MAX_TRIES:
                self.end(job, "paused")
                continue
            job.begun, job.status, job.trainer = True, "running", trainer
            return job
        return None

    def grant(self, job: Modelled, attempt: int) -> None:
        assert attempt > self.last_attempt, "attempts grow"
        self.last_attempt = job.attempt = attempt
        assert job.trainer
        for name in (job.trainer, *SAMPLERS[job.trainer]):
            self.leases[name] = attempt

    def free(self, attempt: int) -> None:
        self.leases = {name: each for name, each in self.leases.items() if each != attempt}

    def end(self, job: Modelled, status: str) -> None:
        job.status, job.begun = status, False
        job.asked.discard("pause")

    def is_current(self, lease: Lease) -> bool:
        job = self.jobs.get(lease.job_id)
        if job is None or job.status != "running" or job.attempt != lease.attempt:
            return False
        return self.has_lease(job)


class Driver:
    """Does each operation to both, and compares."""

    def __init__(self, stores: list[Store], raw: Any, seed: int) -> None:
        self.stores, self.raw = stores, raw
        self.model = Model()
        self.choose = random.Random(seed)
        self.leases: list[Lease] = []

    @property
    def store(self) -> Store:
        return self.choose.choice(self.stores)

    def job(self, *statuses: str) -> Modelled | None:
        fitting = [job for job in self.model.jobs.values() if job.status in statuses]
        return self.choose.choice(fitting) if fitting else None

    async def submit(self) -> None:
        priority = self.choose.choice((-3, 0, 0, 0, 100))
        job = LONG_JOB.model_copy(update={"priority": priority})
        record = await self.store.submit(Submission(job, RUNS))
        model = self.model
        model.num_submitted += 1
        model.jobs[record.id] = Modelled(record.id, model.num_submitted, priority)

    async def take(self) -> None:
        trainer = self.choose.choice(list(SAMPLERS))
        expected = self.model.take(trainer)
        lease = await self.store.take("worker", trainer, 1000.0, SAMPLERS[trainer])
        assert (lease and lease.job_id) == (expected and expected.id)
        if lease and expected:
            self.model.grant(expected, lease.attempt)
            self.leases.append(lease)

    async def register(self) -> None:
        """A worker says whether its trainer is there."""
        trainer, away = self.choose.choice(list(SAMPLERS)), self.choose.choice((None, None, "away"))
        await self.store.trainers.register(f"{trainer}/host", trainer, SAMPLERS[trainer], away)
        self.model.registered[trainer] = away

    async def leave(self, lease: Lease, job: Modelled) -> None:
        await self.store.leave(lease, "another attempt has it")
        self.model.free(lease.attempt)
        if job.asked:
            self.model.end(job, "cancelled" if "cancel" in job.asked else "paused")
        else:
            job.status = "queued"

    async def expire(self) -> None:
        """As Redis does when no one renews it."""
        if self.leases:
            attempt = self.choose.choice(self.leases[-4:]).attempt
            names = [name for name, each in self.model.leases.items() if each == attempt]
            for name in names:
                await self.raw.delete(keys.LEASE + name)
            self.model.free(attempt)

    async def work(self) -> None:
        """A worker, perhaps a superseded one, does something with its lease."""
        if not self.leases:
            return
        lease = self.choose.choice(self.leases[-6:])
        job, is_current = self.model.jobs.get(lease.job_id), self.model.is_current(lease)
        what = self.choose.choice(
            (self.beat, self.step, self.finish, self.halt, self.halt_why, self.leave)
        )
        if is_current:
            assert job
            await what(lease, job)
        else:
            with pytest.raises(LeaseLost):
                await what(lease, Modelled("", 0, 0))

    async def beat(self, lease: Lease, job: Modelled) -> None:
        asked = await self.store.beat(lease)
        assert asked == ("cancel" if "cancel" in job.asked else "pause" if job.asked else None)

    async def step(self, lease: Lease, job: Modelled) -> None:
        await self.store.report(lease, "step", "a step", {"step": job.step + 1}, step=job.step + 1)
        job.step, job.tries = job.step + 1, 0

    async def finish(self, lease: Lease, job: Modelled) -> None:
        status = self.choose.choice(("succeeded", "failed"))
        await self.store.report(lease, "status", status, {"status": status}, status=status)
        self.model.free(lease.attempt)
        self.model.end(job, status)

    async def halt(self, lease: Lease, job: Modelled) -> None:
        await self.store.halt(lease, None)
        self.model.free(lease.attempt)
        if job.asked:
            self.model.end(job, "cancelled" if "cancel" in job.asked else "paused")
        else:
            job.status, job.tries = "queued", max(job.tries - 1, 0)

    async def halt_why(self, lease: Lease, job: Modelled) -> None:
        await self.store.halt(lease, "a disk is full")
        self.model.free(lease.attempt)
        self.model.end(job, "cancelled" if "cancel" in job.asked else "paused")

    async def pause(self) -> None:
        if job := self.job("queued", "running"):
            await self.store.pause(job.id)
            if self.model.is_waiting(job):
                self.model.end(job, "cancelled" if "cancel" in job.asked else "paused")
            else:
                job.asked.add("pause")

    async def resume(self) -> None:
        if job := self.job("paused"):
            changed = None
            if self.choose.random() < 0.3:
                job.priority = self.choose.choice((-1, 5))
                changed = LONG_JOB.model_copy(update={"priority": job.priority})
            await self.store.resume(job.id, changed)
            job.status, job.tries, job.begun = "queued", 0, False

    async def cancel(self) -> None:
        if job := self.job("queued", "running", "paused"):
            await self.store.cancel(job.id)
            if job.status == "paused" or self.model.is_waiting(job):
                self.model.end(job, "cancelled")
            else:
                job.asked.add("cancel")

    async def delete(self) -> None:
        if job := self.job("succeeded", "failed", "cancelled"):
            await self.store.delete(job.id)
            del self.model.jobs[job.id]

    async def compare(self) -> None:
        model = self.model
        listed = await self.store.list(None, 1000)
        places, obstacles = model.places(), model.obstacles()
        shown = {job.id: (job.status, job.place, job.waits_for, job.step) for job in listed.jobs}
        expected = {
            job.id: (
                job.status,
                places.get(job.id),
                obstacles if model.is_waiting(job) else {},
                job.step,
            )
            for job in model.jobs.values()
        }
        assert shown == expected


WEIGHTS = {
    Driver.submit: 5,
    Driver.take: 8,
    Driver.work: 8,
    Driver.expire: 3,
    Driver.register: 3,
    Driver.pause: 2,
    Driver.resume: 3,
    Driver.cancel: 1,
    Driver.delete: 1,
}


@pytest.fixture
async def stores(redis_url: str) -> AsyncGenerator[list[Store]]:
    stores = [Store(redis_url), Store(redis_url)]
    for store in stores:
        await store.open()
    yield stores
    for store in stores:
        await store.close()


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_queue_does_what_its_model_does(
    stores: list[Store], redis_url: str, seed: int
) -> None:
    raw = redis.from_url(redis_url, decode_responses=True)
    driver = Driver(stores, raw, seed)
    operations = driver.choose.choices(list(WEIGHTS), list(WEIGHTS.values()), k=NUM_OPERATIONS)
    for operation in operations:
        await operation(driver)
        await driver.compare()
    await raw.aclose()


async def test_of_many_orchestrators_none_gets_what_another_one_has(redis_url: str) -> None:
    """Each worker has all trainers; a worker with a job holds its trainer and samplers alone."""
    stores = [Store(redis_url) for _ in range(4)]
    await stores[0].open()
    ids = {(await stores[0].submit(Submission(LONG_JOB, RUNS))).id for _ in range(24)}
    held: set[str] = set()
    done: list[str] = []

    async def work(store: Store, trainer: str) -> None:
        while len(done) < len(ids):
            lease = await store.take("worker", trainer, 1000.0, SAMPLERS[trainer])
            if lease is None:
                await asyncio.sleep(0.001)
                continue
            resources = {trainer, *SAMPLERS[trainer]}
            assert not held & resources
            held.update(resources)
            await asyncio.sleep(0)
            done.append(lease.job_id)
            held.difference_update(resources)
            await store.report(lease, "status", "ok", {"status": "succeeded"}, status="succeeded")

    async with asyncio.timeout(90):
        await asyncio.gather(*(work(store, trainer) for store in stores for trainer in SAMPLERS))
    for store in stores:
        await store.close()
    assert set(done) == ids and len(done) == len(ids)
